"""Converted models move along the spectrum."""

from __future__ import annotations

import torch
from torch import nn

import convnn
from convnn import HybridConv2d, MultiheadConvNN, morph


def test_hybrids_of_a_converted_network_leave_space_by_their_share() -> None:
    first = nn.Conv2d(3, 8, 3, padding=1)
    net = nn.Sequential(first, nn.ReLU(), nn.Conv2d(8, 6, 3, padding=1)).eval()
    x = torch.randn(2, 3, 7, 9)
    twin, report = convnn.convert(net, {"*": HybridConv2d.using(ratio=0.5)})
    assert report.exact
    assert morph.dial(twin) == {"0.convnn": [0.0], "2.convnn": [0.0]}
    way = morph.line(0, 1, over=2)
    distances = []
    for epoch in range(3):
        morph.apply(twin, share=way(epoch))
        distances.append((twin(x) - net(x)).norm().item())
    assert distances[0] < 1e-4 < distances[1]
    assert morph.dial(twin) == {"0.convnn": [1.0], "2.convnn": [1.0]}
    morph.apply(twin, share=0.0)
    again, _ = convnn.revert(twin)
    assert torch.equal(again[0].weight, first.weight)


def test_attention_of_a_converted_encoder_is_annealed() -> None:
    encoder = nn.TransformerEncoderLayer(16, 2, 20, dropout=0.0, batch_first=True).eval()
    x = torch.randn(2, 11, 16)
    twin, _ = convnn.convert(encoder, {"*attn": MultiheadConvNN.using(k=11, kernel=None)})
    torch.testing.assert_close(twin(x), encoder(x), atol=1e-5, rtol=1e-5)
    way = morph.stages({0: 11, 1: 6, 2: 3})
    outputs = []
    for epoch in range(3):
        morph.apply(twin, k=way(epoch))
        outputs.append(twin(x))
    assert twin.self_attn.k == 3
    assert (outputs[1] - outputs[0]).norm() > 1e-3
    expected, _ = convnn.convert(encoder, {"*attn": MultiheadConvNN.using(k=3, kernel=None)})
    torch.testing.assert_close(outputs[2], expected(x))

"""What the kernels found is seen, and they compute the same bits while it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import convnn
from convnn import ConvNN2d, ConvNNAttention, HybridConv1d
from convnn.candidates import random
from tests.triton.runner import DEVICE

LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "attention": (lambda b: ConvNNAttention(8, 2, k=3, attn_drop=0.4, backend=b), (1, 9, 8)),
    "many keys": (lambda b: ConvNNAttention(8, 1, k=3, backend=b), (1, 65, 8)),
    "candidates": (lambda b: ConvNNAttention(8, 2, k=3, candidates=random(6), backend=b), (1, 9, 8)),
    "all": (lambda b: ConvNNAttention(8, 2, k="all", kernel=None, backend=b), (2, 9, 8)),
    "map": (lambda b: ConvNN2d(4, 6, 3, padding=1, similarity="cosine", backend=b), (2, 4, 5, 6)),
    "hybrid": (lambda b: HybridConv1d(4, 6, 3, backend=b), (2, 4, 20)),
}


def trained(layer: Any, x: Tensor) -> list[Tensor]:
    torch.manual_seed(3)
    layer.zero_grad()
    output = layer(x)
    output.square().sum().backward()
    return [output.detach(), *(parameter.grad for parameter in layer.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize("name", LAYERS)
def test_recorded_kernels_compute_the_same_bits_and_show_what_the_reference_finds(name: str) -> None:
    make, shape = LAYERS[name]
    layer, x = make("triton").to(DEVICE), torch.randn(shape, device=DEVICE)
    before = trained(layer, x)
    with convnn.record(layer, device="cpu") as seen:
        inside = trained(layer, x)
    assert all(map(torch.equal, before, inside))
    other = make("reference").to(DEVICE)
    other.load_state_dict(layer.state_dict())
    with convnn.record(other, device="cpu") as expected:
        trained(other, x)
    assert list(seen) == list(expected) != []
    for ours, theirs in zip(seen.calls, expected.calls, strict=True):
        torch.testing.assert_close(ours.scores, theirs.scores, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.weights, theirs.weights, rtol=1e-5, atol=1e-5)
        if name != "map":  # of the cells of the padding all are alike
            assert torch.equal(ours.index, theirs.index)

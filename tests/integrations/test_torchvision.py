"""Swin's windows, both versions: all cells or the k nearest, with bias and shift."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import swin_transformer as swin  # type: ignore[import-untyped]

import convnn
from convnn import ConvNNAttention, HybridConv2d, MultiheadConvNN

KINDS = [swin.ShiftedWindowAttention, swin.ShiftedWindowAttentionV2]


def attention(kind: Any, shift: tuple[int, int], **options: Any) -> nn.Module:
    module = kind(12, [3, 4], list(shift), 2, **options).eval()
    with torch.no_grad():
        for parameter in module.parameters():  # the bias of the keys too, which the second version has and does not use
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


class Nearest:
    """Softmax of the k largest of a row, in the place of torch's while torchvision computes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, k: int) -> None:
        whole = F.softmax

        def largest(scores: Tensor, dim: int) -> Tensor:
            assert dim == -1
            least = scores.topk(k, -1).values[..., -1:]
            return whole(scores.masked_fill(scores < least, -torch.inf), dim)

        monkeypatch.setattr(swin.F, "softmax", largest)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("shift", "size"),
    [((0, 0), (6, 8)), ((1, 2), (6, 8)), ((1, 2), (7, 9)), ((1, 2), (3, 8)), ((1, 2), (6, 4)), ((1, 0), (6, 8))],
    ids=str,
)
def test_windows_are_torchvisions(
    kind: Any, shift: tuple[int, int], size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = attention(kind, shift), torch.randn(2, *size, 12)
    twin, report = convnn.convert(module)
    assert report.exact
    assert isinstance(twin, kind)
    assert list(twin.state_dict()) == list(module.state_dict())
    torch.testing.assert_close(twin(x), module(x), atol=1e-5, rtol=0)
    for layer in (ConvNNAttention.using(k=5, kernel=None), MultiheadConvNN.using(k=5), ConvNNAttention.using(k=5)):
        nearest, report = convnn.convert(module, {kind: layer})
        assert not report.exact
        got = nearest(x)
        with monkeypatch.context() as patched:
            Nearest(patched, 5)
            torch.testing.assert_close(got, module(x), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_every_parameter_alike(kind: Any) -> None:
    module, x = attention(kind, (1, 2)), torch.randn(2, 7, 9, 12)
    twin, _ = convnn.convert(module)
    for each in (module, twin):
        each(x).square().mean().backward()
    for (name, theirs), (_, ours) in zip(module.named_parameters(), twin.named_parameters(), strict=True):
        assert theirs.grad is not None, name
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=0)


def test_more_than_a_window_has_is_all_of_it() -> None:
    module, x = attention(KINDS[0], (1, 2)), torch.randn(1, 6, 8, 12)
    twin, _ = convnn.convert(module, {KINDS[0]: ConvNNAttention.using(k=100, kernel=None)})
    torch.testing.assert_close(twin(x), module(x), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("kind", "layer", "reason"),
    [
        (KINDS[1], ConvNNAttention.using(k=5, similarity="dot"), "cosines at a learned scale"),
        (KINDS[0], ConvNNAttention.using(k=5, qk_dim=6), "cannot say qk_dim"),
        (KINDS[0], HybridConv2d, "becomes ConvNNAttention or MultiheadConvNN, not HybridConv2d"),
        (KINDS[0], ConvNNAttention, "must say k"),
        (KINDS[0], ConvNNAttention.using(k="all"), "a kernel has a size"),
    ],
)
def test_a_rule_that_cannot_be_says_why(kind: Any, layer: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        convnn.convert(attention(kind, (1, 2)), {kind: layer})


def test_dropout_acts_in_training_only() -> None:
    module, x = attention(KINDS[0], (1, 2), attention_dropout=0.5), torch.randn(1, 6, 8, 12)
    twin, report = convnn.convert(module)
    assert "dropout draws other numbers" in report[""].note
    torch.testing.assert_close(twin(x), module(x), atol=1e-5, rtol=0)
    assert not torch.equal(twin.train()(x), twin(x))

"""Nearest in features with every key is attention: outputs and gradients against torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from convnn.functional import convnn


def leaves(dtype: torch.dtype) -> list[Tensor]:
    shapes = ((2, 3, 17, 8), (2, 3, 23, 8), (2, 3, 23, 5), (2, 1, 17, 23))
    return [torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)]
)
@pytest.mark.parametrize("masking", ["plain", "causal", "float"])
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_every_key_is_attention(backend: str, masking: str, dtype: torch.dtype, tolerance: float) -> None:
    query, key, value, shift = inputs = leaves(dtype)
    mask: Any = {"plain": None, "causal": "causal", "float": shift}[masking]
    ours = convnn(query, key, value, k="all", mask=mask, backend=backend)
    given = shift if masking == "float" else None
    theirs = F.scaled_dot_product_attention(query, key, value, given, is_causal=masking == "causal")
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    wanted = inputs if masking == "float" else inputs[:3]
    pull = torch.randn_like(theirs)
    for a, b in zip(torch.autograd.grad(ours, wanted, pull), torch.autograd.grad(theirs, wanted, pull), strict=True):
        torch.testing.assert_close(a, b, rtol=3 * tolerance, atol=3 * tolerance)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("k", [5, "all"])
def test_dropout_drops_weights_and_keeps_their_mean(k: Any, backend: str) -> None:
    query, key = torch.randn(300, 4), torch.randn(11, 4)
    value = torch.eye(11)  # the output is the weights, spread over the keys
    kept = convnn(query, key, value, k=k, backend=backend)
    dropped = convnn(query, key, value, k=k, dropout_p=0.25, backend=backend)
    survived = (dropped != 0) & (kept != 0)
    torch.testing.assert_close(dropped[survived], kept[survived] / 0.75)
    share = survived.sum() / (kept != 0).sum()
    assert 0.68 < share < 0.82
    assert not convnn(query, key, value, k=k, dropout_p=1.0, backend=backend).any()


@pytest.mark.parametrize("k", [5, "all"])
def test_dropout_is_the_same_in_forward_and_backward(k: Any) -> None:
    query, key = torch.randn(30, 4), torch.randn(11, 4)
    value = torch.eye(11, requires_grad=True)
    output = convnn(query, key, value, k=k, dropout_p=0.5, backend="chunked")
    (gradient,) = torch.autograd.grad(output.sum(), value)
    torch.testing.assert_close(gradient[:, 0], output.sum(0))

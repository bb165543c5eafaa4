"""Types: the half types score in float32, autocast stays out of scores, values and their kernel follow it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from convnn.backends.chunked import with_budget
from convnn.functional import convnn, nearest

BACKENDS = ["reference", "chunked"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_types_are_scored_in_float32(half: torch.dtype, backend: str) -> None:
    # 1 + 2^-9 has no bfloat16 and 1 + 2^-12 no float16; as a product both exist in float32 and decide the order.
    fine = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[half]
    query = torch.tensor([[1.0, fine]], dtype=half)
    key = torch.tensor([[1.0, 0.0], [1.0, 0.25], [1.0, 0.5]], dtype=half)
    found = nearest(query, key, k=3, similarity="dot", backend=backend)
    assert found.scores.dtype == torch.float32
    assert found.index.tolist() == [[2, 1, 0]]
    assert len(found.scores.unique()) == 3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("k", [4, "all"])
def test_gradients_come_in_the_type_of_their_tensor(k: Any, backend: str) -> None:
    coords = torch.randn(9, 2, dtype=torch.float64, requires_grad=True)
    value = torch.randn(9, 6).bfloat16().requires_grad_()
    kernel = None if k == "all" else torch.randn(6, 1, 4).bfloat16().requires_grad_()
    output = convnn(coords, coords, value, kernel, k=k, similarity="euclidean", backend=backend)
    assert output.dtype == torch.bfloat16
    leaves = [leaf for leaf in (coords, value, kernel) if leaf is not None]
    for leaf, gradient in zip(leaves, torch.autograd.grad(output.float().sum(), leaves), strict=True):
        assert gradient.dtype == leaf.dtype
        assert gradient.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("k", [4, "all"])
def test_autocast_takes_the_values_but_not_the_scores(k: Any, backend: str) -> None:
    query, key, value = torch.randn(2, 9, 5), torch.randn(2, 13, 5), torch.randn(2, 13, 6)
    kernel = None if k == "all" else torch.randn(3, 6, 4, requires_grad=True)
    bias = torch.randn(6 if kernel is None else 3)
    options: Any = {"k": k, "similarity": "dot", "backend": backend}
    with torch.autocast("cpu", torch.bfloat16):
        output = convnn(query, key, value, kernel, bias, **options)
        found = nearest(query, key, k=4, backend=backend)
        mixed = convnn(query.bfloat16(), key, value, kernel, bias, **options)
    assert output.dtype == mixed.dtype == torch.bfloat16
    assert found.scores.dtype == torch.float32
    exact = nearest(query, key, k=4, backend=backend)
    assert torch.equal(found.index, exact.index)
    assert torch.equal(found.scores, exact.scores)
    rounded = [None if x is None else x.bfloat16() for x in (value, kernel, bias)]
    torch.testing.assert_close(output, convnn(query, key, *rounded, **options))  # type: ignore[arg-type]
    if kernel is not None:
        (gradient,) = torch.autograd.grad(output.float().sum(), kernel)
        assert gradient.dtype == torch.float32


def test_autocast_leaves_float64_alone() -> None:
    x = torch.randn(7, 5, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        output = convnn(x, x, x, k=3)
    assert torch.equal(output, convnn(x, x, x, k=3))


@pytest.mark.parametrize("k", [2, "all"])
def test_gradients_of_many_blocks_are_added_in_float32(k: Any) -> None:
    """1024 queries give half of their weight to each key: in bfloat16 that sum stops growing at 128."""
    value = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    x = torch.zeros(1024, 3, dtype=torch.bfloat16)
    output = convnn(x, x[:2], value, k=k, backend=with_budget(16))
    (gradient,) = torch.autograd.grad(output.sum(), value)
    assert gradient.tolist() == [[512.0], [512.0]]

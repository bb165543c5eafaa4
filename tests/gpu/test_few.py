"""Searches over few keys on a CUDA device, at the sizes of a vision transformer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from convnn.functional import convnn
from tests.triton.runner import ERROR, step

pytestmark = pytest.mark.gpu

BRAIN, SINGLE, HALF = torch.bfloat16, torch.float32, torch.float16


def leaves(*sizes: int, dtype: torch.dtype, keys: int | None = None) -> list[Tensor]:
    """Queries, keys, values and a kernel of B, H, N, d and K."""
    batch, heads, n, d, k = sizes
    generator = torch.Generator("cuda").manual_seed(0)
    shapes: list[tuple[int, ...]] = [(batch, heads, size, d) for size in (n, keys or n, keys or n)]
    return [torch.randn(shape, device="cuda", generator=generator).to(dtype) for shape in [*shapes, (d, 1, k)]]


def among(count: int, keys: int, *lead: int) -> Tensor:
    drawn = torch.rand(*lead, keys, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    return drawn.argsort(-1)[..., :count]


def assert_agree(ours: list[Tensor], theirs: list[Tensor], dtype: torch.dtype) -> None:
    """Half types tell scores apart by fewer digits: a pair of neighbours may change places, and taps with them."""
    off = (ours[0].double() - theirs[0]).norm(dim=-1) / theirs[0].norm(dim=-1).clamp(min=1e-3)
    same = off < 10 * ERROR[dtype]
    assert (~same).double().mean() < (0 if dtype == SINGLE else 2e-3) + 1e-9
    for number, (mine, exact) in enumerate(zip(ours, theirs, strict=True)):
        by_row = number < 2  # the output and the queries
        left, right = (mine[same], exact[same]) if by_row else (mine, exact)
        error = (left.double() - right).norm() / right.norm()
        assert error < (2 * ERROR[dtype] if by_row or dtype == SINGLE else 4e-2), f"result {number} is off by {error}"


@pytest.mark.parametrize("dtype", [BRAIN, HALF, SINGLE])
@pytest.mark.parametrize("lead", [(), (4, 12)], ids=["shared", "each head"])
@pytest.mark.parametrize("count", [16, 32, 57])
def test_candidates_agree_with_the_reference(count: int, lead: tuple[int, ...], dtype: torch.dtype) -> None:
    given, options = leaves(4, 12, 197, 64, 9, dtype=dtype), {"candidates": among(count, 197, *lead)}
    ours = step(given, 9, options, "triton")
    theirs = step([leaf.double() for leaf in given], 9, options, "reference")
    assert_agree(ours, theirs, dtype)


@pytest.mark.parametrize("dtype", [BRAIN, SINGLE])
@pytest.mark.parametrize("weighting", ["softmax", "uniform"])
def test_windows_agree_with_the_reference(weighting: str, dtype: torch.dtype) -> None:
    given = leaves(64, 3, 49, 32, 7, dtype=dtype)[:3]
    options: Any = {"weighting": weighting, "mask": torch.randn(3, 49, 49, device="cuda").to(dtype)}
    ours = step(given, 7, options, "triton")
    theirs = step([leaf.double() for leaf in given], 7, options, "reference")
    for mine, exact in zip(ours, theirs, strict=True):
        assert (mine.double() - exact).norm() <= 2 * ERROR[dtype] * exact.norm()


def test_many_queries_of_few_heads_agree() -> None:
    given = leaves(1, 2, 9000, 64, 5, dtype=SINGLE, keys=60)
    ours = step(given, 5, {}, "triton")
    theirs = step([leaf.double() for leaf in given], 5, {}, "reference")
    for mine, exact in zip(ours, theirs, strict=True):
        assert (mine.double() - exact).norm() / exact.norm() < ERROR[SINGLE]


@pytest.mark.parametrize("size", [(32, 12, 197, 64, 9), (1, 2, 5000, 128, 20)], ids=str)
def test_two_runs_are_equal_bit_by_bit(size: tuple[int, ...]) -> None:
    given, options = leaves(*size, dtype=BRAIN), {"candidates": among(32, size[2])}
    first, second = (step(given, size[-1], options, "triton") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("place", [0, 1, 2], ids=["query", "key", "value"])
def test_a_nan_reaches_its_rows_and_no_others(place: int) -> None:
    given, options = leaves(2, 3, 197, 64, 9, dtype=BRAIN), {"candidates": among(32, 197)}
    at = 5 if place == 0 else int(options["candidates"][2])
    given[place][1, 1, at, 3] = torch.nan
    ours = step(given, 9, options, "triton")
    theirs = step([leaf.double() for leaf in given], 9, options, "reference")
    assert theirs[0].isnan().any()
    for mine, exact in list(zip(ours, theirs, strict=True))[:2]:
        assert ((mine.isnan() != exact.isnan()).any(-1).double().mean()) < 2e-3
    assert not ours[0][0].isnan().any()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_waits_for_the_device() -> None:
    given: Any = [leaf.requires_grad_() for leaf in leaves(2, 3, 100, 64, 9, dtype=BRAIN)]
    candidates, pull = among(32, 100), torch.randn(2, 3, 100, 64, device="cuda", dtype=BRAIN)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        convnn(*given, k=9, candidates=candidates, mask="causal", backend="triton").backward(pull)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(leaf.grad.isfinite().all() for leaf in given)

"""What is far away: scores from 0, infinite and undefined ones among them, and rows from each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from convnn.backends.triton import with_order
from convnn.functional import convnn, nearest
from tests.triton.runner import DEVICE, Case, step

# N, M, E, C and K of one kernel for few keys, of slots held in pieces, and of slots one after the other.
SIZES = {
    "few": ((4, 30, 8, 6), 5),
    "pieces": ((7, 90, 8, 6), 5),
    "slots": ((3, 90, 8, 64), 40),
    "wide": ((3, 70, 9, 1100), 3),
}
ORDERS: dict[str, Any] = {"fixed": "triton", "free": with_order(fixed=False)}


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("path", SIZES)
def test_a_row_of_the_lowest_numbers_has_gradients(path: str, order: str, kernel: bool) -> None:
    sizes, k = SIZES[path]
    leaves = Case("", sizes, k=k, kernel=kernel, lead=(2,)).leaves()
    mask = torch.zeros(sizes[:2], device=DEVICE)
    mask[1] = torch.finfo(torch.float32).min
    mask[1, k:] = -torch.inf
    ours = step(leaves, k, {"mask": mask}, ORDERS[order])
    theirs = step([leaf.double() for leaf in leaves], k, {"mask": mask.double()}, "reference")
    for mine, exact in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("size", [1.0, 1e3, 3e4])
@pytest.mark.parametrize("path", SIZES)
def test_the_weights_of_a_row_sum_to_one_backward_too(path: str, size: float) -> None:
    (n, m, e, c), k = SIZES[path]
    query, key = (torch.full((rows, e), size, device=DEVICE) for rows in (n, m))
    value = torch.zeros(m, c, device=DEVICE, requires_grad=True)
    convnn(query, key, value, k=k, backend="triton").sum().backward()
    assert value.grad is not None
    torch.testing.assert_close(value.grad.sum(0), torch.full((c,), float(n), device=DEVICE))
    chosen = value.grad[value.grad[:, 0] != 0]
    torch.testing.assert_close(chosen, torch.full_like(chosen, n / k))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("m", [40, 200, 300, 700])
def test_an_infinite_number_of_a_mask_comes_first(m: int, dtype: torch.dtype) -> None:
    query, key = (torch.randn(rows, 12, device=DEVICE).to(dtype) for rows in (4, m))
    mask = torch.zeros(4, m, device=DEVICE, dtype=dtype)
    mask[1, 3], mask[2, m - 5], mask[2, 7] = torch.inf, torch.inf, torch.inf
    index = nearest(query, key, k=5, mask=mask, backend="triton").index
    assert index[1, 0] == 3
    assert set(index[2, :2].tolist()) == {m - 5, 7}


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("weighting", ["softmax", "uniform", "sparsemax"])
@pytest.mark.parametrize("kernel", [None, (6, 1, 5), (7, 6, 5)])
@pytest.mark.parametrize("m", [40, 100, 300])
def test_a_nan_of_a_mask_makes_its_row_nan(m: int, kernel: tuple[int, ...] | None, weighting: str) -> None:
    query, key, value = (torch.randn(shape, device=DEVICE) for shape in ((4, 8), (m, 8), (m, 6)))
    taps = None if kernel is None else torch.randn(kernel, device=DEVICE)
    mask = torch.zeros(4, m, device=DEVICE)
    mask[2, m - 5], mask[3, 2] = torch.nan, -torch.inf
    options: Any = {"k": 5, "mask": mask, "weighting": weighting}
    for backend in ("triton", "chunked", "reference"):
        output = convnn(query, key, value, taps, **options, backend=backend)
        assert output.isnan().any(-1).tolist() == [False, False, True, False]


@pytest.mark.parametrize("kernel", [None, (6, 1, 5), (7, 6, 5)])
@pytest.mark.parametrize("m", [40, 300])
def test_rows_farther_apart_than_32_bits_count_are_read(m: int, kernel: tuple[int, ...] | None) -> None:
    torch.use_deterministic_algorithms(False)  # what lies between is never written, nor held
    query, key, value = (torch.randn(shape, device=DEVICE).bfloat16() for shape in ((4, 8), (m, 8), (m, 6)))
    taps = None if kernel is None else torch.randn(kernel, device=DEVICE).bfloat16()
    apart = 2**31 // (m - 1) + 1
    room = torch.empty(apart * m, dtype=torch.bfloat16, device=DEVICE)
    keys, values = (room[first:].as_strided(part.shape, (apart, 1)) for first, part in ((0, key), (8, value)))
    keys.copy_(key)
    values.copy_(value)
    ours = convnn(query, keys, values, taps, k=5, backend="triton")
    assert torch.equal(ours, convnn(query, key, value, taps, k=5, backend="triton"))

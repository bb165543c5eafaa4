"""Searches over few keys: what is not a number, and what is very large, stays where it belongs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from convnn.functional import convnn, nearest
from tests.triton.runner import DEVICE, Case, step


def lost(leaves: list[Tensor], **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Which rows of the kernels' results, and of the reference's, are not finite."""
    given = {"k": 4, "options": options}
    ours = step(leaves, backend="triton", **given)  # type: ignore[arg-type]
    theirs = step([leaf.double() for leaf in leaves], backend="reference", **given)  # type: ignore[arg-type]
    return [~x.isfinite().all(-1) for x in ours], [~x.isfinite().all(-1) for x in theirs]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_nan_reaches_its_rows_and_no_others(number: float, where: str, kernel: bool) -> None:
    leaves = Case("", (70, 30, 12, 6), k=4, kernel=kernel).leaves()
    place = ("query", "key", "value").index(where)
    leaves[place][1, 5, 2] = number
    ours, theirs = lost(leaves)
    for mine, exact in list(zip(ours, theirs, strict=True))[:3]:  # the output, queries and keys
        assert torch.equal(mine, exact)
    assert ours[0][1].any()
    assert not ours[0][0].any()


def test_a_nan_nobody_may_choose_is_not_seen() -> None:
    leaves = Case("", (70, 30, 12, 6), k=4).leaves()
    query, key, value, _ = leaves
    query[:, 9], key[:, 4], value[:, 4] = torch.nan, torch.nan, torch.nan
    mask = torch.ones(70, 30, dtype=torch.bool, device=DEVICE)
    mask[9], mask[:, 4] = False, False
    results = step(leaves, 4, {"mask": mask}, "triton")
    assert all(tensor.isfinite().all() for tensor in results)
    theirs = step([leaf.double() for leaf in leaves], 4, {"mask": mask}, "reference")
    for mine, exact in zip(results, theirs, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_an_infinite_value_is_infinite_only_where_it_is_chosen() -> None:
    query, key, value = Case("", (70, 30, 12, 6), k=4, lead=(), kernel=False).leaves()
    value[3, 2] = torch.inf
    ours, theirs = (convnn(query, key, value, k=4, backend=backend) for backend in ("triton", "reference"))
    assert ours[:, 2].isinf().any()
    torch.testing.assert_close(ours, theirs)


def test_a_gradient_that_is_not_a_number_stays_with_its_row() -> None:
    leaves = [leaf.requires_grad_() for leaf in Case("", (70, 30, 12, 6), k=4, lead=()).leaves()]
    output = convnn(*leaves, k=4, backend="triton")
    pull = torch.randn_like(output)
    pull[7, 3] = torch.nan
    query, key, value, _ = torch.autograd.grad(output, leaves, pull)
    rows = torch.zeros(70, dtype=torch.bool, device=DEVICE)
    rows[7] = True
    chosen = nearest(leaves[0], leaves[1], k=4, backend="reference").index[7]
    keys = torch.zeros(30, dtype=torch.bool, device=DEVICE).index_fill(0, chosen, True)
    assert torch.equal(query.isnan().any(-1), rows)
    assert torch.equal(key.isnan().any(-1), keys)
    assert torch.equal(value.isnan().any(-1), keys)


def test_the_lowest_number_of_a_float_mask_does_not_forbid() -> None:
    leaves = Case("", (12, 30, 12, 6), k=4, lead=()).leaves()
    mask = torch.zeros(12, 30, device=DEVICE)
    mask[3], mask[5, 2:] = torch.finfo(torch.float32).min, torch.finfo(torch.float32).min
    ours, theirs = (convnn(*leaves, k=4, mask=mask, backend=backend) for backend in ("triton", "reference"))
    torch.testing.assert_close(ours, theirs)

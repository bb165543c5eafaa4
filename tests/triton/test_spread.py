"""Kernels that mix channels of few candidates: against the reference in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from convnn.functional import convnn
from tests.triton.runner import DEVICE, Case, assert_agrees
from tests.triton.test_scored import mixing

SHARED = torch.tensor([3, 4, 11, 29, 30])
OWN = torch.tensor([[2, 5, 17, 18, 30], [0, 1, 2, 3, 4]])[:, None, :]  # one row of them for each of the batch


@pytest.fixture(autouse=True)
def spreads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count how often taps were applied first."""
    from convnn.backends.triton import spread  # noqa: PLC0415

    seen: list[int] = []
    combine = spread.combine

    def watched(*given: Any) -> Tensor:
        seen.append(1)
        return combine(*given)

    monkeypatch.setattr(spread, "combine", watched)
    return seen


@pytest.mark.parametrize("weighting", ["uniform", "softmax"])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("candidates", [SHARED, OWN], ids=["shared", "of each"])
@pytest.mark.parametrize("own", [False, True])
def test_values_and_gradients_agree_with_the_reference(
    own: bool, candidates: Tensor, groups: int, weighting: str, spreads: list[int]
) -> None:
    options: dict[str, Any] = {"similarity": "cosine", "weighting": weighting, "candidates": candidates.to(DEVICE)}
    if own:
        options["self_index"] = (torch.arange(41) % 33 - 2).clamp(min=-1).to(DEVICE)  # some have none
    case = Case("", (41, 31, 12, 6), k=4, options=options)
    assert_agrees(case, mixing(case, 9, groups))
    assert spreads


def test_half_types_sum_in_single_precision(spreads: list[int]) -> None:
    options = {"similarity": "cosine", "weighting": "uniform", "candidates": SHARED.to(DEVICE)}
    case = Case("", (41, 31, 12, 6), k=4, dtype=torch.bfloat16, options=options)
    assert_agrees(case, mixing(case, 9))
    assert spreads


def test_a_nan_reaches_its_rows_and_no_others(spreads: list[int]) -> None:
    query, key, value, kernel = mixing(Case("", (41, 31, 12, 6), k=4), 9)
    query[0, 7, 1], key[1, 11, 0], key[1, 12, 0] = torch.nan, torch.nan, torch.nan
    options: Any = {"similarity": "cosine", "weighting": "uniform", "candidates": SHARED.to(DEVICE), "k": 4}
    ours, theirs = (convnn(query, key, value, kernel, backend=b, **options).isnan() for b in ("triton", "reference"))
    assert spreads
    assert torch.equal(ours, theirs)
    assert ours.any()
    assert not ours.all()


def test_many_candidates_are_looked_up_first(spreads: list[int]) -> None:
    options: Any = {"similarity": "cosine", "weighting": "uniform", "candidates": SHARED.to(DEVICE), "k": 4}
    convnn(*mixing(Case("", (39, 31, 12, 6), k=4), 9), backend="triton", **options)
    assert not spreads

"""Torch's attention at its edges: NaN, masks beyond the budget, compilation, nothing at all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from convnn.backends import chunked, reference
from convnn.backends.record import Backend
from convnn.backends.triton import gates
from convnn.functional import convnn as operator
from convnn.masks import causal, strided, window
from convnn.similarity import Bilinear
from convnn.weighting import LearnedTemperature
from tests.triton.runner import DEVICE, Case, assert_agrees, step
from tests.triton.test_attention import ALL, SIZES, case_of, moved, some


@pytest.mark.parametrize("dropped", [0.0, 0.2])
@pytest.mark.parametrize(
    "mask", ["causal", "causal, more queries than keys", "window", "bool by sample", "key padding"]
)
def test_a_nan_reaches_the_rows_that_may_see_it_and_no_others(mask: str, dropped: float) -> None:
    case = case_of(mask, dropout_p=dropped)
    query, key, value = case.leaves()
    key[0, 3:5, 1], query[1, 2, 0] = torch.nan, torch.nan
    query[1, 0] = torch.nan  # behind a bool mask it may choose nobody
    ours = operator(query, key, value, k=ALL, backend="triton", **case.options)
    theirs = operator(query, key, value, k=ALL, backend="reference", **case.options)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert ours.isnan().any()
    assert not ours.isnan().all()
    if not dropped:
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("similarity", ["scaled_dot", "cosine", Bilinear(8)])
def test_what_nobody_may_choose_is_in_no_gradient(similarity: Any) -> None:
    similarity = similarity if isinstance(similarity, str) else similarity.to(DEVICE)
    case = replace(case_of("bool by sample"), lead=(2,))
    case.options["similarity"] = similarity
    clean = case.leaves()
    spoilt = [leaf.clone() for leaf in clean]
    spoilt[0][:, 0], spoilt[1][:, 3], spoilt[2][:, 3] = torch.nan, torch.nan, torch.nan
    ours, theirs = step(spoilt, ALL, case.options, "triton"), step(clean, ALL, case.options, "triton")
    torch.testing.assert_close(ours, theirs)
    assert (ours[1][:, 0] == 0).all()
    assert (ours[2][:, 3] == 0).all()


def count_others(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows whenever somebody else is asked."""
    asked: list[int] = []

    def otherwise() -> Backend:
        asked.append(1)
        return chunked.BACKEND

    monkeypatch.setattr(gates, "otherwise", otherwise)
    return asked


BUDGETED: dict[str, tuple[Any, bool]] = {
    "a rule": (strided(4), False),
    "a window": (window(3), False),
    "causal": (causal, True),
    "key padding": (some(2, 1, 14), True),
    "a tensor of the caller": (some(10, 14), True),
    "causal and key padding": ([causal, some(2, 1, 14)], False),
    "a tensor that is spread over samples": ([some(2, 1, 14), torch.ones(10, 14).bool()], False),
}


@pytest.mark.parametrize("name", BUDGETED)
def test_no_mask_beyond_the_budget_is_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mask, stays = BUDGETED[name]
    for device in ("ON_CPU", "ELSEWHERE"):
        monkeypatch.setattr(chunked, device, 100)  # and there are 140 pairs
    asked = count_others(monkeypatch)
    assert_agrees(Case("", SIZES, k=ALL, kernel=False, options={"mask": moved(mask)}))
    assert (not asked) == stays


def test_the_gradient_of_a_shared_mask_counts_for_every_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    for device in ("ON_CPU", "ELSEWHERE"):
        monkeypatch.setattr(chunked, device, 200)
    asked = count_others(monkeypatch)
    case = case_of("float")
    assert_agrees(case)
    assert asked
    asked.clear()
    with torch.no_grad():
        operator(*case.leaves(), k=ALL, backend="triton", **case.options)
    assert not asked


@pytest.mark.parametrize("mask", ["causal", "causal and key padding", "window", "float"])
def test_it_compiles_without_a_break(mask: str) -> None:
    torch.compiler.reset()
    case, temperature = case_of(mask), LearnedTemperature(0.7).to(DEVICE)

    def run(*tensors: Tensor) -> Tensor:
        return operator(*tensors, k=ALL, weighting=temperature, backend="triton", **case.options)

    leaves = [leaf.requires_grad_() for leaf in case.leaves()]
    ours, theirs = torch.compile(run, fullgraph=True, backend="aot_eager")(*leaves), run(*leaves)
    torch.testing.assert_close(ours, theirs)
    grads = [torch.autograd.grad(y.square().sum(), leaves) for y in (ours, theirs)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("empty", ["queries", "batch"])
def test_nothing_to_attend_gives_nothing(empty: str) -> None:
    shapes = {"queries": ((2, 0, 8), (2, 5, 8), (2, 5, 6)), "batch": ((0, 3, 8), (0, 5, 8), (0, 5, 6))}[empty]
    query, key, value = (torch.randn(shape, device=DEVICE) for shape in shapes)
    assert operator(query, key, value, k=ALL, mask=causal, backend="triton").shape == (*shapes[0][:-1], 6)


def test_what_is_exported_is_left_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gates.otherwise() is chunked.BACKEND
    monkeypatch.setattr(torch.compiler, "_is_exporting_flag", True)
    assert gates.otherwise() is reference.BACKEND

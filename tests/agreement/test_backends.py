"""Every backend against the reference: outputs and all gradients, never indices."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import convnn
from convnn.backends import Backend
from convnn.backends.chunked import with_budget
from convnn.functional import aggregate, nearest
from convnn.similarity import SIMILARITIES
from tests.agreement.problems import PROBLEMS, Problem

TOLERANCE: dict[torch.dtype, dict[str, Any]] = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-10},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
}
# A row at a time and key blocks, blocks that divide nothing, a few blocks, one block.
BUDGETS: dict[str, str | Backend] = {
    "chunked": "chunked",
    "1": with_budget(1),
    "97": with_budget(97),
    "1000": with_budget(1000),
}


def run(problem: Problem, backend: str | Backend, *, halves: bool = False, device: str = "cpu") -> dict[str, Tensor]:
    """The output, and the gradient of every tensor that has one."""
    leaves = {
        name: tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor
        for name, tensor in problem.tensors(device).items()
    }
    options: dict[str, Any] = dict(problem.options)
    given: dict[str, Any] = dict(leaves)
    if halves:
        weighting = options.pop("weighting", "softmax")
        search = options | {name: given[name] for name in ("mask", "candidates", "self_index") if name in given}
        found = nearest(given["query"], given["key"], **search, backend=backend)
        combined = (given["value"], found, given.get("kernel"), given.get("bias"))
        output = aggregate(*combined, weighting=weighting, backend=backend)
    else:
        output = convnn.functional.convnn(**given, **options, backend=backend)
    pull = torch.randn(output.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(output)
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    gradients = torch.autograd.grad(output, tuple(wanted.values()), pull, allow_unused=True, materialize_grads=True)
    return {"output": output.detach(), **dict(zip(wanted, gradients, strict=True))}


@cache
def expected(problem: Problem) -> dict[str, Tensor]:
    return run(problem, "reference")


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], dtype: torch.dtype) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.isfinite().all(), name
        difference = (tensor - theirs[name]).abs().max() if tensor.numel() else 0.0
        torch.testing.assert_close(tensor, theirs[name], **TOLERANCE[dtype], msg=f"{name} differs by {difference}")


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_chunked_agrees_with_the_reference(problem: Problem, budget: str) -> None:
    assert_same(run(problem, BUDGETS[budget]), expected(problem), problem.dtype)


@pytest.mark.parametrize("backend", ["reference", "97"])
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_the_two_halves_make_the_whole(problem: Problem, backend: str) -> None:
    assert_same(run(problem, BUDGETS.get(backend, backend), halves=True), expected(problem), problem.dtype)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_half_types_keep_the_digits_of_float32(problem: Problem, backend: str) -> None:
    """What the half types lose is the rounding of inputs and output, not scores that tie."""
    half = torch.bfloat16
    rounded: dict[str, Any] = {
        name: tensor.to(half) if tensor.is_floating_point() else tensor for name, tensor in problem.tensors().items()
    }
    lifted: dict[str, Any] = {
        name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in rounded.items()
    }
    ours = convnn.functional.convnn(**rounded, **problem.options, backend=backend)
    theirs = convnn.functional.convnn(**lifted, **problem.options, backend=backend)
    assert ours.dtype == half
    torch.testing.assert_close(ours.float(), theirs, rtol=2**-7, atol=1e-2)


def test_scores_of_ties_across_the_last_slot_agree() -> None:
    key = torch.randint(0, 2, (40, 3)).double()
    query = torch.randint(0, 2, (9, 3)).double()
    for similarity in ("dot", "sqeuclidean"):
        first = nearest(query, key, k=7, similarity=similarity, backend="reference").scores
        for backend in BUDGETS.values():
            found = nearest(query, key, k=7, similarity=similarity, backend=backend)
            torch.testing.assert_close(found.scores, first)
            chosen = torch.stack([key[row] for row in found.index])
            again = torch.stack([SIMILARITIES[similarity](q[None], c)[0] for q, c in zip(query, chosen, strict=True)])
            torch.testing.assert_close(again, found.scores)
            assert all(len(set(row)) == 7 for row in found.index.tolist())


@pytest.mark.parametrize("order", ["score", "key"])
@pytest.mark.parametrize("budget", ["reference", *BUDGETS])
def test_neighbours_come_in_the_order_asked_for(budget: str, order: Any) -> None:
    query, key = torch.randn(3, 9, 4), torch.randn(3, 20, 4)
    found = nearest(query, key, k=6, mask="causal", order=order, backend=BUDGETS.get(budget, budget))
    empty = found.index == -1
    assert torch.equal(empty, found.scores == -torch.inf)
    assert torch.equal(empty, torch.arange(6) > torch.arange(9)[:, None].expand(3, 9, 1))
    by_key = found.index.masked_fill(empty, 99)
    ranked = (
        by_key.sort(-1).values == by_key
        if order == "key"
        else found.scores.sort(descending=True).values == found.scores
    )
    assert ranked.all()
    assert (found.index <= torch.arange(9)[:, None]).all()

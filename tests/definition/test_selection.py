"""Selections: against a loop over rows and keys, at their limits, and by finite differences."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import convnn as library
from convnn.backends import Backend, chunked
from convnn.backends.chunked import with_budget
from convnn.functional import convnn, explain
from convnn.selection import hard, soft, straight_through
from convnn.weighting import LearnedTemperature, on_exp, softmax, softmax_at
from tests.definition.test_operator import randn

BACKENDS: dict[str, Any] = {"reference": "reference", "chunked": "chunked", "small blocks": with_budget(60)}


def threshold(scores: list[float], k: int, temperature: float) -> float:
    """By halving an interval in which it must be."""
    low, high = min(scores) - 50 * temperature, max(scores) + 50 * temperature
    for _ in range(200):
        middle = (low + high) / 2
        total = sum(1 / (1 + math.exp(min(700.0, (middle - s) / temperature))) for s in scores)
        low, high = (middle, high) if total > k else (low, middle)
    return low


def counts(scores: list[float], k: int, temperature: float) -> list[float]:
    """How often each of some keys counts; a forbidden one is -inf."""
    open_ = [s for s in scores if s > -math.inf]
    if len(open_) <= k:
        return [float(s > -math.inf) for s in scores]
    at = threshold(open_, k, temperature)
    return [1 / (1 + math.exp(min(700.0, (at - s) / temperature))) if s > -math.inf else 0.0 for s in scores]


def by_loop(
    scores: Tensor, value: Tensor, kernel: Tensor, k: int, temperature: float, *, order: str, weighting: str, own: bool
) -> Tensor:
    """The relaxed operator, one row after the other; with ``own``, key i is the first neighbour of query i."""
    rows = []
    for i, row in enumerate(scores.tolist()):
        mine = own and row[i] > -math.inf
        others = [-math.inf if mine and j == i else s for j, s in enumerate(row)]
        wins = k - 1 if mine else k
        ranked = sorted((j for j, s in enumerate(others) if s > -math.inf), key=lambda j: -others[j])
        winners = ([i] if mine else []) + ranked[:wins]
        winners = sorted(winners) if order == "key" else winners
        g = counts(others, wins, temperature)
        g = [1.0 if mine and j == i else c for j, c in enumerate(g)]
        f = [math.exp(s) if weighting == "softmax" else 1.0 for s in row]
        total = sum(a * b for a, b in zip(g, f, strict=True)) if weighting == "softmax" else 1.0
        output = torch.zeros(kernel.shape[0], dtype=torch.float64)
        for j in range(len(row)):
            if row[j] == -math.inf:
                continue
            before = sum(w < j for w in winners) if order == "key" else k - 1
            tap = winners.index(j) if j in winners else min(before, k - 1)
            output += g[j] * f[j] / total * (kernel[:, :, tap] @ value[j])
        rows.append(output)
    return torch.stack(rows)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("order", ["score", "key"])
@pytest.mark.parametrize("weighting", ["softmax", "uniform"])
@pytest.mark.parametrize("own", [False, True])
def test_a_soft_selection_is_its_formula(backend: str, order: Any, weighting: str, own: bool) -> None:
    n = m = 7
    query, key, value, kernel = randn(n, 4), randn(m, 4), randn(m, 3), randn(5, 3, 3)
    allowed = torch.rand(n, m) < 0.8
    allowed[2] = False
    allowed[3, :2], allowed[3, 2:] = True, False  # fewer than k
    scores = (query @ key.mT).masked_fill(~allowed, -torch.inf)
    ours = convnn(
        query, key, value, kernel, k=3, similarity="dot", weighting=weighting, mask=allowed, order=order,
        self_index=torch.arange(n) if own else None, selection=soft(0.7), backend=BACKENDS[backend],
    )  # fmt: skip
    told: Any = {"order": order, "weighting": weighting, "own": own}
    theirs = by_loop(scores, value, kernel, 3, 0.7, **told)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
def test_counts_without_a_kernel_among_candidates(backend: str) -> None:
    query, key, value, among = randn(2, 5, 4), randn(2, 9, 4), randn(2, 9, 3), torch.tensor([1, 2, 4, 7, 8])
    ours, found = convnn(
        query, key, value, k=2, similarity="dot", candidates=among, selection=soft(0.5), backend=BACKENDS[backend],
        return_neighbors=True,
    )  # fmt: skip
    scores = (query @ key.mT)[..., among]
    for batch in range(2):
        for row in range(5):
            said = scores[batch, row]
            weights = torch.tensor(counts(said.tolist(), 2, 0.5)).double() * said.exp()
            expected = (weights / weights.sum()) @ value[batch, among]
            torch.testing.assert_close(ours[batch, row], expected, rtol=1e-6, atol=1e-7)
    assert torch.equal(found.index, among[scores.topk(2).indices])


def test_counts_sum_to_k_whatever_the_temperature() -> None:
    scores = torch.randn(6, 40)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(7).indices, True)
    for temperature in (1e-3, 0.1, 1.0, 100.0):
        told = soft(temperature)(scores, chosen)
        torch.testing.assert_close(told.sum(-1), torch.full((6,), 7.0))
        assert (told >= 0).all()
        assert (told <= 1).all()
    torch.testing.assert_close(soft(1e4)(scores, chosen), torch.full((6, 40), 7 / 40), rtol=1e-2, atol=0.0)
    torch.testing.assert_close(soft(0.3)(scores + 5, chosen), soft(0.3)(scores, chosen), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weighting", ["softmax", "uniform", softmax_at(0.5), LearnedTemperature(2.0), on_exp(softmax)])
@pytest.mark.parametrize("order", ["score", "key"])
def test_the_limit_is_the_hard_selection(weighting: Any, order: Any) -> None:
    query, key, value, kernel = randn(2, 6, 4), randn(2, 11, 4), randn(2, 11, 3), randn(3, 1, 4)
    options: dict[str, Any] = {"k": 4, "weighting": weighting, "order": order}
    expected = convnn(query, key, value, kernel, **options)
    for selection in (soft(1e-7), straight_through(0.5), straight_through(10.0)):
        ours = convnn(query, key, value, kernel, **options, selection=selection)
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    for same in (soft(0.0), "hard", hard):
        assert torch.equal(convnn(query, key, value, kernel, **options, selection=same), expected)
    everybody = convnn(query, key, value, k="all", selection=soft(1.0))
    assert torch.equal(everybody, convnn(query, key, value, k="all"))


@pytest.mark.parametrize("backend", ["reference", "small blocks"])
@pytest.mark.parametrize("weighting", ["softmax", "uniform"])
@pytest.mark.parametrize("order", ["score", "key"])
def test_gradients_of_the_soft_selection_are_finite_differences(backend: str, weighting: str, order: Any) -> None:
    inputs = [randn(*size).requires_grad_() for size in ((4, 3), (6, 3), (6, 2), (2, 2, 2))]

    def run(*given: Tensor) -> Tensor:
        told: dict[str, Any] = {"weighting": weighting, "order": order, "backend": BACKENDS[backend]}
        return convnn(*given, k=2, similarity="dot", selection=soft(0.8), **told)

    assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("backend", ["reference", "small blocks"])
def test_gradients_where_all_win_or_nobody(backend: str) -> None:
    inputs = [randn(*size).requires_grad_() for size in ((4, 3), (6, 3), (6, 2))]
    allowed = torch.ones(4, 6, dtype=torch.bool)
    allowed[0], allowed[1, 2:], allowed[2, 3:] = False, False, False

    def run(*given: Tensor) -> Tensor:
        told: dict[str, Any] = {"mask": allowed, "backend": BACKENDS[backend], "weighting": "uniform"}
        return convnn(*given, k=3, similarity="dot", selection=soft(0.8), **told)

    assert torch.autograd.gradcheck(run, inputs)
    every = [x.detach().requires_grad_() for x in inputs]
    output = convnn(*every, k=6, selection=straight_through(0.5), backend=BACKENDS[backend])
    hard_output = convnn(*inputs, k=6, backend=BACKENDS[backend])
    ours, theirs = (torch.autograd.grad(y.square().sum(), x) for y, x in ((output, every), (hard_output, inputs)))
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-9, atol=1e-9)


def test_gradients_of_the_counts_are_finite_differences() -> None:
    scores = randn(3, 9)
    scores[0, 4] = -torch.inf
    chosen = torch.zeros(3, 9, dtype=torch.bool).scatter(-1, scores.topk(4).indices, True)
    free = scores.clone().clamp(min=-100).requires_grad_()

    def run(given: Tensor) -> Tensor:
        return soft(0.6)(given.masked_fill(scores == -torch.inf, -torch.inf), chosen)

    assert torch.autograd.gradcheck(run, (free,))


def test_straight_through_has_the_gradient_of_the_soft_counts() -> None:
    scores = randn(5, 8).requires_grad_()
    chosen = torch.zeros(5, 8, dtype=torch.bool).scatter(-1, scores.topk(3).indices, True)
    upstream = randn(5, 8)
    (theirs,) = torch.autograd.grad(soft(0.4)(scores, chosen), scores, upstream)
    told = straight_through(0.4)(scores, chosen)
    (ours,) = torch.autograd.grad(told, scores, upstream)
    assert torch.equal(told, chosen.double())
    assert torch.equal(ours, theirs)
    assert theirs.ne(0).any()


@pytest.mark.parametrize("backend", ["reference", "small blocks"])
def test_straight_through_is_hard_to_values_and_kernel(backend: str) -> None:
    query, key, value, kernel = (randn(*s).requires_grad_() for s in ((5, 4), (9, 4), (9, 3), (3, 1, 3)))

    def grads(selection: Any, weighting: str) -> tuple[Tensor, ...]:
        options: Any = {"weighting": weighting, "selection": selection, "backend": BACKENDS[backend]}
        output = convnn(query, key, value, kernel, k=3, **options)
        return torch.autograd.grad(output.square().sum(), (query, key, value, kernel), materialize_grads=True)

    for weighting in ("softmax", "uniform"):
        ours, theirs = grads(straight_through(0.5), weighting), grads("hard", weighting)
        torch.testing.assert_close(ours[2:], theirs[2:], rtol=1e-10, atol=1e-10)
        assert not torch.allclose(ours[0], theirs[0])
    assert grads("hard", "uniform")[0].eq(0).all()
    assert grads(straight_through(0.5), "uniform")[0].ne(0).all()


def test_a_key_that_should_win_is_found_by_its_gradient() -> None:
    """Of five keys the one that would answer is not among the two nearest, and only a selection hears of it."""
    key = torch.eye(5)
    value = torch.tensor([[0.0], [0.0], [0.0], [0.0], [1.0]])
    for selection, finds in (("hard", False), (straight_through(0.5), True), (soft(0.5), True)):
        query = torch.tensor([[1.0, 0.9, 0.5, 0.2, 0.0]], requires_grad=True)
        step = torch.optim.SGD([query], lr=1.0)
        for _ in range(40):
            step.zero_grad()
            output = convnn(query, key, value, k=2, similarity="dot", weighting="uniform", selection=selection)
            if output.requires_grad:
                (1 - output).square().sum().backward()
                step.step()
        last = convnn(query, key, value, k=2, similarity="dot", weighting="uniform")
        assert (last.item() == 1.0) is finds, selection


@pytest.mark.parametrize("selection", [soft(0.3), straight_through(0.3)])
def test_half_types(selection: Any) -> None:
    query, key, value = (torch.randn(2, n, 8, dtype=torch.bfloat16) for n in (6, 12, 12))
    ours = convnn(query, key, value, k=3, selection=selection)
    assert ours.dtype == torch.bfloat16
    exact = convnn(query.float(), key.float(), value.float(), k=3, selection=selection)
    torch.testing.assert_close(ours.float(), exact, rtol=2**-7, atol=2**-7)


def test_a_selection_compiles() -> None:
    torch.compiler.reset()
    leaves, selection = [torch.randn(2, n, 8, requires_grad=True) for n in (6, 12, 12)], straight_through(0.3)

    def run(q: Tensor, x: Tensor, v: Tensor) -> Tensor:
        return convnn(q, x, v, k=3, selection=selection).square()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for mine, theirs in zip(*(torch.autograd.grad(f(*leaves).sum(), leaves) for f in (compiled, run)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_is_refused() -> None:
    x = torch.randn(6, 4)
    for make, least in ((soft, -1.0), (soft, math.inf), (soft, math.nan), (straight_through, 0.0)):
        with pytest.raises(ValueError, match="temperature"):
            make(least)
    with pytest.raises(ValueError, match="unknown selection 'easy'; known are 'hard'"):
        convnn(x, x, x, k=2, selection="easy")
    with pytest.raises(ValueError, match="needs uniform weights or a softmax, got sparsemax"):
        convnn(x, x, x, k=2, weighting="sparsemax", selection=soft(1.0))
    with pytest.raises(ValueError, match=r"must return a count per score, shape \(6, 8\), got \(6, 2\)"):
        convnn(x, x, x, k=2, selection=lambda scores, chosen: scores[..., :2], backend="reference")  # noqa: ARG005
    bare = Backend(chunked.BACKEND.select, chunked.BACKEND.aggregate, chunked.BACKEND.declines)
    with pytest.raises(ValueError, match="it looks at the chosen keys alone"):
        convnn(x, x, x, k=2, selection=soft(1.0), backend=bare)


def test_explain_says_what_every_key_costs() -> None:
    x = torch.empty(200, 16, device="meta")
    told = library.explain(x, x, x, k=9, selection=soft(0.1))
    assert told.name == "chunked"
    assert told.passed_over["triton"] == "it looks at the chosen keys alone, and this selection lets every key count"
    assert told.cost is not None
    assert told.cost.combine_products == 200 * 200 * 16
    assert explain(x, x, x, k=9).cost.combine_products == 200 * 9 * 16  # type: ignore[union-attr]

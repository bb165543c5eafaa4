"""Mask rules against attention with masks built one pair at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from convnn.backends.chunked import with_budget
from convnn.functional import convnn, nearest
from convnn.masks import Rule, bigbird, causal, dilated, fixed, neighborhood, strided, window
from convnn_lab.bench.memory import LiveTensors
from tests.definition.test_operator import randn

N, M = 37, 41

Pair = Callable[[int, int], bool]
RULES: dict[str, tuple[Rule, Pair]] = {
    "causal": (causal, lambda i, j: j <= i),
    "window": (window(3), lambda i, j: -3 <= i - j <= 3),
    "dilated": (dilated(2, 4), lambda i, j: i - j in (-8, -4, 0, 4, 8)),
    "strided": (strided(5), lambda i, j: abs(i - j) <= 5 or (i - j) % 5 == 0),
    "strided, causal": (strided(5) & causal, lambda i, j: j <= i and (i - j <= 5 or (i - j) % 5 == 0)),
    "fixed": (fixed(6, 2), lambda i, j: i // 6 == j // 6 or j % 6 in (4, 5)),
    "fixed, causal": (fixed(6) & causal, lambda i, j: j <= i and (i // 6 == j // 6 or j % 6 == 5)),
    "bigbird without chance": (bigbird(2, 3, 0, keys=M), lambda i, j: abs(i - j) <= 2 or i < 3 or j < 3),
    "outside a window, or itself": (~window(3) | window(0), lambda i, j: abs(i - j) > 3 or i == j),
    "with a function": (window(9) & (lambda i, j: (i + j) % 2 == 0), lambda i, j: abs(i - j) <= 9 and (i + j) % 2 == 0),
}


def drawn(pair: Pair) -> Tensor:
    return torch.tensor([[pair(i, j) for j in range(M)] for i in range(N)])


def by_rule(rule: Any, n: int = N, m: int = M) -> Tensor:
    return rule(torch.arange(n)[:, None], torch.arange(m)[None, :])


def test_neighbourhood_windows_are_whole_and_near() -> None:
    for size, sides in (((7,), (3,)), ((5, 8), (3, 5)), ((3, 4, 5), (3, 1, 3))):
        n = math.prod(size)
        cells = list(itertools.product(*map(range, size)))
        ours = by_rule(neighborhood(size, sides), n, n)
        for i, here in enumerate(cells):
            axes = zip(here, size, sides, strict=True)
            first = [min(max(place - r // 2, 0), side - r) for place, side, r in axes]
            chosen = [all(f <= c < f + r for c, f, r in zip(cell, first, sides, strict=True)) for cell in cells]
            assert ours[i].tolist() == chosen
            assert sum(chosen) == math.prod(sides)
    with pytest.raises(ValueError, match=r"odd sides within the map of \(5, 8\), got 4"):
        neighborhood((5, 8), 4)


@pytest.mark.parametrize("backend", ["reference", "chunked", with_budget(300)], ids=["reference", "chunked", "blocks"])
@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_its_mask(name: str, backend: Any) -> None:
    rule, pair = RULES[name]
    mask = drawn(pair)
    query, key, value = (randn(2, *size).requires_grad_() for size in ((N, 6), (M, 6), (M, 4)))
    ours = convnn(query, key, value, k="all", mask=rule, backend=backend)
    theirs = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    pull = torch.randn_like(theirs)
    leaves = (query, key, value)
    for a, b in zip(torch.autograd.grad(ours, leaves, pull), torch.autograd.grad(theirs, leaves, pull), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    few = convnn(query, key, value, k=4, mask=rule, backend=backend)
    torch.testing.assert_close(few, convnn(query, key, value, k=4, mask=mask, backend="reference"))


@pytest.mark.parametrize("backend", ["reference", "chunked", with_budget(300)], ids=["reference", "chunked", "blocks"])
def test_bigbird_is_attention_under_the_mask_it_draws(backend: Any) -> None:
    rule = bigbird(1, 2, 3, keys=M, seed=5)
    query, key, value = (randn(*size) for size in ((N, 6), (M, 6), (M, 4)))
    mask = by_rule(rule)
    ours = convnn(query, key, value, k="all", mask=rule, backend=backend)
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(query, key, value, attn_mask=mask))


def test_bigbird_draws_so_many_keys_for_each_query_and_the_same_for_a_seed() -> None:
    n, m, random = 400, 300, 3
    chance = by_rule(bigbird(0, 0, random, keys=m, seed=1) & ~window(0), n, m)
    counts = chance.sum(-1)
    assert counts.max() == random
    assert counts.float().mean() > random - 0.1  # two may fall together, or on the query's own place
    assert torch.equal(chance, by_rule(bigbird(0, 0, random, keys=m, seed=1) & ~window(0), n, m))
    other = by_rule(bigbird(0, 0, random, keys=m, seed=2) & ~window(0), n, m)
    assert (chance & other).sum() < 0.05 * chance.sum()
    # No part of the keys is left out or preferred.
    share = chance.sum(0).float().reshape(10, 30).sum(-1) / chance.sum()
    assert share.min() > 0.06
    assert share.max() < 0.14
    shifted = (chance[1:, 1:] & chance[:-1, :-1]).sum()  # and no diagonals
    assert shifted < 0.05 * chance.sum()


@pytest.mark.parametrize("backend", ["reference", "chunked", with_budget(300)], ids=["reference", "chunked", "blocks"])
def test_several_masks_all_apply_and_floats_add(backend: Any) -> None:
    query, key, value = (randn(2, *size) for size in ((N, 6), (M, 6), (M, 4)))
    first, second = randn(N, M).requires_grad_(), randn(2, 1, M).requires_grad_()
    slope = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    padding = torch.arange(M) < 35
    masks = ["causal", padding, first, lambda i, j: -slope * (i - j), second, window(20)]
    i, j = torch.arange(N)[:, None], torch.arange(M)
    whole = (first + second - slope * (i - j)).masked_fill(~((j <= i) & padding & ((i - j).abs() <= 20)), -torch.inf)
    for k in (5, "all"):
        ours = convnn(query, key, value, k=k, mask=masks, backend=backend)  # type: ignore[arg-type]
        theirs = convnn(query, key, value, k=k, mask=whole, backend="reference")
        torch.testing.assert_close(ours, theirs)
        grads = [
            torch.autograd.grad(y.square().sum(), (first, second, slope), retain_graph=True) for y in (ours, theirs)
        ]
        torch.testing.assert_close(*grads)
    none = convnn(query, key, value, k=5, mask=[], backend=backend)
    torch.testing.assert_close(none, convnn(query, key, value, k=5, backend="reference"))


def test_a_rule_on_20000_tokens_runs_in_bounded_memory() -> None:
    x, rule = torch.randn(20_000, 4), bigbird(2, 1, 2, keys=20_000) & causal
    torch.use_deterministic_algorithms(False)
    budget = 2**22
    with LiveTensors() as live, torch.no_grad():
        found = nearest(x, x, k=3, mask=rule, backend=with_budget(budget))
    assert live.largest <= budget
    assert live.peak < 60 * 4 * budget  # int64 and bool beside float32; all pairs would be 1.6 GB
    rows = torch.randint(3, 20_000, (20,))
    exact = nearest(x[rows], x, k=3, mask=rule(rows[:, None], torch.arange(20_000)[None]))
    assert torch.equal(found.index[rows], exact.index)


def test_rules_compile() -> None:
    torch.compiler.reset()
    x = torch.randn(2, 11, 6)
    for rule in (bigbird(1, 1, 2, keys=11) & causal, ~fixed(4, 2) | strided(3), dilated(2, 2)):

        def run(x: Tensor, rule: Any = rule) -> Tensor:
            return convnn(x, x, x, k=3, mask=rule)

        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), run(x))


def test_impossible_rules_are_refused() -> None:
    for make, name in ((window, "radius"), (strided, "stride"), (fixed, "stride")):
        with pytest.raises(ValueError, match=rf"{name} must be a whole number of at least \d, got -1"):
            make(-1)
    with pytest.raises(ValueError, match=r"step must be a whole number of at least 1, got 0"):
        dilated(3, 0)
    with pytest.raises(ValueError, match=r"summary must be from 1 to the stride, 4, got 5"):
        fixed(4, 5)
    with pytest.raises(ValueError, match=r"random must be a whole number of at least 0, got 1.5"):
        bigbird(1, 1, 1.5, keys=10)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"rules combine where they return a bool tensor, got torch.float32"):
        by_rule(causal & (lambda i, j: (i - j).float()))
    with pytest.raises(ValueError, match=r"unknown mask 'casual'"):
        nearest(torch.randn(3, 4), torch.randn(3, 4), k=1, mask=["causal", "casual"])


def test_rules_obey_the_laws_of_sets() -> None:
    for a, b in itertools.combinations([window(4), causal, fixed(5), dilated(3, 3)], 2):
        assert torch.equal(by_rule(~(a & b)), by_rule(~a | ~b))
        assert torch.equal(by_rule(a | b), by_rule(b | a))
        assert torch.equal(by_rule(~~a), by_rule(a))


def test_masks_of_half_types_add_in_the_type_of_the_scores() -> None:
    """1 and 2^-9 have no sum in bfloat16."""
    x = torch.zeros(1, 3)
    masks = [torch.tensor([[1.0, 1.0]]).bfloat16(), torch.tensor([[2.0**-9, 0.0]]).bfloat16()]
    for backend in ("reference", "chunked"):
        found = nearest(x, torch.zeros(2, 3), k=2, mask=masks, backend=backend)
        assert found.scores.tolist() == [[1 + 2.0**-9, 1.0]]

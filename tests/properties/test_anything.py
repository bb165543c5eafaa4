"""Slow: any combination of everything, against the double loop and between backends. Run with `make test-slow`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from convnn.backends.chunked import with_budget
from convnn.functional import convnn
from tests import oracle
from tests.definition.test_operator import SIMILARITIES, WEIGHTINGS

pytestmark = pytest.mark.slow
operator: Any = convnn

LEADS: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = [
    ((), (), ()),
    ((3,), (3,), (3,)),
    ((2, 3), (2, 3), (2, 3)),
    ((2, 1), (3,), (2, 3)),
    ((), (), (2,)),
    ((2, 3), (), (1, 1)),
    ((1,), (2, 1), (3,)),
]
MASKS = ["none", "bool", "float", "keys", "rows", "leading", "causal"]


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Tensor | None], dict[str, Any]]:
    """Tensors (query, key, value, kernel, bias, mask) and options."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    n, m, e, c = (draw(st.integers(low, 8)) for low in (1, 1, 3, 1))
    lead = draw(st.sampled_from(LEADS))
    query, key, value = (
        torch.randn(*front, *size, dtype=torch.float64)
        for front, size in zip(lead, ((n, e), (m, e), (m, c)), strict=True)
    )
    has_kernel = draw(st.booleans())
    k: Any = draw(st.integers(1, m)) if has_kernel else draw(st.one_of(st.integers(1, m), st.just("all")))
    narrowed: dict[str, Any] = {}
    if draw(st.booleans()):
        r = draw(st.integers(1 if k == "all" else k, m))
        narrowed["candidates"] = torch.randperm(m)[:r]
    if draw(st.booleans()):
        narrowed |= {"self_index": torch.randint(-1, m, (n,)), "self_score": draw(st.sampled_from(["true", "one"]))}
    kernel, outputs = None, c
    if has_kernel:
        per_group = draw(st.sampled_from([size for size in range(1, c + 1) if c % size == 0]))
        outputs = (c // per_group) * draw(st.integers(1, 3))
        kernel = torch.randn(outputs, per_group, k, dtype=torch.float64)
    bias = torch.randn(outputs, dtype=torch.float64) if draw(st.booleans()) else None
    masking = draw(st.sampled_from(MASKS))
    whole = torch.broadcast_shapes(*lead)
    shape = {"keys": (1, m), "rows": (n, 1), "leading": (*whole, n, m)}.get(masking, (n, m))
    mask: Any = None
    if masking != "none":
        allowed = torch.rand(shape) < draw(st.sampled_from([0.2, 0.7, 1.0]))
        mask = torch.randn(shape, dtype=torch.float64).masked_fill(~allowed, -torch.inf)
        mask = allowed if masking == "bool" else mask
    options = {
        "k": k,
        "similarity": draw(st.sampled_from(SIMILARITIES)),
        "weighting": draw(st.sampled_from(WEIGHTINGS)),
        "order": draw(st.sampled_from(["score", "key"])),
        **narrowed,
    }
    if masking == "causal":
        mask, options["mask"] = None, "causal"
    return [query, key, value, kernel, bias, mask], options


def slow(tensors: list[Tensor | None], options: dict[str, Any]) -> Tensor:
    query, key, value, kernel, bias, mask = tensors
    assert query is not None
    assert key is not None
    n, m = query.shape[-2], key.shape[-2]
    k = m if options["k"] == "all" else options["k"]
    if options.get("mask") == "causal":
        mask = torch.arange(m) <= torch.arange(n)[:, None]
    mask = None if mask is None else mask.expand(*mask.shape[:-2], n, m)

    chosen: Any = {"own_score": 1.0 if options.get("self_score") == "one" else None}
    if "candidates" in options:
        chosen["candidates"] = options["candidates"].tolist()
    if "self_index" in options:
        chosen["own"] = options["self_index"].tolist()

    def one(q: Tensor, x: Tensor, v: Tensor, a: Tensor | None) -> Tensor:
        found = oracle.neighbors(q, x, k, options["similarity"], a, options["order"], **chosen)
        return oracle.aggregate(v, *found, options["weighting"], kernel, bias)

    return oracle.over_leading(one, query, key, value, mask)


def fast(tensors: list[Tensor | None], options: dict[str, Any], backend: Any) -> list[Tensor]:
    leaves: Any = [x if x is None or x.dtype == torch.bool else x.clone().requires_grad_() for x in tensors]
    given_mask = {} if leaves[5] is None else {"mask": leaves[5]}
    output = operator(*leaves[:5], **options, **given_mask, backend=backend)
    pull = torch.linspace(-1, 2, output.numel(), dtype=torch.float64).reshape(output.shape)
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    return [output.detach(), *torch.autograd.grad(output, wanted, pull, allow_unused=True, materialize_grads=True)]


@settings(max_examples=1500)
@given(problems(), st.integers(1, 400))
def test_any_problem_has_one_answer(problem: tuple[list[Tensor | None], dict[str, Any]], budget: int) -> None:
    expected = fast(*problem, backend="reference")
    torch.testing.assert_close(expected[0], slow(*problem), rtol=1e-10, atol=1e-10)
    found = fast(*problem, backend=with_budget(budget))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_a_large_problem_has_one_answer(similarity: str) -> None:
    shapes = ((2, 1500, 32), (2, 1700, 32), (2, 1700, 24), (12, 6, 9))
    leaves = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    results = []
    for backend in ("reference", "chunked", with_budget(2**16)):
        output = operator(*leaves, k=9, similarity=similarity, mask="causal", backend=backend)
        results.append([output.detach(), *torch.autograd.grad(output.square().mean(), leaves)])
    for found in results[1:]:
        torch.testing.assert_close(found, results[0], rtol=1e-9, atol=1e-9)

"""What comes in: refused with a reason, or defined."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import convnn
from convnn.candidates import grid
from convnn.functional import aggregate, nearest
from convnn.functional import convnn as operator
from convnn.neighbors import Neighbors
from convnn.similarity import SIMILARITIES
from convnn.weighting import WEIGHTINGS, order_free

BACKENDS = ["reference", "chunked", "auto"]


def call(**changed: Any) -> Tensor:
    given: dict[str, Any] = {
        "query": torch.randn(2, 7, 5),
        "key": torch.randn(2, 11, 5),
        "value": torch.randn(2, 11, 6),
        "kernel": torch.randn(4, 3, 3),
        "k": 3,
    }
    return operator(**{**given, **changed})


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "k is 0": ({"k": 0}, "k must be from 1 to the number of keys, 11, got 0"),
    "k is above M": ({"k": 12}, "k must be from 1 to the number of keys, 11, got 12"),
    "k is a float": ({"k": 3.0}, "k must be an integer or 'all', got 3.0 of type float"),
    "k is a bool": ({"k": True}, "k must be an integer or 'all', got True of type bool"),
    "k is a word": ({"k": "every"}, "k must be an integer or 'all', got 'every'"),
    "all with a kernel": ({"k": "all"}, "k='all' takes no kernel"),
    "channels differ": ({"key": torch.randn(2, 11, 4)}, "must have as many channels, got 5 and 4"),
    "no channels": ({"query": torch.randn(7, 0), "key": torch.randn(11, 0)}, "at least one channel to compare, got 0"),
    "no keys": (
        {"key": torch.randn(2, 0, 5), "value": torch.randn(2, 0, 6)},
        "at least one key, got a key of shape (2, 0",
    ),
    "a value too many": ({"value": torch.randn(2, 12, 6)}, "a value for every key, got 12 values for 11 keys"),
    "leading sizes": ({"key": torch.randn(3, 11, 5)}, "leading dimensions must broadcast, got query (2,), key (3,)"),
    "leading value": ({"value": torch.randn(3, 11, 6)}, "must broadcast, got query (2,), key (2,), value (3,)"),
    "a vector": ({"query": torch.randn(5)}, "query must have shape (..., N, E), got (5,)"),
    "a vector of values": ({"value": torch.randn(11)}, "value must have shape (..., M, C), got (11,)"),
    "dtypes of the compared": ({"key": torch.randn(2, 11, 5).double()}, "query torch.float32, key torch.float64"),
    "dtypes of the combined": ({"kernel": torch.randn(4, 3, 3).double()}, "value torch.float32, kernel torch.float64"),
    "integers": (
        {"query": torch.ones(2, 7, 5).long()},
        "query must be float64, float32, bfloat16 or float16, got torch.int64",
    ),
    "complex numbers": ({"query": torch.ones(2, 7, 5) * 1j}, "bfloat16 or float16, got torch.complex64"),
    "devices": ({"key": torch.randn(2, 11, 5, device="meta")}, "one device, got query on cpu, key on meta"),
    "device of the value": (
        {"value": torch.randn(2, 11, 6, device="meta"), "kernel": None},
        "query on cpu, value on meta",
    ),
    "device of the mask": ({"mask": torch.ones(7, 11, device="meta")}, "query on cpu, mask on meta"),
    "taps": ({"kernel": torch.randn(4, 3, 5)}, "as many taps as there are neighbours, 3, got 5"),
    "kernel dimensions": ({"kernel": torch.randn(4, 3)}, "kernel must have shape (O, C/groups, K), got (4, 3)"),
    "kernel channels": ({"kernel": torch.randn(4, 4, 3)}, "takes 4 channels per group, which does not divide the 6"),
    "kernel outputs": ({"kernel": torch.randn(5, 3, 3)}, "has 5 outputs, which its 2 groups do not divide"),
    "bias": ({"bias": torch.randn(5)}, "bias must have shape (4,), one per output channel, got (5,)"),
    "mask size": ({"mask": torch.ones(7, 10).bool()}, "must broadcast to (..., 7, 11), got (7, 10)"),
    "mask dtype": ({"mask": torch.ones(7, 11).int()}, "must be bool (True may be chosen) or floating point"),
    "mask name": ({"mask": "casual"}, "unknown mask 'casual'; known are 'causal'"),
    "mask leading": ({"mask": torch.ones(3, 7, 11).bool()}, "query (2,), key (2,), mask (3,)"),
    "leading mask and value": (
        {"query": torch.randn(7, 5), "key": torch.randn(11, 5), "mask": torch.ones(3, 7, 11).bool()},
        "query (), key (), mask (3,), value (2,)",
    ),
    "similarity": (
        {"similarity": "cos"},
        "unknown similarity 'cos'; known are 'chebyshev', 'cosine', 'dot', 'euclidean'",
    ),
    "weighting": (
        {"weighting": "max"},
        "unknown weighting 'max'; known are 'softmax', 'softmin', 'sparsemax', 'uniform'",
    ),
    "backend": ({"backend": "cuda"}, "unknown backend 'cuda'; known are 'auto', 'chunked', 'reference'"),
    "order": ({"order": "rank"}, "order must be one of 'score', 'key', got 'rank'"),
    "dropout": ({"dropout_p": 1.5}, "dropout_p must be a number from 0 to 1, got 1.5"),
    "no dropout": ({"dropout_p": None}, "dropout_p must be a number from 0 to 1, got None"),
    "eight bits": (
        {"query": torch.randn(2, 7, 5).to(torch.float8_e4m3fn)},
        "query must be float64, float32, bfloat16 or float16, got torch.float8_e4m3fn",
    ),
    "a similarity of pairs only": (
        {"similarity": F.cosine_similarity, "query": torch.randn(2, 11, 5), "k": "all", "kernel": None},
        "a similarity of (2, 11, 5) and (2, 11, 5) must return float scores (..., 11, 11), got (2, 5)",
    ),
    "a similarity of integers": (
        {"similarity": lambda q, x: (q @ x.mT).long()},
        "must return float scores (..., 7, 11)",
    ),
    "no similarity": ({"similarity": lambda q, x: None}, "must return float scores (..., 7, 11), got NoneType"),  # noqa: ARG005
    "no weights": ({"weighting": lambda s, f: None}, "a weight per score, shape (2, 7, 3), got NoneType"),  # noqa: ARG005
    "a rule of one truth": ({"mask": lambda i, j: True}, "must return a bool or floating point tensor, got bool"),  # noqa: ARG005
    "a rule of integers": (
        {"mask": lambda i, j: i - j},
        "must return a bool or floating point tensor, got torch.int64",
    ),
    "a rule by head": (
        {"mask": lambda i, j: -torch.ones(2, 1, 1) * (i - j).abs()},
        "a mask rule knows rows and keys only and must return (7, 11), got (2, 7, 11)",
    ),
    "few candidates": ({"candidates": torch.arange(2)}, "k must be from 1 to the number of candidates, 2, got 3"),
    "candidates beyond": ({"candidates": torch.arange(8, 12)}, "must be below the number of keys, 11, got 11"),
    "candidates of floats": (
        {"candidates": torch.ones(4)},
        "shape (..., r) and type torch.int64, got (4,) of torch.float32",
    ),
    "leading candidates": ({"candidates": torch.zeros(3, 4).long()}, "query (2,), key (2,), candidates (3,)"),
    "candidates elsewhere": (
        {"candidates": torch.zeros(4, device="meta").long()},
        "query on cpu, candidates on meta",
    ),
    "self of another size": (
        {"self_index": torch.arange(6)},
        "self_index must name a key for each of the 7 queries, got a shape of (6,)",
    ),
    "self beyond": ({"self_index": torch.arange(5, 12)}, "self_index must be below the number of keys, 11, got 11"),
    "self score": ({"self_score": 1.0}, "self_score must be one of 'true', 'one', got 1.0"),
    "a grid that is none": ({"candidates": grid(5, size=(1, 11))}, "a whole number to the 2, got 5"),
    "a grid of another map": ({"candidates": grid(4, size=(3, 4))}, "a map of (3, 4) were given 11 keys"),
    "a margin of everything": ({"candidates": grid(4, margin=6)}, "a margin of 6 at both ends leaves nothing"),
    "weights": ({"weighting": lambda s, f: s[..., :1]}, "a weight per score, shape (2, 7, 3), got (2, 7, 1)"),  # noqa: ARG005
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_wrong_is_refused_with_what_is_required_and_what_came(case: str) -> None:
    changed, message = REFUSED[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        call(**changed)


def test_strategies_of_the_wrong_type_are_refused() -> None:
    with pytest.raises(TypeError, match=r"similarity must be a callable or one of 'chebyshev', .* got 3"):
        call(similarity=3)
    with pytest.raises(TypeError, match=r"query must be a tensor, got list"):
        call(query=[[1.0]])
    with pytest.raises(TypeError, match=r"backend must be a callable or one of 'auto', .* got 3"):
        call(backend=3)
    with pytest.raises(
        TypeError, match=r"backend must be a name or a record of type Backend, got <function with_budget"
    ):
        call(backend=convnn.backends.chunked.with_budget)
    for name in ("query", "key", "value"):
        with pytest.raises(TypeError, match=rf"{name} must be a tensor, got NoneType"):
            call(**{name: None})


def test_any_kind_of_integer_is_a_k() -> None:
    for backend in BACKENDS:
        assert call(k=numpy.int64(3), backend=backend).shape == (2, 7, 4)


def test_neighbours_may_come_as_a_plain_pair() -> None:
    value, found = torch.randn(11, 6), nearest(torch.randn(7, 5), torch.randn(11, 5), k=3)
    assert torch.equal(aggregate(value, tuple(found)), aggregate(value, found))  # type: ignore[arg-type]


def test_a_budget_must_be_a_positive_number() -> None:
    for wrong in (0, -3, 2.5, True):
        with pytest.raises(ValueError, match=r"the budget must be a positive number of scores, got "):
            convnn.backends.chunked.with_budget(wrong)  # type: ignore[arg-type]


def test_aggregate_refuses_what_no_search_returns() -> None:
    value = torch.randn(11, 6)
    with pytest.raises(ValueError, match=re.escape("of one shape (..., N, K), got scores (7, 3) and index (7, 2)")):
        aggregate(value, Neighbors(torch.randn(7, 3), torch.zeros(7, 2).long()))
    with pytest.raises(ValueError, match=r"must be of type torch.int64, got torch.int32"):
        aggregate(value, Neighbors(torch.randn(7, 3), torch.zeros(7, 3).int()))


def test_an_explicit_backend_that_cannot_run_raises_with_its_reason() -> None:
    x = torch.randn(3, 7, 5)
    with pytest.raises(ValueError, match=r"backend 'chunked' cannot run these inputs: torch.func transforms"):
        torch.func.vmap(lambda x: operator(x, x, x, k=3, backend="chunked"))(x)


def test_explain_names_the_backend_and_why() -> None:
    x = torch.randn(3, 7, 5)
    assert convnn.explain(x, x, x, k=3).name == "chunked"
    assert convnn.explain(x, x, x, k=3, backend="reference").name == "reference"
    chosen = []
    torch.func.vmap(lambda x: chosen.append(convnn.explain(x, x, x, k=3)) or x)(x)  # type: ignore[func-returns-value]
    assert chosen[0].name == "reference"
    said = str(chosen[0])
    assert said.startswith("reference (the definition; holds all scores at once); not triton: its kernels run on CUDA")
    assert "; not chunked: torch.func" in said
    with pytest.raises(ValueError, match=r"k must be from 1 to"):
        convnn.explain(x, x, x, k=30)
    with pytest.raises(TypeError, match=r"similarly"):
        convnn.explain(x, x, x, k=3, similarly="dot")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_record_serves_as_a_backend(backend: str) -> None:
    x = torch.randn(7, 5)
    record = convnn.backends.BACKENDS.get(backend, convnn.backends.BACKENDS["reference"])
    torch.testing.assert_close(operator(x, x, x, k=3, backend=record), operator(x, x, x, k=3, backend=backend))


def test_a_backend_without_a_fused_half_runs_its_two_halves() -> None:
    query, key, value = torch.randn(2, 7, 5), torch.randn(2, 11, 5), torch.randn(2, 11, 6)
    for record in convnn.backends.BACKENDS.values():
        halves = replace(record, fused=None)
        for k in (3, "all"):
            whole = operator(query, key, value, k=k, mask="causal", backend=record)
            torch.testing.assert_close(operator(query, key, value, k=k, mask="causal", backend=halves), whole)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("k", [3, "all"])
def test_a_row_with_nothing_to_choose_is_0_and_passes_no_gradient(k: Any, weighting: str, backend: str) -> None:
    query, key, value = (torch.randn(*shape, requires_grad=True) for shape in ((4, 5), (6, 5), (6, 3)))
    mask = torch.ones(4, 6).tril(1).bool()
    mask[1] = False
    output = operator(query, key, value, k=k, mask=mask, weighting=weighting, backend=backend)
    assert not output[1].any()
    assert output[0].any()
    gradients = torch.autograd.grad(
        output.square().sum(), (query, key, value), materialize_grads=True, allow_unused=True
    )
    assert all(g.isfinite().all() for g in gradients)
    assert not gradients[0][1].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_slot_does_not_see_the_value_it_points_at(backend: str) -> None:
    x, value = torch.randn(6, 5), torch.randn(6, 3)
    value[0] = torch.nan
    output = operator(x, x, value, k=3, mask=torch.arange(6) > 3, weighting="uniform", backend=backend)
    torch.testing.assert_close(output, value[4:].sum(0).expand(6, 3))


@pytest.mark.parametrize("backend", [*BACKENDS, convnn.backends.chunked.with_budget(20)])
@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("k", [3, "all"])
@pytest.mark.parametrize("channels", [5, 12])
def test_a_nan_reaches_its_rows_and_no_others(
    channels: int, k: Any, weighting: str, similarity: str, backend: Any
) -> None:
    query, key, value = torch.randn(2, 7, channels), torch.randn(2, 11, channels), torch.randn(2, 11, 6)
    query[0, 2, 1] = torch.nan
    key[1, 4, 0] = torch.nan
    mask = torch.ones(7, 11).bool()
    mask[3:, 4] = False  # the queries from 3 on cannot see that key
    options: Any = {"k": k, "weighting": weighting, "similarity": similarity, "backend": backend}
    rows = torch.zeros(2, 7).bool()
    rows[0, 2], rows[1, :3] = True, True
    output = operator(query, key, value, mask=mask, **options)
    assert torch.equal(output.isnan().all(-1), rows)
    assert torch.equal(output.isnan().any(-1), rows)
    floats = torch.zeros(7, 11).masked_fill(~mask, -torch.inf)
    assert torch.equal(operator(query, key, value, mask=floats, **options).isnan().any(-1), rows)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_queries_and_no_batch_give_empty_results(backend: str) -> None:
    key, value = torch.randn(11, 5), torch.randn(11, 6)
    assert operator(torch.randn(0, 5), key, value, k=3, backend=backend).shape == (0, 6)
    assert operator(torch.randn(0, 5), key, value, k="all", backend=backend).shape == (0, 6)
    assert operator(torch.randn(0, 4, 7, 5), key, value, k=3, backend=backend).shape == (0, 4, 7, 6)
    assert nearest(torch.randn(0, 5), key, k=3, backend=backend).index.shape == (0, 3)
    assert operator(torch.randn(7, 5), key, torch.randn(11, 0), k=3, backend=backend).shape == (7, 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_masks_broadcast_as_in_torch(backend: str) -> None:
    query, key, value = torch.randn(2, 7, 5), torch.randn(2, 11, 5), torch.randn(2, 11, 6)
    keys, rows = torch.rand(11) < 0.5, torch.rand(7, 1) < 0.5
    for mask in (keys, rows, torch.tensor(True), keys[None].expand(2, 1, 11)):
        ours = operator(query, key, value, k=3, mask=mask, backend=backend)
        whole = mask.expand(2, 7, 11).contiguous()
        torch.testing.assert_close(ours, operator(query, key, value, k=3, mask=whole, backend=backend))
    longer = operator(query[0], key[0], value[0], k=3, mask=torch.rand(3, 7, 11) < 0.8, backend=backend)
    assert longer.shape == (3, 7, 6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rule_is_a_mask_and_may_return_floats(backend: str) -> None:
    query, key, value = torch.randn(2, 7, 5), torch.randn(2, 11, 5), torch.randn(2, 11, 6)
    slope = torch.tensor(0.3, requires_grad=True)
    i, j = torch.arange(7)[:, None], torch.arange(11)
    for k in (3, "all"):
        ruled = operator(query, key, value, k=k, mask=lambda i, j: -slope * (i - j).abs(), backend=backend)
        laid = operator(query, key, value, k=k, mask=-slope * (i - j).abs(), backend=backend)
        torch.testing.assert_close(ruled, laid)
        ours, theirs = (torch.autograd.grad(y.square().sum(), slope)[0] for y in (ruled, laid))
        torch.testing.assert_close(ours, theirs)
        assert ours != 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("k", [3, "all"])
def test_a_learned_strategy_gets_its_gradient(k: Any, backend: str) -> None:
    """Nothing of what a callable closes over may be lost between forward and backward."""
    query, key, value = torch.randn(2, 7, 5), torch.randn(2, 11, 5), torch.randn(2, 11, 6)
    bend, heat = torch.eye(5).requires_grad_(), torch.tensor(2.0, requires_grad=True)
    output = operator(
        query,
        key,
        value,
        k=k,
        similarity=lambda q, x: q @ bend @ x.mT,
        weighting=lambda s, f: (s / heat).softmax(-1),  # noqa: ARG005
        backend=backend,
    )
    plain = operator(query @ bend / heat, key, value, k=k, similarity="dot", backend="reference")
    torch.testing.assert_close(output, plain)
    ours = torch.autograd.grad(output.square().sum(), (bend, heat))
    theirs = torch.autograd.grad(plain.square().sum(), (bend, heat))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("k", [3, "all"])
def test_a_learned_temperature_gets_its_gradient_beside_empty_slots(k: Any, backend: str) -> None:
    x, heat = torch.randn(6, 4), torch.tensor(0.5, requires_grad=True)
    x[0] *= 100

    def weighting(scores: Tensor, filled: Tensor) -> Tensor:  # noqa: ARG001
        return (scores / heat).softmax(-1)

    output = operator(x, x, x, k=k, mask="causal", weighting=weighting, backend=backend)
    plain = operator(x / heat, x, x, k=k, mask="causal", backend="reference")
    torch.testing.assert_close(output, plain)
    ours, theirs = (torch.autograd.grad(y.square().sum(), heat)[0] for y in (output, plain))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("k", [4, "all"])
@pytest.mark.parametrize("free", [False, True])
def test_an_empty_slot_weighs_0_whatever_the_weighting_says(free: bool, k: Any, backend: str) -> None:
    def ones(scores: Tensor, filled: Tensor) -> Tensor:  # noqa: ARG001
        return torch.ones_like(scores)

    x, value = torch.randn(6, 4), torch.randn(6, 3)
    output = operator(x, x, value, k=k, mask="causal", weighting=order_free(ones) if free else ones, backend=backend)
    torch.testing.assert_close(output[:4], value.cumsum(0)[:4])


@pytest.mark.parametrize("backend", [*BACKENDS, convnn.backends.chunked.with_budget(20)])
@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("k", [3, "all"])
def test_what_may_not_be_chosen_is_not_seen_by_gradients_either(k: Any, similarity: str, backend: Any) -> None:
    query, key, value = torch.randn(5, 12), torch.randn(7, 12), torch.randn(7, 3)
    query[4], key[2:], value[2:] = torch.nan, torch.nan, torch.nan
    mask = (torch.arange(7) < 2).repeat(5, 1)
    mask[4] = False
    leaves = [x.requires_grad_() for x in (query, key, value)]
    output = operator(*leaves, k=k, mask=mask, similarity=similarity, backend=backend)
    assert output.isfinite().all()
    assert not output[4].any()
    for gradient in torch.autograd.grad(output.square().sum(), leaves):
        assert gradient.isfinite().all()
    clean = operator(query[:4], key[:2], value[:2], k="all", similarity=similarity)
    torch.testing.assert_close(output[:4], clean)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_weighting_that_draws_is_the_same_in_forward_and_backward(backend: str) -> None:
    @order_free
    def dropping(scores: Tensor, filled: Tensor) -> Tensor:  # noqa: ARG001
        return F.dropout(scores.softmax(-1), 0.5)

    query, key, value = torch.randn(30, 4), torch.randn(11, 4), torch.eye(11, requires_grad=True)
    output = operator(query, key, value, k="all", weighting=dropping, backend=backend)
    (gradient,) = torch.autograd.grad(output.sum(), value)
    torch.testing.assert_close(gradient[:, 0], output.sum(0))


def test_one_search_serves_all_values_of_a_batch() -> None:
    seen = 0

    def counting(query: Tensor, key: Tensor) -> Tensor:
        nonlocal seen
        scores = query @ key.mT
        seen += scores.numel()
        return scores

    x, values = torch.randn(40, 5), torch.randn(30, 40, 6)
    with torch.no_grad():
        output = operator(x, x, values, k=3, similarity=counting, backend=convnn.backends.chunked.with_budget(500))
    assert seen == 40 * 40 + 40 * 3  # every pair once, and the chosen ones again
    torch.testing.assert_close(output, operator(x, x, values, k=3, similarity="dot", backend="reference"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_nan_row_leaves_the_values_it_did_not_choose_alone(backend: str) -> None:
    query, key = torch.randn(4, 5), torch.randn(6, 5)
    query[1] = torch.nan
    value = torch.randn(6, 3, requires_grad=True)
    output = operator(query, key, value, k=3, mask=torch.arange(6) == 4, backend=backend)
    (gradient,) = torch.autograd.grad(output.sum(), value)
    assert gradient[4].isnan().all()
    assert not gradient[[0, 1, 2, 3, 5]].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("k", [3, "all"])
def test_the_farthest_neighbour_still_outweighs_an_empty_slot(k: Any, backend: str) -> None:
    x = torch.randn(4, 3) * 1e15  # squared distances far below any finite score an empty slot could have
    output = operator(x, -x, x, k=k, similarity="sqeuclidean", mask=torch.arange(4) == 2, backend=backend)
    torch.testing.assert_close(output, x[2].expand(4, 3))

"""On a CUDA device: the same answers, no host synchronisation, bounded memory. Run with `make test-gpu`."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from convnn.backends import Backend
from convnn.candidates import Cells, grid, random
from convnn.descriptor import pixels, scaled_concat
from convnn.functional import convnn, nearest
from convnn.masks import Rule, bigbird, causal, dilated, fixed, strided, window
from convnn.relative import RelativeBias
from convnn.similarity import SIMILARITIES
from convnn.weighting import WEIGHTINGS
from tests.agreement.problems import PROBLEMS, Problem
from tests.agreement.test_backends import BUDGETS, assert_same, expected, run

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("backend", ["reference", *BUDGETS])
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_cuda_agrees_with_the_reference_on_the_cpu(problem: Problem, backend: str) -> None:
    found = run(problem, BUDGETS.get(backend, backend), device="cuda")
    assert_same({name: tensor.cpu() for name, tensor in found.items()}, expected(problem), problem.dtype)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("k", [9, "all"])
def test_nothing_waits_for_the_device(k: Any, backend: str) -> None:
    sizes = ((70, 16), (90, 16), (90, 8), (8, 1, 9))
    leaves: Any = [torch.randn(*size, device="cuda", requires_grad=True) for size in sizes[: 3 if k == "all" else 4]]
    pull = torch.randn(70, 8, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        convnn(*leaves, k=k, candidates=random(20), self_index=torch.arange(70, device="cuda"), backend=backend)
        convnn(
            *leaves,
            k=k,
            candidates=grid(25, size=(9, 10)),
            mask=RelativeBias((9, 10), device="cuda").on((9, 10), torch.arange(70, device="cuda")),
            backend=backend,
        )
        for similarity, weighting in zip(SIMILARITIES, itertools.cycle(WEIGHTINGS)):
            mask: Any = ["causal", strided(4), bigbird(3, 2, 2, keys=90)]
            output = convnn(*leaves, k=k, similarity=similarity, weighting=weighting, mask=mask, backend=backend)
            output.backward(pull)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert leaves[0].grad is not None
    assert leaves[0].grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [16, "all"])
def test_a_long_sequence_trains_in_bounded_memory(k: Any, dtype: torch.dtype) -> None:
    n, channels = 16384, 64
    leaves = [torch.randn(4, n, channels, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output = convnn(*leaves, k=k, backend="chunked")
    output.sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 4 * n * n * 4 / 20  # a twentieth of the scores alone
    rows = slice(100, 130)
    some = convnn(leaves[0][:, rows], *leaves[1:], k=k, backend="reference")
    torch.testing.assert_close(output[:, rows], some, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    "rule", [window(3) & causal, dilated(2, 3), strided(5), fixed(6, 2), bigbird(2, 1, 3, keys=60)]
)
def test_rules_say_the_same_on_every_device(rule: Rule) -> None:
    i, j = torch.arange(50)[:, None], torch.arange(60)[None, :]
    assert torch.equal(rule(i.cuda(), j.cuda()).cpu(), rule(i, j))
    x = torch.randn(50, 5, dtype=torch.float64)
    y = torch.randn(60, 5, dtype=torch.float64)
    ours = convnn(x.cuda(), y.cuda(), y.cuda(), k=4, mask=rule)
    torch.testing.assert_close(ours.cpu(), convnn(x, y, y, k=4, mask=rule))


def test_autocast_leaves_the_choice_alone() -> None:
    query, key = torch.randn(3, 200, 32, device="cuda"), torch.randn(3, 300, 32, device="cuda")
    exact = nearest(query, key, k=9)
    with torch.autocast("cuda", torch.bfloat16):
        found = nearest(query, key, k=9)
        output = convnn(query, key, key, k=9)
    assert torch.equal(found.index, exact.index)
    assert torch.equal(found.scores, exact.scores)
    assert output.dtype == torch.bfloat16


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("k", [5, "all"])
def test_a_nan_reaches_its_rows_and_no_others(k: Any, backend: str) -> None:
    query, key, value = (torch.randn(2, *shape, device="cuda") for shape in ((7, 5), (11, 5), (11, 6)))
    query[0, 2, 1] = torch.nan
    key[1, 4, 0] = torch.nan
    mask = torch.ones(7, 11, device="cuda").bool()
    mask[3:, 4] = False
    rows = torch.zeros(2, 7, device="cuda").bool()
    rows[0, 2], rows[1, :3] = True, True
    output = convnn(query, key, value, k=k, mask=mask, weighting="uniform", backend=backend)
    assert torch.equal(output.isnan().any(-1), rows)


@pytest.mark.parametrize("k", [5, "all"])
def test_dropout_is_the_same_in_forward_and_backward(k: Any) -> None:
    query, key = torch.randn(30, 4, device="cuda"), torch.randn(11, 4, device="cuda")
    value = torch.eye(11, device="cuda", requires_grad=True)
    output = convnn(query, key, value, k=k, dropout_p=0.5, backend="chunked")
    (gradient,) = torch.autograd.grad(output.sum(), value)
    torch.testing.assert_close(gradient[:, 0], output.sum(0))


def test_coordinates_are_told_apart_with_tf32() -> None:
    place = torch.arange(20_000.0, device="cuda")[:, None]
    rows = torch.randint(1, 19_999, (100,), device="cuda")
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        found = nearest(place[rows], place, k=3, similarity="euclidean", order="key")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert torch.equal(found.index, rows[:, None] + torch.tensor([-1, 0, 1], device="cuda"))


def step(leaves: list[Tensor], pull: Tensor, backend: str | Backend) -> list[Tensor]:
    output = convnn(*leaves, k=9, backend=backend)
    return [output.detach(), *torch.autograd.grad(output, leaves, pull)]


def test_a_training_step_is_captured_in_a_graph() -> None:
    leaves = [torch.randn(2, 128, 16, device="cuda", requires_grad=True) for _ in range(3)]
    pull = torch.randn(2, 128, 16, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step(leaves, pull, "chunked")
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(leaves, pull, "chunked")
    with torch.no_grad():
        for leaf in leaves:
            leaf.copy_(torch.randn_like(leaf))
    graph.replay()
    torch.testing.assert_close(captured, step(leaves, pull, "chunked"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("per", ["batch", "sample", "head"])
def test_the_draw_of_evaluation_is_the_same_on_every_device(per: Any) -> None:
    among = random(20, size=(9, 14), padding=1, per=per, seed=7).eval()
    lead, cells = torch.Size((3, 2)), Cells((9 * 14,))
    here, there = (among(lead, cells, torch.device(device)) for device in ("cpu", "cuda"))
    assert here is not None
    assert there is not None
    assert torch.equal(here, there.cpu())


def test_positions_agree_with_the_cpu() -> None:
    bias = RelativeBias((6, 9), heads=2, class_tokens=1, dtype=torch.float64)
    for table in bias.parameters():
        torch.nn.init.normal_(table)
    x = torch.randn(3, 2, 55, 5, dtype=torch.float64)
    results = {}
    for device in ("cpu", "cuda"):
        moved = copy.deepcopy(bias).to(device)
        y = x.to(device)
        described = scaled_concat(0.4)(y, pixels((5, 11), device=device))
        output = convnn(
            described, described, y, k=7, mask=[moved, "causal"], self_index=torch.arange(55, device=device)
        )
        grads = torch.autograd.grad(output.square().sum(), list(moved.parameters()))
        results[device] = [output.detach().cpu(), *(g.cpu() for g in grads)]
    torch.testing.assert_close(results["cpu"], results["cuda"], rtol=1e-10, atol=1e-10)

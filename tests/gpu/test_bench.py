"""The benchmark on a CUDA device, at small sizes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from convnn_lab.bench import correctness, layer, op, peers, plain
from convnn_lab.bench.check import check
from convnn_lab.bench.measure import Cost
from convnn_lab.bench.op import Case
from convnn_lab.bench.report import Row

pytestmark = pytest.mark.gpu
# What runs wherever Triton does; other backends of torch's attention depend on the device.
ANYWHERE = {"sdpa", "sdpa, math", "convnn", "convnn, no kernel", "plain", "kvt, masked", "kvt, flex", "flex"}


def assert_measured(rows: list[Row]) -> None:
    measured = {row.contender: row.cost for row in rows if row.cost is not None}
    assert set(measured) >= ANYWHERE, {row.contender: row.skipped for row in rows}
    for cost in measured.values():
        assert isinstance(cost, Cost)
        assert 0 < cost.forward < cost.both
        assert cost.memory_forward > 0
        assert 0 < cost.memory_backward <= 1.01 * cost.memory_both


@pytest.fixture
def nothing_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let others stand for flex_attention, which takes long to compile and has a test of its own."""
    monkeypatch.setattr(peers, "flex", partial(peers.sdpa, SDPBackend.MATH))
    monkeypatch.setattr(peers, "flex_kvt", lambda k: partial(plain.kvt, k=k))


@pytest.mark.filterwarnings("ignore")  # what peers warn of is theirs
@pytest.mark.usefixtures("nothing_compiles")
def test_the_operator_is_measured_against_all_its_peers() -> None:
    rows = list(op.op([Case(12, 130, 64, 9), Case(12, 130, 64, 9, 32)]))
    assert_measured([row for row in rows if "r=" not in row.case])
    assert {row.contender for row in rows if "r=" in row.case} == {"sdpa", "convnn", "convnn, no kernel", "plain"}


@pytest.mark.filterwarnings("ignore")  # what peers warn of is theirs
@pytest.mark.usefixtures("nothing_compiles")
def test_the_layer_is_measured_against_all_its_peers() -> None:
    assert_measured(list(layer.attention(2, 130, 192, 3, [9])))


@pytest.mark.filterwarnings("ignore")  # compilers warn of what they like
def test_flex_attention_computes_what_it_stands_for() -> None:
    torch.compiler.reset()
    leaves = [torch.randn(2, 3, 197, 64, device="cuda").requires_grad_() for _ in range(3)]
    pairs: Any = ((peers.flex(), peers.sdpa(SDPBackend.MATH)), (peers.flex_kvt(9), partial(plain.kvt, k=9)))
    for ours, theirs in pairs:
        results = []
        for run in (ours, theirs):
            output = run(*leaves)
            results.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
        for one, other in zip(*results, strict=True):
            assert (one - other).norm() <= 1e-2 * other.norm()


@pytest.mark.parametrize("case", op.CASES, ids=str)
def test_every_case_passes_its_check(case: Case) -> None:
    inputs, among = op.problem(case, "cuda", torch.bfloat16)
    check(case, inputs, case.k, among)


def test_the_correctness_test_runs_the_kernels() -> None:
    rows = correctness.differences(device="cuda")
    assert rows[0].pair == "triton and plain"
    assert all(number < 2e-4 for row in rows for number in row.largest)

"""What a call is said to cost: counted by hand, measured on the CPU, and known from shapes alone."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import convnn
from convnn import arguments, cost
from convnn.backends import BACKENDS
from convnn.backends.chunked import with_budget
from convnn.cost import Cost, Sizes
from convnn.functional import convnn as operator
from convnn_lab.bench.memory import LiveTensors

CASES: dict[str, tuple[Any, ...]] = {
    "sum": ((2, 300, 8), (2, 320, 8), (2, 320, 6), None, {"k": 9}),
    "depthwise": ((6, 197, 64), (6, 197, 64), (6, 197, 64), (64, 1, 25), {"k": 25}),
    "standard": ((2, 400, 32), (2, 500, 32), (2, 500, 48), (24, 48, 9), {"k": 9}),
    "unweighed": ((2, 1024, 64), (2, 1156, 64), (2, 1156, 64), (32, 64, 9), {"k": 9, "weighting": "uniform"}),
    "long": ((2500, 16), (2500, 16), (2500, 16), None, {"k": 5}),
    "wide values": ((1500, 16), (400, 16), (400, 100), None, {"k": 7, "similarity": "euclidean"}),
    "behind a mask": ((2, 450, 16), (2, 420, 16), (2, 420, 12), (10, 12, 6), {"k": 6, "mask": "causal"}),
    "everybody": ((3, 500, 16), (3, 600, 16), (3, 600, 20), None, {"k": "all"}),
}


def inputs(case: str, **factory: Any) -> tuple[list[torch.Tensor], dict[str, Any]]:
    *shapes, options = CASES[case]
    return [torch.randn(*shape, **factory) for shape in shapes if shape is not None], options


def expected(case: str, backend: Any) -> Cost:
    tensors, options = inputs(case, device="meta")
    found = convnn.explain(*tensors, **options, backend=backend).cost
    assert found is not None
    return found


@pytest.mark.parametrize("backend", ["reference", "chunked", with_budget(30_000)])
@pytest.mark.parametrize("case", CASES)
def test_memory_is_within_a_factor_of_two_of_what_is_measured(case: str, backend: Any) -> None:
    leaves, options = inputs(case, requires_grad=True)
    torch.use_deterministic_algorithms(False)  # filling fresh memory with NaN is no part of the operator
    with LiveTensors() as forward, torch.no_grad():
        operator(*leaves, **options, backend=backend)
    with LiveTensors() as training:
        operator(*leaves, **options, backend=backend).sum().backward()
    said = expected(case, backend)
    assert said.forward_bytes is not None
    assert said.training_bytes is not None
    assert 0.5 < said.forward_bytes / forward.peak < 2
    assert 0.5 < said.training_bytes / training.peak < 2


def test_products_and_bytes_are_counted() -> None:
    said = expected("standard", "chunked")
    assert said.scores == 2 * 400 * 500
    assert said.search_products == 2 * 400 * 500 * 32
    assert said.combine_products == 2 * 400 * 9 * 48 * 24
    assert said.gathered_bytes == 2 * 400 * 9 * (48 + 32) * 4
    assert expected("unweighed", "chunked").gathered_bytes == 2 * 1024 * 9 * 64 * 4  # no key is scored again
    assert expected("depthwise", "chunked").combine_products == 6 * 197 * 25 * 64
    everybody = expected("everybody", "chunked")
    assert (everybody.combine_products, everybody.gathered_bytes) == (3 * 500 * 600 * 20, 0)


def numbers(said: Cost) -> list[float]:
    told = [getattr(said, name) for name in said.__dataclass_fields__]
    assert all(number is not None for number in told)
    return told


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("weighting", ["softmax", "uniform"])
@pytest.mark.parametrize("grows", ["n", "k", "c", "r"])
def test_more_never_costs_less(grows: str, weighting: str, backend: str) -> None:
    before: list[float] = []
    for step in range(1, 60, 3):
        size = {"n": 600, "k": 9, "c": 24, "r": 200}
        size[grows] = {"n": 200 + 170 * step, "k": step, "c": 8 * step, "r": 10 * step}[grows]
        x = torch.empty(2, size["n"], size["c"], device="meta")
        kernel = torch.empty(16, size["c"], size["k"], device="meta")
        among = torch.empty(size["r"], dtype=torch.int64, device="meta")
        options: Any = {"k": size["k"], "candidates": among, "weighting": weighting, "backend": backend}
        after = numbers(convnn.explain(x, x, x, kernel, **options).cost)  # type: ignore[arg-type]
        assert all(late >= early for early, late in zip(before, after, strict=bool(before)))
        assert after != before
        before = after


def measured(file: str, case: str, contender: str) -> list[float]:
    """Microseconds and MiB, forward and both ways."""
    with (Path(__file__).parent.parent / "docs" / "results" / file).open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if (row["case"], row["contender"]) == (case, contender)]
    return [float(rows[0][name]) for name in ("forward", "both", "memory_forward", "memory_both")]


def problem(heads: int, n: int, k: int, *, keys: int = 0, mixes: bool = False, weighs: bool = True) -> Sizes:
    """So many queries with 64 channels in bfloat16, with a depthwise kernel by dot, or one that mixes by cosine."""
    keys = keys or n
    sizes = (heads, heads, n, keys, keys, k, 64, 64, 64, 64 if mixes else 1, 2, 4, "cuda")
    return Sizes(*sizes, weighs=weighs, attends=False, directed=mixes)


H200: dict[tuple[str, str, str], Sizes] = {
    ("op-h200.csv", "384, 197, 64, K=9", "convnn"): problem(384, 197, 9),
    ("op-h200.csv", "384, 197, 64, K=25", "convnn"): problem(384, 197, 25),
    ("op-h200.csv", "48, 1024, 64, K=9", "convnn"): problem(48, 1024, 9),
    ("op-h200.csv", "12, 4096, 64, K=16", "convnn"): problem(12, 4096, 16),
    ("op-h200.csv", "12, 16384, 64, K=16", "convnn"): problem(12, 16_384, 16),
    ("op-h200.csv", "384, 197, 64, K=100", "convnn"): problem(384, 197, 100),
    ("long-h200.csv", "12, 65536, 64, K=16", "convnn"): problem(12, 65_536, 16),
    ("long-h200.csv", "1, 1000 of 1000000, 64, K=16", "convnn"): problem(1, 1000, 16, keys=1_000_000),
    ("conv-h200.csv", "128, 32x32, 64 to 64, K=9", "convnn, uniform"): problem(128, 1024, 9, mixes=True, weighs=False),
    ("conv-h200.csv", "128, 32x32, 64 to 64, K=9", "convnn, softmax"): problem(128, 1024, 9, mixes=True),
}


@pytest.mark.parametrize("case", H200, ids=": ".join)
def test_a_gpu_is_told_from_its_rates(case: tuple[str, str, str]) -> None:
    given = H200[case]
    said = cost.estimate(given, "triton", BACKENDS["triton"].held)
    forward, both, held_forward, held_both = measured(*case)
    start = cost.RATES["cuda", "triton"].start
    assert said.forward_seconds is not None
    assert said.training_seconds is not None
    assert 1 / 4 < (said.forward_seconds - start) / (forward * 1e-6) < 4
    assert 1 / 4 < (said.training_seconds - 2 * start) / (both * 1e-6) < 4
    assert said.forward_bytes == pytest.approx(held_forward * 2**20, rel=0.5)
    assert said.training_bytes == pytest.approx(held_both * 2**20, rel=0.5)
    # Elsewhere nobody measured; and a record of somebody else does not say what it holds.
    assert cost.estimate(replace(given, device="xpu"), "triton", None).forward_seconds is None
    assert "unknown time" in str(cost.estimate(replace(given, device="xpu"), "triton", None))


def test_what_kernels_do_not_know_is_priced_as_by_who_does_it() -> None:
    x = torch.empty(2, 3000, 16, device="meta")
    weigh = arguments.weigh("softmax", 0.0)
    rest: Any = {"mask": None, "candidates": None, "self_index": None, "self_score": "true", "order": "score"}
    for k, similarity, fused in ((9, "dot", True), (9, "manhattan", False), (1100, "dot", False)):
        search = arguments.search(x, x, k=k, similarity=similarity, **rest)
        given = replace(cost.sizes(search, x, None, weigh, attends=False), device="cuda")
        assert given.fused == fused
        ours, theirs = (cost.estimate(given, name, BACKENDS[name].held) for name in ("triton", "chunked"))
        assert (ours.forward_seconds == theirs.forward_seconds) != fused
        assert (ours.forward_bytes == theirs.forward_bytes) != fused


def test_the_class_of_a_time_is_told_in_words() -> None:
    small, large = torch.empty(20, 4, device="meta"), torch.empty(64, 16384, 64, device="meta")
    said = str(convnn.explain(small, small, small, k=3))
    assert "\nforward microseconds, with backward" in said
    assert "forward seconds, with backward seconds" in str(convnn.explain(large, large, large, k=9))
    x = torch.randn(2, 500, 32)
    assert "forward milliseconds, with backward milliseconds" in str(convnn.explain(x, x, x, k=9))


def test_selves_masks_and_half_types_are_known_by_shape() -> None:
    x = torch.empty(3, 40, 8, device="meta", dtype=torch.bfloat16)
    mask = torch.empty(40, 40, device="meta", dtype=torch.bool)
    own = torch.empty(40, device="meta", dtype=torch.int64)
    said = convnn.explain(x, x, x, k=5, mask=mask, self_index=own).cost
    assert said is not None
    assert said.gathered_bytes == 3 * 40 * 5 * 16 * 4  # computed with in float32

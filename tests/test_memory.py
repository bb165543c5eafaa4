"""The chunked backend keeps to its budget, and so keeps memory linear."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from convnn.backends.chunked import with_budget
from convnn.candidates import random
from convnn.functional import aggregate, convnn, nearest
from convnn.neighbors import Neighbors
from convnn.relative import RelativeBias
from convnn_lab.bench.memory import LiveTensors

# 2 x 300 x 320 scores; every input, output and gradient is far smaller than the budget.
N, M, E, C, OUT, BUDGET = 300, 320, 8, 6, 12, 8000

CASES: dict[str, dict[str, Any]] = {
    "sum": {"k": 9},
    "standard kernel": {"k": 9, "kernel": (OUT, C)},
    "grouped kernel": {"k": 9, "kernel": (OUT, C // 2), "weighting": "uniform"},
    "depthwise kernel": {"k": 9, "kernel": (C, 1), "similarity": "cosine"},
    "causal": {"k": 9, "kernel": (OUT, C), "mask": "causal", "similarity": "euclidean"},
    "every key": {"k": "all"},
    "every key, causal": {"k": "all", "mask": "causal", "similarity": "sqeuclidean"},
    "many neighbours": {"k": 100, "kernel": (C, 1), "order": "key"},
    "dropout": {"k": "all", "dropout_p": 0.5},
}


def measure(options: dict[str, Any], backend: Any) -> LiveTensors:
    options = dict(options)
    sizes = options.pop("kernel", None)
    shapes = [(2, N, E), (2, M, E), (2, M, C)] + ([] if sizes is None else [(*sizes, options["k"])])
    leaves = [torch.randn(*shape, requires_grad=True) for shape in shapes]
    torch.use_deterministic_algorithms(False)  # filling fresh memory with NaN is no part of the operator
    with LiveTensors() as live:
        convnn(*leaves, **options, backend=backend).square().sum().backward()
    assert all(leaf.grad is not None or options.get("weighting") == "uniform" for leaf in leaves)
    return live


@pytest.mark.parametrize("case", CASES)
def test_chunked_never_makes_a_tensor_above_its_budget(case: str) -> None:
    assert measure(CASES[case], with_budget(BUDGET)).largest <= BUDGET


@pytest.mark.parametrize("case", CASES)
def test_the_measure_sees_the_reference_go_far_above(case: str) -> None:
    assert measure(CASES[case], "reference").largest >= 2 * N * M


def test_masks_of_the_user_are_looked_at_in_blocks() -> None:
    leaves = [torch.randn(*shape, requires_grad=True) for shape in ((2, N, E), (2, M, E), (2, M, C))]
    torch.use_deterministic_algorithms(False)
    for k in (9, "all"):
        mask = torch.randn(N, M).masked_fill(torch.rand(N, M) < 0.3, -torch.inf).requires_grad_()
        with LiveTensors() as live:
            convnn(*leaves, k=k, mask=mask, backend=with_budget(BUDGET)).sum().backward()
        assert live.largest <= max(BUDGET, N * M)  # the mask's own gradient
        assert mask.grad is not None
        with LiveTensors() as live, torch.no_grad():
            convnn(*leaves, k=k, mask=mask, backend=with_budget(BUDGET))
        assert live.largest <= BUDGET


BROADCAST: dict[str, Any] = {
    "many queries of one row, one set of keys": ((500, 1, 16), (70, 16), (70, 12)),
    "many small batches, keys by head": ((40, 3, 2, 16), (3, 70, 16), (3, 70, 12)),
    "one search, many values": ((80, 16), (70, 16), (9, 70, 12)),
    "one value, many searches": ((30, 20, 16), (30, 70, 16), (70, 12)),
}


@pytest.mark.parametrize("k", [4, "all"])
@pytest.mark.parametrize("similarity", ["scaled_dot", "cosine", "euclidean"])
@pytest.mark.parametrize("case", BROADCAST)
def test_broadcasting_stays_within_the_budget(case: str, similarity: str, k: Any) -> None:
    leaves = [torch.randn(*shape, requires_grad=True) for shape in BROADCAST[case]]
    torch.use_deterministic_algorithms(False)
    with LiveTensors() as live:
        output = convnn(*leaves, k=k, similarity=similarity, backend=with_budget(BUDGET))
        output.sum().backward()
    allowed = max(BUDGET, output.numel(), *(leaf.numel() for leaf in leaves))
    assert live.largest <= allowed
    whole = convnn(*leaves, k=k, similarity=similarity, backend="reference")
    torch.testing.assert_close(output, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("k", [4, "all"])
def test_candidates_and_selves_stay_within_the_budget(k: Any) -> None:
    leaves = [torch.randn(*shape, requires_grad=True) for shape in ((2, N, E), (2, M, E), (2, M, C))]
    torch.use_deterministic_algorithms(False)
    options: Any = {"k": k, "candidates": random(100, per="sample").eval(), "self_index": torch.arange(N) % M}
    both = [options] if k == 4 else []  # beside candidates, all and oneself are slots: a loop over 101
    for narrowed in (*both, {**options, "self_index": None}, {**options, "candidates": None}):
        with LiveTensors() as live:
            output = convnn(*leaves, **narrowed, backend=with_budget(BUDGET))
            output.sum().backward()
        assert live.largest <= BUDGET
        whole = convnn(*leaves, **narrowed, backend="reference")
        torch.testing.assert_close(output, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("k", [9, "all"])
def test_a_relative_bias_is_looked_up_in_blocks(k: Any) -> None:
    bias = RelativeBias((15, 20), heads=2)
    leaves = [torch.randn(2, 2, 300, channels, requires_grad=True) for channels in (E, E, C)]
    torch.use_deterministic_algorithms(False)
    with LiveTensors() as live:
        convnn(*leaves, k=k, mask=bias, backend=with_budget(BUDGET)).sum().backward()
    assert live.largest <= max(BUDGET, *(leaf.numel() for leaf in leaves))
    assert bias.table.grad is not None


def test_the_halves_keep_to_the_budget_too() -> None:
    query, key = torch.randn(2, N, E, requires_grad=True), torch.randn(2, M, E, requires_grad=True)
    torch.use_deterministic_algorithms(False)
    with LiveTensors() as live:
        found = nearest(query, key, k=9, backend=with_budget(BUDGET))
        found.scores.sum().backward()
    assert live.largest <= BUDGET
    value, kernel = torch.randn(40, 64, requires_grad=True), torch.randn(2, 64, 9, requires_grad=True)
    picked = Neighbors(found.scores.detach()[0], found.index[0] % 40)  # 300 rows of 64 channels, out of 40
    with LiveTensors() as live:
        aggregate(value, picked, kernel, backend=with_budget(BUDGET)).sum().backward()
    assert live.largest <= BUDGET


@pytest.mark.parametrize("k", [9, "all"])
def test_nothing_of_a_block_is_kept_for_backward(k: Any) -> None:
    """Kept are outputs, indices and weights: neither scores, nor gathered keys, nor gathered values."""
    x = torch.randn(1500, 40, requires_grad=True)
    torch.use_deterministic_algorithms(False)
    with LiveTensors() as live:
        output = convnn(x, x, x, k=k, similarity="cosine", backend=with_budget(2**14))
        kept = live.now
    kept_slots = 0 if k == "all" else 1500 * 9 * (8 + 4 * 4)  # indices, and a few numbers per slot
    assert kept < output.nbytes + 3 * x.nbytes + kept_slots + 2**16


@pytest.mark.parametrize("k", [5, "all"])
def test_memory_grows_with_the_tokens_and_not_with_their_square(k: Any) -> None:
    peaks = []
    torch.use_deterministic_algorithms(False)
    for n in (500, 1000, 2000):
        x = torch.randn(n, 16, requires_grad=True)
        with LiveTensors() as live:
            convnn(x, x, x, k=k, backend=with_budget(2**13)).sum().backward()
        peaks.append(live.peak)
    assert peaks[2] < 4.5 * peaks[0]


def test_at_4096_tokens_chunked_holds_less_than_a_fifth_of_the_reference() -> None:
    leaves: Any = [torch.randn(4096, 64, requires_grad=True) for _ in range(3)]
    torch.use_deterministic_algorithms(False)
    peaks = {}
    for backend in ("reference", "chunked"):
        with LiveTensors() as live:
            convnn(*leaves, k=9, backend=backend).sum().backward()
        peaks[backend] = live.peak
    assert peaks["chunked"] < 0.2 * peaks["reference"]


def test_without_gradients_nothing_is_kept() -> None:
    x = torch.randn(2000, 16)
    with LiveTensors() as live, torch.no_grad():
        convnn(x, x, x, k=5, backend=with_budget(2**14))
    assert live.peak < 30 * 2**14 + x.nbytes  # the values, with a row for nobody

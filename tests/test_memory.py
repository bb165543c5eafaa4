"""The chunked backend keeps to its budget, and so keeps memory linear."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from convnn.backends.chunked import with_budget
from convnn.functional import convnn
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
    mask = torch.randn(N, M, requires_grad=True)
    leaves = [torch.randn(*shape, requires_grad=True) for shape in ((2, N, E), (2, M, E), (2, M, C))]
    torch.use_deterministic_algorithms(False)
    for k in (9, "all"):
        with LiveTensors() as live:
            output = convnn(*leaves, k=k, mask=mask, backend=with_budget(BUDGET))
        assert live.largest <= BUDGET
        assert torch.autograd.grad(output.sum(), mask)[0].any()


def test_memory_grows_with_the_tokens_and_not_with_their_square() -> None:
    peaks = []
    for n in (1000, 2000, 4000):
        x = torch.randn(n, 16, requires_grad=True)
        with LiveTensors() as live:
            convnn(x, x, x, k=5, backend=with_budget(2**14)).sum().backward()
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
    assert live.peak < 30 * 2**14

"""Kernels that mix channels on a CUDA device: the sizes of feature maps, determinism, memory, graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from convnn import HybridConv2d
from convnn_lab.bench.measure import peak
from tests.triton.test_mix import BRAIN, HALF, SINGLE, Problem, step

pytestmark = pytest.mark.gpu

# Relative to the norm; TF32 has the digits of half types but their errors add up at random.
ERROR = {SINGLE: 5e-6, BRAIN: 8e-3, HALF: 1e-3}
SIZES = [
    Problem("a large map", (4,), (1024, 1156), (64, 48), k=9),
    Problem("a first layer", (6,), (1024, 1156), (3, 32), k=9, weighted=False),
    Problem("a last layer", (64,), (4, 16), (512, 256), k=9, weighted=False),
    Problem("a middle layer", (48,), (16, 36), (256, 512), k=9),
    Problem("a wide layer", (64,), (64, 100), (256, 192), k=9),
    Problem("a wide map", (16,), (1024, 1156), (192, 130), k=9),
    Problem("groups", (3, 2), (300, 324), (96, 192), groups=3, k=5),
    Problem("many channels", (2,), (70, 64), (2048, 130), k=3),
    Problem("many slots", (2,), (200, 180), (40, 72), k=64, slots=torch.int16),
]


@pytest.mark.parametrize("dtype", [SINGLE, BRAIN, HALF])
@pytest.mark.parametrize("problem", SIZES, ids=lambda problem: problem.name)
def test_values_and_gradients_agree_with_the_reference(problem: Problem, dtype: torch.dtype) -> None:
    leaves, index = replace(problem, dtype=dtype).tensors()
    ours = step(leaves, index)
    theirs = step([leaf.double() for leaf in leaves], index, exact=True)
    for mine, exact in zip(ours, theirs, strict=True):
        assert ((mine - exact).norm() / exact.norm()).item() < ERROR[dtype]


@pytest.mark.parametrize("problem", SIZES, ids=lambda problem: problem.name)
def test_tf32_rounds_and_no_more(problem: Problem) -> None:
    leaves, index = problem.tensors()
    theirs = step([leaf.double() for leaf in leaves], index, exact=True)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        ours = step(leaves, index)
    finally:
        torch.backends.cuda.matmul.fp32_precision = "ieee"
    for mine, exact in zip(ours, theirs, strict=True):
        assert ((mine - exact).norm() / exact.norm()).item() < 1e-3


@pytest.mark.parametrize("dtype", [SINGLE, BRAIN])
@pytest.mark.parametrize("problem", SIZES, ids=lambda problem: problem.name)
def test_two_runs_are_equal_bit_by_bit(problem: Problem, dtype: torch.dtype) -> None:
    leaves, index = replace(problem, dtype=dtype).tensors()
    index[..., 1] = 2  # everybody's neighbour
    first, second = step(leaves, index), step(leaves, index)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_memory_does_not_grow_with_the_batch() -> None:
    """Beyond inputs and outputs, what is laid out slot by slot stays within its budget."""
    from convnn.backends.triton import mix_steps  # noqa: PLC0415

    leaves, index = Problem("", (96,), (1024, 1024), (128, 128), k=9, weighted=False, dtype=BRAIN).tensors()

    def run() -> None:
        step(leaves, index)

    size = leaves[0].numel() * leaves[0].element_size() + index.numel() * 40
    assert peak(run) * 2**20 < mix_steps.BUDGET * 1.5 + 6 * size


def test_a_hybrid_layer_trains_in_a_graph_as_it_does_without() -> None:
    layer = HybridConv2d(6, 8, 3, ratio=0.5).cuda()
    x = torch.randn(5, 6, 9, 12, device="cuda")
    learned = list(layer.parameters())

    def run() -> list[torch.Tensor]:
        return list(torch.autograd.grad(nn.functional.relu(layer(x)).square().sum(), learned))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    x.copy_(torch.randn_like(x))
    graph.replay()
    for mine, theirs in zip(captured, run(), strict=True):
        torch.testing.assert_close(mine, theirs)

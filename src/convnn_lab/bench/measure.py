"""What a function of tensors costs on a CUDA device: kernel time, eager time and peak memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

Function: TypeAlias = Callable[..., Tensor]


@dataclass(frozen=True)
class Cost:
    """Microseconds by graph replay and launched one by one, and mebibytes above the inputs; forward, and both ways."""

    forward: float
    both: float
    eager_forward: float
    eager_both: float
    memory_forward: float
    memory_both: float


def cost(function: Function, inputs: Sequence[Tensor]) -> Cost:
    """Measure forward without gradients, and forward + backward with the gradients of all inputs."""
    plain = [tensor.detach() for tensor in inputs]
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    with torch.no_grad():
        pull = torch.randn_like(function(*plain))

    def forward() -> None:
        with torch.no_grad():
            function(*plain)

    def both() -> None:
        torch.autograd.grad(function(*leaves), leaves, pull)

    return Cost(replayed(forward), replayed(both), eager(forward), eager(both), peak(forward), peak(both))


def replayed(run: Callable[[], None], rounds: int = 7) -> float:
    """Microseconds of one call among the replays of a CUDA graph, so that the host does not count."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    calls = max(1, min(20, int(1e4 / max(eager(run, 3), 1.0))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    graph.replay()
    return statistics.median(_timed(graph.replay) for _ in range(rounds)) / calls


def eager(run: Callable[[], None], rounds: int = 11) -> float:
    """Microseconds of one call as it is launched."""
    run()
    return statistics.median(_timed(run) for _ in range(rounds))


def _timed(run: Callable[[], None]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def peak(run: Callable[[], None]) -> float:
    """Mebibytes at the highest point, above what was there before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20

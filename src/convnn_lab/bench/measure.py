"""What a function of tensors costs on a CUDA device: kernel time, eager time and peak memory."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

Function: TypeAlias = Callable[..., Tensor]
# Microseconds after which a median has rounds enough.
ENOUGH = 2e5


@dataclass(frozen=True)
class Cost:
    """Microseconds by graph replay and launched one by one, and mebibytes above the inputs.

    Forward is without gradients; both is a step, forward and backward. Backward is, by graph replay, a step less a
    forward that keeps what backward needs; its memory counts what forward kept too.
    """

    forward: float
    backward: float
    both: float
    eager_forward: float
    eager_backward: float
    eager_both: float
    memory_forward: float
    memory_backward: float
    memory_both: float


@dataclass(frozen=True)
class Training:
    """Microseconds by graph replay and launched one by one, and mebibytes above a model, its state and its images.

    Forward is the loss without gradients; a step is the loss and its gradients; an update is that and the optimizer's.
    """

    forward: float
    step: float
    update: float
    eager_forward: float
    eager_step: float
    eager_update: float
    memory_forward: float
    memory_step: float
    memory_update: float


def require_device() -> None:
    """Refuse to measure where there is nothing to measure on."""
    if not torch.cuda.is_available():
        raise ValueError("bench needs a CUDA device, and there is none here")


def cost(function: Function, inputs: Sequence[Tensor], parameters: Sequence[Tensor] = ()) -> Cost:
    """Measure forward without gradients, and a step with the gradients of all inputs and parameters."""
    require_device()
    plain = [tensor.detach() for tensor in inputs]
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    wanted = [*leaves, *parameters]
    with torch.no_grad():
        pull = torch.randn_like(function(*plain))

    def forward() -> None:
        with torch.no_grad():
            function(*plain)

    def kept() -> Tensor:
        return function(*leaves)

    def backward(output: Tensor) -> None:
        torch.autograd.grad(output, wanted, pull)

    def both() -> None:
        backward(kept())

    step = replayed(both)
    return Cost(
        *(replayed(forward), step - replayed(kept), step),
        *(eager(forward), statistics.median(_timed(backward, kept()) for _ in range(11)), eager(both)),
        *(peak(forward), _peak_of_backward(kept, backward), peak(both)),
    )


def training(loss: Function, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Training:
    """Measure a loss of inputs that want no gradients, with the gradients of all parameters and with their update."""
    require_device()
    optimizer = torch.optim.SGD(parameters, lr=1e-5, momentum=0.9)

    def forward() -> None:
        with torch.no_grad():
            loss(*inputs)

    def step() -> None:
        torch.autograd.grad(loss(*inputs), parameters)

    def update() -> None:
        loss(*inputs).backward()
        optimizer.step()
        optimizer.zero_grad()

    runs = (forward, step, update)
    return Training(*map(replayed, runs), *map(eager, runs), *map(peak, runs))


def release() -> None:
    """Give back what nobody holds any more, so that one contender does not depend on those before it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def replayed(run: Callable[[], object], rounds: int = 7) -> float:
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
    return _median(graph.replay, rounds) / calls


def eager(run: Callable[[], object], rounds: int = 11) -> float:
    """Microseconds of one call as it is launched."""
    run()
    return _median(run, rounds)


def _median(run: Callable[[], object], rounds: int) -> float:
    """The median of so many rounds, or of three where they take long."""
    first = _timed(run)
    often = max(3, min(rounds, int(ENOUGH / max(first, 1.0))))
    return statistics.median([first, *(_timed(run) for _ in range(often - 1))])


def _timed(run: Callable[..., object], *given: Tensor) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    run(*given)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def peak(run: Callable[[], object]) -> float:
    """Mebibytes at the highest point, above what was there before; what is garbage by then would count as there."""
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _peak_of_backward(kept: Callable[[], Tensor], backward: Callable[[Tensor], None]) -> float:
    """Mebibytes at the highest point of backward, above what was there before forward."""
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    output = kept()
    held = (torch.cuda.memory_allocated() - before) / 2**20
    return held + peak(lambda: backward(output))

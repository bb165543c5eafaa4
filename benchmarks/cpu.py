"""HybridConv2d beside a convolution on the CPU: times, and which operations take them.

    python benchmarks/cpu.py [--batch 8] [--size 32] [--channels 64] [--threads 2] [--rounds 9]

Outputs and gradients of the layer are compared with those by the reference backend first; nothing is printed if they
differ. The layers take turns, and the fastest round of each counts: on a machine with other work to do the others
measure that.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import convnn

Step = Callable[[nn.Module, Tensor], object]


def forward(layer: nn.Module, cells: Tensor) -> Tensor:
    with torch.no_grad():
        return layer(cells)


def both(layer: nn.Module, cells: Tensor) -> tuple[Tensor, ...]:
    cells = cells.detach().requires_grad_()
    output = layer(cells)
    return output.detach(), *torch.autograd.grad(output, [cells, *layer.parameters()], torch.ones_like(output))


def check(layer: convnn.HybridConv2d, cells: Tensor) -> None:
    """Require what the reference backend gives, in float64."""
    exact = convnn.HybridConv2d(layer.in_channels, layer.out_channels, 3, backend="reference", dtype=torch.float64)
    exact.load_state_dict(layer.state_dict())
    ours = both(layer.double(), cells.double())
    for mine, its in zip(ours, both(exact, cells.double()), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-9, atol=1e-9)
    layer.float()


def seconds(layers: dict[str, nn.Module], step: Step, cells: Tensor, rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in layers}
    for _ in range(rounds):
        for name, layer in layers.items():
            start = time.perf_counter()
            step(layer, cells)
            times[name].append(time.perf_counter() - start)
    return {name: min(taken) for name, taken in times.items()}


def where(layer: nn.Module, step: Step, cells: Tensor, count: int = 8) -> list[tuple[str, float]]:
    """The operations that take most of the time themselves, in milliseconds."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step(layer, cells)
    events = sorted(seen.key_averages(), key=lambda event: -event.self_cpu_time_total)
    return [(event.key, event.self_cpu_time_total / 1e3) for event in events[:count]]


def products(batch: int, size: int, channels: int) -> dict[str, int]:
    """Multiply-adds of the parts in a forward pass; keys are the cells of the padded map."""
    queries, keys, half = batch * size**2, (size + 2) ** 2, channels // 2
    return {
        "the convolution to beat": queries * 9 * channels * channels,
        "search": queries * keys * channels,
        "combination": queries * 9 * channels * half,
        "convolution of the other half": queries * 9 * channels * (channels - half),
        "pointwise": queries * channels * channels,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"batch": 8, "size": 32, "channels": 64, "threads": 2, "rounds": 9}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    cells = torch.randn(given.batch, given.channels, given.size, given.size)
    hybrid = convnn.HybridConv2d(given.channels, given.channels, 3)
    check(hybrid, cells[:2])
    layers = {"Conv2d": nn.Conv2d(given.channels, given.channels, 3, padding=1), "HybridConv2d": hybrid}
    steps: dict[str, Step] = {"forward": forward, "forward + backward": both}

    shape = tuple(cells.shape)
    print(
        f"{shape} float32, K = 9, ratio 0.5, {given.threads} threads, torch {torch.__version__}, {platform.machine()}"
    )
    for name, step in steps.items():
        taken = seconds(layers, step, cells, given.rounds)
        plain, ours = (1e3 * each for each in taken.values())
        print(f"\n{name}: Conv2d {plain:.1f} ms, HybridConv2d {ours:.1f} ms, {ours / plain:.1f} times")
        for operation, milliseconds in where(hybrid, step, cells):
            print(f"  {operation:34} {milliseconds:8.1f} ms")
    print("\nmultiply-adds of a forward pass, in millions")
    for name, count in products(given.batch, given.size, given.channels).items():
        print(f"  {name:34} {count / 1e6:8.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

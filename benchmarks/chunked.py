"""The chunked backend against the reference, forward and backward, in one run: time and peak of live tensors.

    python benchmarks/chunked.py [--size 4096] [--json FILE]

Both are compared in output and gradients first; nothing is printed if they differ.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

import convnn
from convnn_lab.bench.memory import LiveTensors


def step(leaves: list[Tensor], k: int, backend: str) -> tuple[Tensor, ...]:
    """One forward and backward; the output and all gradients."""
    output = convnn.functional.convnn(*leaves, k=k, backend=backend)
    return output.detach(), *torch.autograd.grad(output, leaves, torch.ones_like(output))


def seconds(leaves: list[Tensor], k: int, backends: tuple[str, ...], rounds: int) -> dict[str, float]:
    """The median over rounds in which the backends take turns, so that a slow moment of the machine meets both."""
    times: dict[str, list[float]] = {backend: [] for backend in backends}
    for _ in range(rounds):
        for backend in backends:
            start = time.perf_counter()
            step(leaves, k, backend)
            times[backend].append(time.perf_counter() - start)
    return {backend: statistics.median(measured) for backend, measured in times.items()}


def peak(leaves: list[Tensor], k: int, backend: str) -> int:
    with LiveTensors() as live:
        step(leaves, k, backend)
    return live.peak


def commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096, help="queries and keys")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    channels, k, backends = 64, 9, ("reference", "chunked")
    rows = []
    for name, kernel in {"sum": None, "depthwise": (channels, 1), "standard": (channels, channels)}.items():
        shapes = [(given.size, channels)] * 3 + ([] if kernel is None else [(*kernel, k)])
        leaves = [torch.randn(*shape, requires_grad=True) for shape in shapes]
        for ours, theirs in zip(step(leaves, k, "chunked"), step(leaves, k, "reference"), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        taken = seconds(leaves, k, backends, given.rounds)
        held = {backend: peak(leaves, k, backend) for backend in backends}
        rows.append({"kernel": name, "seconds": taken, "peak_bytes": held})

    print(f"N = M = {given.size}, E = C = {channels}, K = {k}, float32, forward + backward, 2 threads")
    print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}, commit {commit()}\n")
    print(f"{'kernel':10} {'reference':>22} {'chunked':>22} {'time':>6} {'peak':>6}")
    for row in rows:
        (slow, fast), (large, small) = row["seconds"].values(), row["peak_bytes"].values()  # type: ignore[attr-defined]
        cells = [f"{t * 1e3:8.0f} ms {b / 2**20:7.1f} MiB" for t, b in ((slow, large), (fast, small))]
        print(f"{row['kernel']:10} {cells[0]:>22} {cells[1]:>22} {fast / slow:6.2f} {small / large:6.1%}")
    if given.json is not None:
        whole = {"size": given.size, "torch": torch.__version__, "commit": commit(), "rows": rows}
        given.json.write_text(json.dumps(whole, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compile the kernels of a problem for a GPU that is not there: ``python -m tests.triton.ahead ARCHITECTURE PROBLEM``.

Prints a line for each kernel: its name, the threads and bytes of shared memory of a program, the bytes of registers a
thread has no room for, and whether channels are taken one piece after the other. Nothing runs: a driver that only knows
its name stands in for the real one, and tensors of the CPU for those of a device.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime.jit import JITFunction

from convnn import ConvNNAttention, HybridConv2d
from convnn.backends import BACKENDS
from convnn.backends.triton import sizes
from convnn.candidates import random
from convnn.descriptor import scaled_concat
from convnn.functional import convnn

BACKEND = replace(BACKENDS["triton"], declines=lambda *_: None)
BRAIN, SINGLE = torch.bfloat16, torch.float32
# Bytes of shared memory a program may have on an A100, a GeForce RTX 4090 and an H100.
SHARED = {80: 166_912, 89: 101_376, 90: 232_448}


class Driver:
    """One device of an architecture, without a stream."""

    def __init__(self, architecture: int) -> None:
        self.target = GPUTarget("cuda", architecture, 32)

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:  # noqa: ARG002
        """None that anything could run on."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """What to compile for."""
        return self.target


def tokens(n: int, m: int, d: int, k: int, dtype: torch.dtype = BRAIN, **options: Any) -> Callable[[], None]:
    """The operator with a depthwise kernel, forward and backward, for 384 heads."""

    def run() -> None:
        shapes = ((384, n, d), (384, m, d), (384, m, d), (d, 1, k))
        leaves = [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in shapes]
        convnn(*leaves, k=k, backend=BACKEND, **options).sum().backward()

    return run


def maps(side: int, channels: int, dtype: torch.dtype, **options: Any) -> Callable[[], None]:
    """A hybrid layer, forward and backward."""

    def run() -> None:
        layer = HybridConv2d(channels, channels, 3, padding=1, backend=BACKEND, **options).to(dtype)
        layer(torch.zeros(64, channels, side, side, dtype=dtype, requires_grad=True)).sum().backward()

    return run


def mixing(channels: int, outputs: int, dtype: torch.dtype) -> Callable[[], None]:
    """The operator with a kernel that mixes the channels of neighbours it weighs, forward and backward."""

    def run() -> None:
        shapes = ((32, 197, 64), (32, 197, 64), (32, 197, channels), (outputs, channels, 9))
        leaves = [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in shapes]
        convnn(*leaves, k=9, backend=BACKEND).sum().backward()

    return run


def on_matrix_units(problem: Callable[[], None]) -> Callable[[], None]:
    """A problem of single precision where torch is told that matrix units may round."""

    def run() -> None:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        problem()

    return run


def attention(heads: int, r: int, dtype: torch.dtype, **options: Any) -> Callable[[], None]:
    """A layer of 192 channels with candidates, oneself among them, forward and backward."""

    def run() -> None:
        layer = ConvNNAttention(192, heads, k=9, candidates=random(r), backend=BACKEND, **options).to(dtype)
        layer(torch.zeros(64, 197, 192, dtype=dtype)).sum().backward()

    return run


PROBLEMS: dict[str, Callable[[], None]] = {
    "197": tokens(197, 197, 64, 9),
    "256": tokens(256, 256, 64, 16),
    "many slots": tokens(197, 197, 64, 36),
    "stream": tokens(1024, 1024, 64, 9),
    "long lists": tokens(300, 1024, 64, 100),
    "single": tokens(300, 700, 64, 9, SINGLE),
    "wide": tokens(40, 600, 512, 9),
    "few": tokens(197, 32, 64, 9),
    "few, single": tokens(197, 64, 64, 9, SINGLE),
    "few, wide": tokens(197, 64, 128, 9, SINGLE),
    "behind a mask": tokens(197, 64, 128, 9, mask=torch.zeros(197, 64)),
    "maps": maps(32, 64, BRAIN),
    "small maps": maps(4, 512, SINGLE),
    "places beside features": on_matrix_units(maps(4, 512, SINGLE, position=scaled_concat(0.5))),
    "wide, long lists": tokens(40, 700, 192, 25),
    "wide, among few": tokens(40, 36, 1024, 9, SINGLE),
    "not as wide, long lists": tokens(40, 700, 128, 25),
    "widest": tokens(40, 700, 2048, 9),
    "widest, single": tokens(40, 700, 1024, 9, SINGLE),
    "widest, long lists": tokens(40, 197, 1024, 25),
    "mixing": mixing(192, 330, BRAIN),
    "mixing, single": on_matrix_units(mixing(130, 330, SINGLE)),
    "candidates": maps(32, 64, BRAIN, candidates=random(32)),
    "attention": attention(3, 100, SINGLE, attn_drop=0.1),
    "one head": attention(1, 32, BRAIN),
}


def compiled(architecture: int, problem: Callable[[], None]) -> list[dict[str, Any]]:
    """What the kernels of a problem ask of a device."""
    found: dict[int, tuple[str, Any, bool]] = {}
    run = JITFunction.run

    def only_compile(kernel: Any, *given: Any, **told: Any) -> Any:
        made = run(kernel, *given, **{**told, "warmup": True})
        found[id(made)] = (kernel.__name__, made, told.get("ROLLED", False))
        return made

    triton.runtime.driver.set_active(Driver(architecture))
    sizes.room = lambda _: SHARED[architecture]  # type: ignore[assignment]
    sizes.capability = lambda _: divmod(architecture, 10)  # type: ignore[assignment]
    JITFunction.run = only_compile
    torch.cuda.device = lambda *_: contextlib.nullcontext()  # type: ignore[assignment, misc]
    torch.Tensor.new_empty = torch.Tensor.new_zeros  # type: ignore[method-assign] # what kernels would have written
    torch.empty_like = torch.zeros_like
    torch.empty = torch.zeros  # type: ignore[assignment]
    problem()
    return [
        {
            "kernel": name,
            "threads": 32 * made.metadata.num_warps,
            "shared": made.metadata.shared,
            "spilled": spilled(made.asm["ptx"], architecture),
            "rolled": rolled,
        }
        for name, made, rolled in found.values()
    ]


def spilled(code: str, architecture: int) -> int:
    """Bytes that Triton's assembler has a thread write to memory, for want of registers."""
    target = re.search(r"\.target (\w+)", code)
    assert target is not None
    with TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(code)
        call = [get_ptxas(architecture).path, "-v", f"-arch={target[1]}", source, "-o", source.with_suffix(".cubin")]
        said = subprocess.run(call, capture_output=True, text=True, check=True).stderr
    return sum(map(int, re.findall(r"(\d+) bytes spill stores", said)))


if __name__ == "__main__":
    for line in compiled(int(sys.argv[1]), PROBLEMS[sys.argv[2]]):
        sys.stdout.write(json.dumps(line) + "\n")

"""The operator against torch's attention, masked KVT and the plain baseline, on one device in one run."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from convnn import ConvNNAttention
from convnn.functional import convnn
from convnn_lab.bench import plain
from convnn_lab.bench.measure import Cost, Function, cost

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "math": SDPBackend.MATH}
# Above so many scores the contenders that hold them all are left out.
SCORES = 2**29


@dataclass(frozen=True)
class Case:
    """Batch and heads together, tokens, channels of a head, neighbours, and candidates if not all."""

    entries: int
    tokens: int
    channels: int
    k: int
    candidates: int | None = None

    def __str__(self) -> str:
        among = "" if self.candidates is None else f", r={self.candidates}"
        return f"{self.entries}, {self.tokens}, {self.channels}, K={self.k}{among}"


CASES = [
    *(Case(384, 197, 64, k) for k in (9, 25)),
    Case(48, 1024, 64, 9),
    Case(32, 3136, 64, 9),
    Case(12, 4096, 64, 16),
    Case(12, 16384, 64, 16),
    Case(384, 197, 64, 9, 32),
    *(Case(384, 197, 64, k) for k in (8, 36, 100)),
]


@dataclass(frozen=True)
class Row:
    """One contender on one case."""

    case: str
    contender: str
    cost: Cost


def op(cases: list[Case] | None = None) -> Iterator[Row]:
    """The operator alone; correctness is checked before anything is timed."""
    for case in CASES if cases is None else cases:
        inputs = _inputs(case)
        check(case, inputs)
        for name, (function, count) in _contenders(case).items():
            yield Row(str(case), name, cost(function, inputs[:count]))


def attention(batch: int = 32, tokens: int = 197, dim: int = 768, heads: int = 12) -> Iterator[Row]:
    """The whole layer under bfloat16 autocast, against the same layer on torch's attention."""
    x = torch.randn(batch, tokens, dim, device="cuda")
    for k in (9, 8):
        layers = {
            "sdpa": ConvNNAttention(dim, heads, k="all", kernel=None, device="cuda"),
            "convnn": ConvNNAttention(dim, heads, k=k, device="cuda"),
            "kvt": ConvNNAttention(dim, heads, k=k, kernel=None, device="cuda"),
        }
        for name, layer in layers.items():
            yield Row(f"{batch}, {tokens}, {dim}, {heads} heads, K={k}", name, cost(partial(_layer, layer), [x]))


def _layer(layer: torch.nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return layer(x)


def _inputs(case: Case) -> list[Tensor]:
    heads = 12 if case.entries % 12 == 0 else 1
    shape = (case.entries // heads, heads, case.tokens, case.channels)
    tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    return [*tensors, torch.randn(case.channels, 1, case.k, device="cuda", dtype=torch.bfloat16)]


def _contenders(case: Case) -> dict[str, tuple[Function, int]]:
    among = None if case.candidates is None else torch.randperm(case.tokens, device="cuda")[: case.candidates]
    ours: Callable[..., Tensor] = partial(convnn, k=case.k, candidates=among)
    found: dict[str, tuple[Function, int]] = {"sdpa": (F.scaled_dot_product_attention, 3), "convnn": (ours, 4)}
    if case.candidates is not None:
        return found
    found["convnn, no kernel"] = (ours, 3)
    few = case.entries * case.tokens**2 <= SCORES
    for name, backend in BACKENDS.items():
        if few or name != "math":
            found[f"sdpa, {name}"] = (partial(_forced, backend), 3)
    if few:
        found["plain"] = (partial(plain.convnn, k=case.k), 4)
        found["kvt, masked"] = (partial(plain.kvt, k=case.k), 3)
    return found


def _forced(backend: SDPBackend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(query, key, value)


def check(case: Case, inputs: list[Tensor]) -> None:
    """Compare some rows with the reference in float64; raise where they differ."""
    query, key, value, kernel = (tensor[:1, :2] if tensor.ndim == 4 else tensor for tensor in inputs)
    rows = slice(0, 64)
    ours = convnn(query, key, value, kernel, k=case.k)[..., rows, :]
    exact = [tensor.double() for tensor in (query[..., rows, :], key, value, kernel)]
    theirs = convnn(*exact, k=case.k, backend="reference")
    # A pair of neighbours closer than the search can tell apart may change places, and taps with them.
    off = ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-6) > 2e-2).double().mean().item()
    if off > 0.02:
        raise ValueError(f"{case} differs from the reference in {off:.0%} of its rows; nothing is timed")


def show(rows: Iterable[Row], into: Path | None) -> None:
    """Print a table as it is measured, with the ratios to torch's default attention, and write it as CSV."""
    names = [field.name for field in fields(Cost)]
    about = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, commit {_commit()}"
    out = sys.stdout.write
    out(f"{about}\nmicroseconds (graph, eager) and MiB above the inputs; ratios to sdpa of the same case\n\n")
    out(f"{'case':28}{'contender':20}" + "".join(f"{name:>16}" for name in names) + f"{'ratio':>14}\n")
    base: dict[str, Cost] = {}
    with nullcontext() if into is None else into.open("w", newline="") as file:
        writer = None if file is None else csv.writer(file)
        if writer is not None:
            writer.writerow(["case", "contender", *names, "about"])
        for row in rows:
            first = base.setdefault(row.case, row.cost)  # torch's own comes first
            cells = "".join(f"{getattr(row.cost, name):16.1f}" for name in names)
            ratio = f"{row.cost.forward / first.forward:.2f} / {row.cost.both / first.both:.2f}"
            out(f"{row.case:28}{row.contender:20}{cells}{ratio:>14}\n")
            sys.stdout.flush()
            if writer is not None and file is not None:
                writer.writerow([row.case, row.contender, *asdict(row.cost).values(), about])
                file.flush()


def _commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"

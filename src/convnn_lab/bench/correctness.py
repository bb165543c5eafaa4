"""The thesis's correctness test: one layer in float32, run in several ways, and how far apart they are at most."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from convnn import ConvNNAttention, explain
from convnn_lab.bench import plain
from convnn_lab.bench.layer import Around
from convnn_lab.bench.report import headline, surroundings
from convnn_lab.tables.fast import FAST_CORRECTNESS

QUANTITIES = ("forward", "input", "kernel", "query projection")


@dataclass(frozen=True)
class Difference:
    """The largest absolute differences between two ways: of the output, and of three gradients."""

    pair: str
    largest: tuple[float, ...]


def differences(
    batch: int = 4, tokens: int = 197, dim: int = 768, heads: int = 12, k: int = 8, device: str = "cpu"
) -> list[Difference]:
    """Compare the default backend, the plain implementation, the reference, and the reference in float64."""
    random = torch.Generator().manual_seed(0)
    x, pull = (torch.randn(batch, tokens, dim, generator=random).to(device) for _ in range(2))
    layer = ConvNNAttention(dim, heads, k=k)
    with torch.no_grad():
        for parameter in layer.parameters():
            bound = parameter.shape[-1] ** -0.5  # as torch's own layers and convolutions start
            parameter.copy_((2 * torch.rand(parameter.shape, generator=random) - 1) * bound)
    layer = layer.to(device)
    reference = deepcopy(layer)
    reference.backend = "reference"
    part = x[..., : dim // heads]
    name = explain(part, part, part, k=k).name
    ways = {
        name: _results(layer, x, pull),
        "plain": _results(Around(layer, partial(plain.convnn, k=k)), x, pull),
        "reference": _results(reference, x, pull),
        "float64": _results(deepcopy(reference).double(), x.double(), pull.double()),
    }
    pairs = [(name, "plain"), (name, "reference"), (name, "float64"), ("plain", "float64"), ("reference", "float64")]
    return [Difference(f"{one} and {other}", _largest(ways[one], ways[other])) for one, other in pairs]


def _results(module: nn.Module, x: Tensor, pull: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input, the kernel and the projection of queries."""
    layer: Any = module.layer if isinstance(module, Around) else module
    x = x.detach().requires_grad_()
    output = module(x)
    of_x, of_kernel, of_qkv = torch.autograd.grad(output, [x, layer.kernel.weight, layer.qkv.weight], pull)
    return [output.detach(), of_x, of_kernel, of_qkv[: x.shape[-1]]]


def _largest(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> tuple[float, ...]:
    return tuple((a.double() - b.double()).abs().max().item() for a, b in zip(ours, theirs, strict=True))


def show(rows: Sequence[Difference], into: Path | None) -> None:
    """Print the differences under what the thesis prints, and write them as CSV."""
    about, out = surroundings(), sys.stdout.write
    printed = [value for name, value in FAST_CORRECTNESS.rows[0].configuration.items() if name.startswith("printed_")]
    out(f"{headline(about)}\nlargest absolute differences; gradients are pulled with standard normal numbers\n\n")
    out(f"{'':26}" + "".join(f"{name:>18}" for name in QUANTITIES) + "\n")
    out(f"{'thesis':26}" + "".join(f"{value:>18}" for value in printed) + "\n")
    for row in rows:
        out(f"{row.pair:26}" + "".join(f"{number:18.1e}" for number in row.largest) + "\n")
    if into is not None:
        with into.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["pair", *QUANTITIES, *about])
            writer.writerows([row.pair, *row.largest, *about.values()] for row in rows)

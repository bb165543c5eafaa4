"""Kernels that mix channels: the operator and the layers on maps against torch's convolution and plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from convnn import ConvNN2d, HybridConv2d
from convnn_lab.bench import maps, plain
from convnn_lab.bench.check import check
from convnn_lab.bench.measure import Function, require_device
from convnn_lab.bench.report import Contender, Row, timed

OPERATORS: dict[str, Function] = {"convnn": maps.ours, "plain": plain.mixed, "einsum": plain.contracted}
WEIGHTINGS = ("uniform", "softmax")


@dataclass(frozen=True)
class Case:
    """Maps, the side of one, channels in and out, and neighbours."""

    batch: int
    side: int
    inputs: int
    outputs: int
    k: int = 9

    def __str__(self) -> str:
        return f"{self.batch}, {self.side}x{self.side}, {self.inputs} to {self.outputs}, K={self.k}"


CASES = [Case(128, 32, 64, 64), Case(128, 32, 64, 128), Case(128, 8, 256, 256)]


def conv(cases: Sequence[Case] = CASES) -> Iterator[Row]:
    """The operator over the cells of a map, and layers; each checked before anything of its case is timed."""
    require_device()
    for case in cases:
        x = torch.randn(case.batch, case.inputs, case.side, case.side, device="cuda", dtype=torch.bfloat16)
        checked(case, x)
        for contender in contenders(case, x):
            yield timed(str(case), contender)


def checked(case: Case, x: Tensor) -> None:
    """Raise where the operator or a layer of ours is not right."""
    cells, kernel = problem(case, x)
    for weighting in WEIGHTINGS:
        given = [cells[None], cells[None], cells[None], kernel]
        check(f"{case}, {weighting}", given, case.k, similarity="cosine", weighting=weighting)
    for name, layer in layers(case, x).items():
        if isinstance(layer, (ConvNN2d, HybridConv2d)):
            maps.check_map(f"{case}, {name}", layer, x)


def problem(case: Case, x: Tensor) -> tuple[Tensor, Tensor]:
    """The cells of the maps ``(B, N, C)``, and a kernel ``(O, C, K)``."""
    kernel = torch.randn(case.outputs, case.inputs, case.k, device=x.device, dtype=x.dtype)
    return x.flatten(2).mT.contiguous(), kernel * (case.inputs * case.k) ** -0.5


def contenders(case: Case, x: Tensor) -> Iterator[Contender]:
    """Whatever is compared on a case, torch's convolution first: 3x3, as many products as nine neighbours are."""
    made = layers(case, x)
    yield _layer("conv2d", made.pop("conv2d"), x)
    given = problem(case, x)
    for name, operator in OPERATORS.items():
        for weighting in WEIGHTINGS:
            function = partial(_among_themselves, operator, case.k, weighting)
            yield Contender(f"{name}, {weighting}", function, given, peer=name != "convnn")
    for name, layer in made.items():
        yield _layer(name, layer, x)


def _among_themselves(operator: Function, k: int, weighting: str, cells: Tensor, kernel: Tensor) -> Tensor:
    return operator(cells, cells, kernel, k, weighting)


def _layer(name: str, layer: nn.Module, x: Tensor) -> Contender:
    peer = not isinstance(layer, (ConvNN2d, HybridConv2d))
    return Contender(name, layer, [x], list(layer.parameters()), peer=peer)


def layers(case: Case, x: Tensor) -> dict[str, nn.Module]:
    """Layers of one size; in space they are convolutions, and with a ratio of 0 a convolution and a 1x1."""
    factory: dict[str, Any] = {"device": x.device, "dtype": x.dtype}
    sizes = (case.inputs, case.outputs, 3)
    hybrid = HybridConv2d(*sizes, k=case.k, **factory)
    return {
        "conv2d": nn.Conv2d(*sizes, padding=1, **factory),
        "ConvNN2d": ConvNN2d(*sizes, padding=1, k=case.k, similarity="cosine", **factory),
        "ConvNN2d, space": ConvNN2d(*sizes, padding=1, **factory),
        "HybridConv2d": hybrid,
        "HybridConv2d, plain": maps.Around(hybrid, partial(plain.mixed, k=case.k, weighting="uniform")),
        "HybridConv2d, ratio 0": HybridConv2d(*sizes, ratio=0, **factory),
        "HybridConv2d, space": HybridConv2d(*sizes, similarity="space", pointwise=False, **factory),
    }

"""A layer on maps around another operator on its cells, and whether the layer is right."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convnn import ConvNN2d, HybridConv2d
from convnn.functional import convnn
from convnn_lab.bench.check import ERROR, check
from convnn_lab.bench.measure import Function

Layer: TypeAlias = ConvNN2d | HybridConv2d


class Around(nn.Module):
    """The parameters of a layer that compares cells by cosine around another operator: ``(query, cells, kernel)``.

    The layer has a stride of 1 and keeps the size of the map, and compares every cell.
    """

    def __init__(self, layer: Layer, operator: Function) -> None:
        super().__init__()
        self.layer, self.operator = layer, operator

    def forward(self, x: Tensor) -> Tensor:
        """``(B, C, H, W)`` to ``(B, O, H, W)``."""
        branch = searching(self.layer)
        if branch is None:
            return self.layer(x)
        found = self.operator(*cells(branch, x), branch.weight.flatten(2).to(_type(x)))
        found = found if branch.bias is None else found + branch.bias.to(found.dtype)
        found = found.mT.unflatten(2, x.shape[2:])
        if isinstance(self.layer, ConvNN2d):
            return found
        output = found if self.layer.conv is None else torch.cat([found, self.layer.conv(x)], 1)
        return output if self.layer.pointwise is None else self.layer.pointwise(output)


def searching(layer: Layer) -> ConvNN2d | None:
    """The part of a layer that searches, if there is one."""
    branch: Any = layer if isinstance(layer, ConvNN2d) else layer.convnn
    return branch if branch is not None and branch.by_features else None


def cells(branch: ConvNN2d, x: Tensor) -> tuple[Tensor, Tensor]:
    """The cells of a map and those of the padded map, ``(B, N, C)`` and ``(B, M, C)``."""
    around = [amount for end in reversed(branch.ends) for amount in end]
    x = x.to(_type(x))
    return x.flatten(2).mT.contiguous(), F.pad(x, around).flatten(2).mT.contiguous()


def _type(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def ours(
    query: Tensor, cells: Tensor, kernel: Tensor, k: int, weighting: str, self_index: Tensor | None = None
) -> Tensor:
    """The operator as layers on maps call it."""
    options: Any = {"similarity": "cosine", "weighting": weighting, "self_index": self_index}
    return convnn(query, cells, cells, kernel, k=k, **options)


def numbers(branch: ConvNN2d, x: Tensor) -> Tensor:
    """Which of the cells of the padded map are cells of the map, ``(N,)``."""
    (top, bottom), (left, right) = branch.ends
    height, width = x.shape[2:]
    whole = torch.arange((top + height + bottom) * (left + width + right), device=x.device)
    return whole.unflatten(0, (top + height + bottom, -1))[top : top + height, left : left + width].flatten()


@torch.no_grad()
def check_map(case: str, layer: Layer, x: Tensor) -> None:
    """Check the operator on two maps of the layer's own cells, and the layer around it.

    Among candidates that are drawn the layer is held against the reference as a whole, and in space against the search
    that its convolution stands for; where they choose by scores that are nearly equal, they may differ in a few cells.
    """
    x, branch, allowed = x[:2], searching(layer), ERROR[x.dtype]
    if branch is not None and branch.candidates is None:
        with torch.enable_grad():
            query, keys = cells(branch, x)
            kernel = branch.weight.flatten(2).to(x.dtype)
            check(
                case, [query[None], keys[None], keys[None], kernel], branch.k, similarity="cosine", weighting="uniform"
            )
        operator = partial(ours, k=branch.k, weighting="uniform", self_index=numbers(branch, x))
        output, again = layer(x), Around(layer, operator)(x)
    else:
        held, allowed = deepcopy(layer).double(), allowed if branch is None else 5e-2
        for part in held.modules():
            if isinstance(part, ConvNN2d):
                part.backend = "reference"
        training = layer.training
        output, again = layer.eval()(x), held.eval()(x.double())
        layer.train(training)
    error = ((output - again).norm() / again.norm()).item()
    if not error <= allowed:
        raise ValueError(f"{case}: the layer is off by {error:.1e} of its norm; nothing is timed")

"""Every argument of a convolution as a question about nearest cells."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from math import prod

import torch
from torch import Tensor

from convnn.descriptor import pixels
from convnn.masks import Rule


@dataclass(frozen=True)
class Windows:
    """The windows of a convolution on one map; one entry of each field for every axis.

    Args:
        size: the cells of the map, without padding.
        padding: how many cells of padding there are before the first and after the last.
        shifted: there is a window for every (stride-th) cell, moved inwards at the border instead of padded.
    """

    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    shifted: bool = False

    def __post_init__(self) -> None:
        if any(whole <= reach for whole, reach in zip(self.padded, self.reach, strict=True)):
            came = f"{self.padded} cells with padding, and windows of {tuple(r + 1 for r in self.reach)}"
            raise ValueError(f"a window must fit into the map, got {came}")

    @property
    def padded(self) -> tuple[int, ...]:
        """The cells of the map with its padding."""
        return tuple(n + before + after for n, (before, after) in zip(self.size, self.padding, strict=True))

    @property
    def reach(self) -> tuple[int, ...]:
        """How many cells lie between the first and the last cell of a window."""
        return tuple(d * (r - 1) for d, r in zip(self.dilation, self.kernel, strict=True))

    @property
    def outputs(self) -> tuple[int, ...]:
        """How many windows there are."""
        if self.shifted:
            return tuple(-(-n // s) for n, s in zip(self.size, self.stride, strict=True))
        axes = zip(self.padded, self.reach, self.stride, strict=True)
        return tuple((n - reach - 1) // s + 1 for n, reach, s in axes)

    def starts(self, device: torch.device) -> list[Tensor]:
        """The first cell of every window, along each axis."""
        axes = zip(self.outputs, self.stride, strict=True)
        places = [torch.arange(n, device=device) * s for n, s in axes]
        if not self.shifted:
            return places
        moved = zip(places, self.reach, self.size, strict=True)
        return [(place - reach // 2).clamp(0, n - 1 - reach) for place, reach, n in moved]

    def centres(self, device: torch.device) -> Tensor:
        """The middle of every window, ``(N, D)``; halves where a window has an even side."""
        axes = zip(self.starts(device), self.reach, strict=True)
        middles = [start + reach / 2 for start, reach in axes]
        return torch.stack(torch.meshgrid(*middles, indexing="ij"), -1).flatten(0, -2).float()

    def cells(self, device: torch.device) -> Tensor:
        """The place of every cell of the padded map, ``(M, D)``."""
        return pixels(self.padded, device=device).flatten(0, -2)

    def queries(self, device: torch.device) -> Tensor:
        """The number of the cell that asks for each output, ``(N,)``: the middle of its window, or the one before."""
        cells = torch.arange(prod(self.padded), device=device).view(self.padded)
        first = [0 if self.shifted else reach // 2 for reach in self.reach]
        axes = zip(first, self.outputs, self.stride, strict=True)
        return cells[tuple(slice(at, at + (n - 1) * s + 1, s) for at, n, s in axes)].flatten()

    def dilated(self) -> Rule:
        """Forbid the cells between those a dilated window touches: all must be whole steps from its first one."""

        def entry(i: Tensor, j: Tensor) -> Tensor:
            inside = torch.ones_like(i + j, dtype=torch.bool)
            starts = self.starts(i.device)
            for axis in reversed(range(len(self.size))):
                first = starts[axis][i % self.outputs[axis]]
                inside = inside & ((j % self.padded[axis] - first) % self.dilation[axis] == 0)
                i, j = i // self.outputs[axis], j // self.padded[axis]
            return inside

        return Rule(entry)

    def not_padding(self) -> Rule:
        """Forbid the cells of the padding."""

        def entry(i: Tensor, j: Tensor) -> Tensor:
            inside = torch.ones_like(i + j, dtype=torch.bool)
            for side, n, (before, _) in reversed(list(zip(self.padded, self.size, self.padding, strict=True))):
                inside = inside & (j % side >= before) & (j % side < before + n)
                j = j // side
            return inside

        return Rule(entry)


@dataclass(frozen=True)
class Nearness:
    r""":math:`-\max_a |q_a - k_a| / (d_a R_a / 2)`: a ball scaled to the window, whose cells are nearer than 1."""

    kernel: tuple[int, ...]
    dilation: tuple[int, ...]

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        """Score places ``(..., N, D)`` and ``(..., M, D)``.

        Cells of one distance are told apart by a little: the shorter way straight first, then by where they lie. It
        depends on the offset alone, and is too little to bring a cell into the window.
        """
        radii = [d * r / 2 for d, r in zip(self.dilation, self.kernel, strict=True)]
        axes = zip(query.unbind(-1), key.unbind(-1), radii, strict=True)
        offsets = [(k[..., None, :] - q[..., :, None]) / radius for q, k, radius in axes]
        furthest = reduce(torch.maximum, [offset.abs() for offset in offsets])
        straight = reduce(torch.add, [offset.square() for offset in offsets]) / len(offsets)
        side = reduce(torch.add, [offset * share for offset, share in zip(offsets, (1.0, 0.37, 0.11), strict=False)])
        apart = straight / (1 + straight) + 0.05 * side / (1 + side.abs())
        return -furthest - 0.2 / max(self.kernel) * apart

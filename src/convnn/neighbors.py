"""What flows from the search to the aggregation: who was chosen, and how near they are."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Neighbors(NamedTuple):
    """The neighbours of every query, one per slot.

    Args:
        scores: larger is nearer; ``-inf`` in an empty slot.
        index: which of the M keys; ``-1`` marks an empty slot.

    Shape:
        both ``(..., N, K)``.
    """

    scores: Tensor
    index: Tensor  # type: ignore[assignment]  # a tuple's own index() is not missed here

    @property
    def filled(self) -> Tensor:
        """True where a slot holds a neighbour."""
        return self.index >= 0


def take(rows: Tensor, index: Tensor) -> Tensor:
    """Pick rows by index: ``(..., M, C)`` at ``(..., N, K)`` gives ``(..., N, K, C)``; an empty slot picks row 0.

    Leading dimensions broadcast.
    """
    lead = together(rows.shape[:-2], index.shape[:-2])
    flat = index.clamp(min=0).flatten(-2).expand(*lead, -1)  # (..., N*K)
    # gather with an expanded index exports with dynamic sizes; take_along_dim does not.
    taken = rows.expand(*lead, -1, -1).gather(-2, flat[..., None].expand(*flat.shape, rows.shape[-1]))
    return taken.unflatten(-2, index.shape[-2:])


def ranked(tensor: Tensor, *, descending: bool = False) -> tuple[Tensor, Tensor]:
    """Sort along the last dimension: values, and where they stood; what is equal keeps its order."""
    if torch.compiler._is_exporting_flag and torch.onnx.is_in_onnx_export():
        # ONNX keeps the order of equals unasked, and torch's exporter knows no way to ask.
        values, places = tensor.sort(dim=-1, descending=descending)
    else:
        values, places = tensor.sort(dim=-1, descending=descending, stable=True)
    return values, places


def together(*shapes: tuple[int, ...]) -> torch.Size:
    """What shapes broadcast to: most often the one they have, and torch takes its time to find out."""
    some = [shape for shape in shapes if len(shape)]
    if all(shape == some[0] for shape in some):
        return torch.Size(some[0]) if some else torch.Size()
    return torch.broadcast_shapes(*shapes)


def wide(tensor: Tensor) -> Tensor:
    """Lift the half types to float32, in which scores are computed and sums are kept; leave the others."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor

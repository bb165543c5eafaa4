"""From the records of the operator to the kernels that mix channels."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from convnn.backends.triton import shapes
from convnn.backends.triton.mix import mix
from convnn.neighbors import together


def combine(
    value: Tensor, index: Tensor, weights: Tensor | None, kernel: Tensor, *lost: Tensor, distinct: bool = False
) -> Tensor:
    """Combine neighbours with a kernel that mixes channels; every one counts once if there are no weights.

    Args:
        distinct: whether no row names a key twice.
        lost: of every query and of every key, 0, or NaN where it has one: the rows it reaches become NaN.
    """
    lead = together(value.shape[:-2], index.shape[:-2])
    given = None if weights is None else shapes.folded(weights.float(), lead).contiguous()
    slots = shapes.folded(index, lead).contiguous()
    marks: Any = [shapes.folded(mark[..., None], lead)[..., 0].contiguous() for mark in lost] or [None, None]
    return shapes.unfolded(mix.learned(shapes.folded(value, lead), slots, given, kernel, *marks, distinct), lead)

"""Combine neighbours whose weights are known, channel by channel."""

from __future__ import annotations

from torch import Tensor

from convnn.backends.triton import ops, shapes
from convnn.backends.triton.modes import GIVEN
from convnn.neighbors import together


def combine(
    value: Tensor, index: Tensor, weights: Tensor, taps: Tensor | None, *, atomic: bool, distinct: bool = False
) -> Tensor:
    """Sum over the slots of a row.

    Args:
        taps: ``(C, K)``, or None for a plain sum.
        distinct: whether no row names a key twice.
    """
    lead = together(value.shape[:-2], index.shape[:-2])
    values, slots = shapes.folded(value, lead), shapes.folded(index.int(), lead).contiguous()
    given = shapes.folded(weights.float(), lead).contiguous()
    # Queries and keys are not looked at.
    empty = value.new_empty((*given.shape[:-1], 1))
    options = (0, GIVEN, False, 1.0, 0.0, 0.0, atomic, distinct)
    given_alone = (taps, slots, None, given, None, None, None, None)
    output = ops.combine.learned(empty, values[..., :1], values, *given_alone, *options)
    return shapes.unfolded(output, lead)

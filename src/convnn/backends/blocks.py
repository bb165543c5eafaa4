"""Cut a problem into blocks of rows, run each, and lay the results side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from convnn.neighbors import together

Pieces: TypeAlias = Sequence[Tensor]
Run: TypeAlias = Callable[[Pieces, Pieces], tuple[Tensor, ...]]
ON_CPU, ELSEWHERE = 2**20, 2**22  # numbers in a block, most often scores


def in_blocks(run: Run, by_row: Pieces, shared: Pieces, *, row: int, budget: int) -> tuple[Tensor, ...]:
    """Call ``run(by_row, shared)`` on blocks that need at most ``budget`` numbers, and join what it returns.

    Leading dimensions broadcast and are cut first, outermost first; then the rows. What is ``shared`` by the rows, as
    the keys are, is only cut along leading dimensions.

    Args:
        row: how many numbers one row needs.

    Shape:
        by_row ``(..., N, *)``, shared ``(..., *, *)``, results ``(..., N, *)``.
    """
    lead = together(*(tensor.shape[:-2] for tensor in (*by_row, *shared)))
    n_rows = by_row[0].shape[-2]
    limit = budget // row
    for tensor in shared:
        if tensor.shape[:-2] != lead:
            # What is broadcast is copied for every leading entry of a block, by a matmul or for its gradient.
            limit = min(limit, max(1, budget // max(1, prod(tensor.shape[-2:]))) * n_rows)
    by_row, shared = ([_with_axes(tensor, len(lead)) for tensor in tensors] for tensors in (by_row, shared))
    return _cut(run, by_row, shared, (*lead, n_rows), 0, limit)


def _cut(run: Run, by_row: Pieces, shared: Pieces, sizes: Sequence[int], axis: int, limit: int) -> tuple[Tensor, ...]:
    if prod(sizes) <= limit or axis == len(sizes):
        return run(by_row, shared)
    step = max(1, limit // max(1, prod(sizes[axis + 1 :])))
    if step >= sizes[axis]:
        return _cut(run, by_row, shared, sizes, axis + 1, limit)
    count = -(-sizes[axis] // step)
    rows = [_split(tensor, step, axis, count) for tensor in by_row]
    common = [_split(tensor, step, axis, count) if axis < len(sizes) - 1 else [tensor] * count for tensor in shared]
    results = []
    for i in range(count):
        size = min(step, sizes[axis] - i * step)
        inner = (*sizes[:axis], size, *sizes[axis + 1 :])
        results.append(_cut(run, [r[i] for r in rows], [c[i] for c in common], inner, axis + 1, limit))
    return tuple(torch.cat(parts, axis) for parts in zip(*results, strict=True))


def _with_axes(tensor: Tensor, n_lead: int) -> Tensor:
    """Put axes of length 1 in front until there are ``n_lead`` leading ones."""
    return tensor[(None,) * (n_lead + 2 - tensor.ndim)]


def _split(tensor: Tensor, step: int, axis: int, count: int) -> Sequence[Tensor]:
    # split, not slices: its backward joins the gradients once instead of padding each with zeros and adding them up.
    return [tensor] * count if tensor.shape[axis] == 1 else tensor.split(step, axis)

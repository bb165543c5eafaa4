"""Run the kernels of the backward half."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from convnn.backends.triton.kernels.by_key import by_key, count_edges, fill_edges, scatter, sort_edges
from convnn.backends.triton.kernels.by_query import add_parts, by_query
from convnn.backends.triton.kernels.by_row import by_row
from convnn.backends.triton.sizes import (
    HELD,
    LONG,
    combine_tile,
    has,
    key_tile,
    of,
    padded,
    query_tile,
    row_tile,
    sizes_of,
    strides,
)


@dataclass(frozen=True, eq=False)
class Step:
    """What a backward pass starts from.

    Args:
        optional: shift, given weights, beta, seed and own, where there are any.
        into: the gradients to fill.
        numbers: the scale of scores, the score of one's own key, and the probability of dropout.
        choices: how pairs are scored, and how scores become weights.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    kernel: Tensor | None
    index: Tensor
    optional: dict[str, Tensor | None]
    lse: Tensor
    gradient: Tensor
    into: dict[str, Tensor]
    numbers: tuple[float, float, float]
    choices: dict[str, int]

    @property
    def heads(self) -> int:
        """Batch and heads together."""
        return self.query.shape[0] * self.query.shape[1]

    @property
    def scored(self) -> bool:
        """Whether weights depend on scores, and gradients reach queries and keys."""
        return self.choices["WEIGHT"] == 1

    @property
    def sizes(self) -> dict[str, int]:
        """Channels and slots."""
        return sizes_of(self.query.shape[-1], self.value.shape[-1], self.index.shape[-1])

    @property
    def wide(self) -> int:
        """The larger of the padded channels."""
        return max(self.sizes["EP"], self.sizes["CP"])


def combine_backward(step: Step, *, atomic: bool) -> None:
    """Fill all gradients; those of keys and values in no fixed order if ``atomic``."""
    if step.index.numel() == 0 or step.value.numel() == 0:
        for tensor in step.into.values():
            tensor.zero_()
        return
    shape = step.index.shape if step.scored else (0,)
    # The weight of every slot, and the gradient of its score.
    slots = tuple(step.query.new_empty(shape, dtype=torch.float32) for _ in range(2))
    _by_query(step, slots)
    (_scatter if atomic else _by_key)(step, slots)


def _by_query(step: Step, slots: tuple[Tensor, ...]) -> None:
    n, k = step.index.shape[-2:]
    if padded(k) * step.wide <= HELD:
        rows, warps = row_tile(n)
        tiles, run = triton.cdiv(n, rows), by_row
        tile = {"ROWS": rows, "num_warps": warps}
    else:
        rows, warps, each = query_tile(max(step.wide, padded(k)))
        tiles, run = triton.cdiv(n, rows * each), by_query
        tile = {"BM": rows, "TILES": each, "num_warps": warps}
    summed = 0 if step.kernel is None else step.heads * tiles
    parts = step.query.new_empty((summed, k, step.value.shape[-1]), dtype=torch.float32)
    into = step.into
    run[(tiles, step.heads)](
        *(step.query, step.key, step.value, of(step.kernel, step.query), step.index),
        *(of(step.optional[name], step.query) for name in ("shift", "given", "beta", "seed", "own")),
        *(step.lse, step.gradient, into["query"], parts, into["slots"], into["beta"], *slots),
        *(n, step.query.shape[1], *step.numbers),
        *strides(step.query, 3),
        *strides(step.key, 3),
        *strides(step.value, 3),
        *strides(step.gradient, 3),
        *strides(step.index, 2),
        **step.sizes,
        **step.choices,
        **has(step.kernel, step.optional),
        **tile,
        KP=padded(k),
    )
    if step.kernel is not None:
        _add_parts(parts, into["kernel"])


def _add_parts(parts: Tensor, into: Tensor) -> None:
    count, size = parts.shape[0], into.numel()
    split = 32 if count > 256 else 1
    between = parts.new_empty(split, size) if split > 1 else into
    add_parts[(triton.cdiv(size, 128), split)](parts, between, count, size, BLOCK=128, ROWS=8)
    if split > 1:
        add_parts[(triton.cdiv(size, 128), 1)](between, into, split, size, BLOCK=128, ROWS=8)


def _by_key(step: Step, slots: tuple[Tensor, ...]) -> None:
    keys = step.value.shape[-2]
    count, until, edges, ordered = inverse(step.index, keys)
    group, warps = key_tile(step.wide)
    by_key[(triton.cdiv(keys, group), step.heads)](
        *(step.query, step.key, of(step.kernel, step.query), step.gradient, *_weights(step, slots)),
        *(until, count, edges, ordered, step.into["key"], step.into["value"], of(step.optional["seed"], step.query)),
        *(step.index.shape[-2], keys, step.query.shape[1], step.numbers[2]),
        *strides(step.query, 3),
        *strides(step.key, 3),
        *strides(step.gradient, 3),
        **_common(step),
        BJ=group,
        LONG=LONG,
        num_warps=warps,
    )


def _scatter(step: Step, slots: tuple[Tensor, ...]) -> None:
    n, keys = step.index.shape[-2], step.value.shape[-2]
    rows, warps = combine_tile(step.wide)
    sums = [torch.zeros_like(step.into[name], dtype=torch.float32) for name in ("key", "value")]
    scatter[(triton.cdiv(n, rows), step.heads)](
        *(step.query, step.key, of(step.kernel, step.query), step.index, step.gradient, *_weights(step, slots)),
        *(*sums, of(step.optional["seed"], step.query), n, keys, step.query.shape[1], step.numbers[2]),
        *strides(step.query, 3),
        *strides(step.key, 3),
        *strides(step.gradient, 3),
        *strides(step.index, 2),
        **_common(step),
        BM=rows,
        num_warps=warps,
    )
    step.into["key"].copy_(sums[0])
    step.into["value"].copy_(sums[1])


def _weights(step: Step, slots: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return of(step.optional["given"], slots[0]), slots[1]


def _common(step: Step) -> dict[str, Any]:
    here = {"HAS_W": step.kernel is not None, "DROPOUT": step.optional["seed"] is not None, "WANTS_K": step.scored}
    return {**step.sizes, **step.choices, **here}


def inverse(index: Tensor, keys: int) -> tuple[Tensor, ...]:
    """For every key, the slots that chose it: how many, where they end, and which, twice if there are many."""
    batch, heads, n, k = index.shape
    count = torch.zeros(batch * heads * keys, dtype=torch.int32, device=index.device)
    rank = torch.empty(index.numel(), dtype=torch.int32, device=index.device)
    edges, ordered = torch.empty_like(rank), torch.empty_like(rank)
    grid = (triton.cdiv(n * k, 512), batch * heads)
    shape = (keys, n * k, *strides(index, 2), heads)
    count_edges[grid](index, count, rank, *shape, BLOCK=512)
    # 32 bits count the slots of what fits into memory, unless there are billions of them.
    until = count.cumsum(0, dtype=torch.int32 if index.numel() < 2**31 else torch.int64)
    fill_edges[grid](index, until, count, rank, edges, *shape, BLOCK=512)
    sort_edges[(triton.cdiv(count.numel(), 64), 2)](
        until, count, edges, ordered, count.numel(), LONG=LONG, KEYS=64, BLOCK=64, num_warps=1
    )
    return count, until, edges, ordered

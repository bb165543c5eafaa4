"""Run the kernels of the backward half."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from convnn.backends.triton.kernels.by_key import by_key, scatter
from convnn.backends.triton.kernels.by_query import by_query
from convnn.backends.triton.kernels.by_row import by_row
from convnn.backends.triton.kernels.by_slot import add_parts, by_slot
from convnn.backends.triton.kernels.inverse import count_edges, fill_edges, order_hubs, scan, sort_edges
from convnn.backends.triton.kernels.invert import invert
from convnn.backends.triton.sizes import (
    HELD,
    INVERTED,
    LONG,
    SHORT,
    WHOLE,
    has,
    invert_tile,
    key_tile,
    of,
    over,
    padded,
    query_tile,
    row_tile,
    scatter_tile,
    sizes_of,
    slot_pieces,
    slot_tile,
    strides,
)

UNIFORM = 0


@dataclass(frozen=True, eq=False)
class Step:
    """What a backward pass starts from.

    Args:
        optional: shift, given weights, beta, seed and own, where there are any.
        into: the gradients to fill.
        numbers: the scale of scores, the score of one's own key, and the probability of dropout.
        choices: how pairs are scored, and how scores become weights.
        distinct: whether no row chooses a key twice.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    kernel: Tensor | None
    index: Tensor
    optional: dict[str, Tensor | None]
    gradient: Tensor
    into: dict[str, Tensor]
    numbers: tuple[float, float, float]
    choices: dict[str, int]
    distinct: bool

    @property
    def heads(self) -> int:
        """Batch and heads together."""
        return self.query.shape[0] * self.query.shape[1]

    @property
    def scored(self) -> bool:
        """Whether weights depend on scores, and gradients reach queries and keys."""
        return self.choices["WEIGHT"] == 1

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Channels and slots."""
        return sizes_of(self.query.shape[-1], self.value.shape[-1], self.index.shape[-1])

    @cached_property
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
    # The weight of every slot, and the gradient of its score, no finer than what they are multiplied with.
    brain = step.value.dtype == step.query.dtype == torch.bfloat16
    slots = tuple(step.query.new_empty(shape, dtype=torch.bfloat16 if brain else torch.float32) for _ in range(2))
    if step.scored and step.index.shape[-1] * step.wide * step.query.itemsize <= HELD:
        _by_row(step, slots)
    elif step.choices["WEIGHT"] != UNIFORM:
        _by_query(step, slots)
    if step.kernel is not None:
        _by_slot(step, slots)
    (_scatter if atomic else _by_key)(step, slots)


def _by_row(step: Step, slots: tuple[Tensor, ...]) -> None:
    n, k = step.index.shape[-2:]
    rows, each, warps, registers = row_tile(step.wide, k)
    p1, p2, p3 = slot_pieces(k)
    by_row[(over(n, rows * each), step.heads)](
        *(step.query, step.key, step.value, of(step.kernel, step.query), step.index),
        *(of(step.optional[name], step.query) for name in ("shift", "beta", "seed", "own")),
        *(step.gradient, step.into["query"], step.into["slots"], step.into["beta"], *slots),
        *_numbers(step),
        **step.sizes,
        **step.choices,
        **has(step.kernel, step.optional),
        P1=p1,
        P2=p2,
        P3=p3,
        BM=rows,
        TILES=each,
        num_warps=warps,
        **registers,
    )


def _by_query(step: Step, slots: tuple[Tensor, ...]) -> None:
    n, k = step.index.shape[-2:]
    rows, warps, each = query_tile(max(step.wide, padded(k)))
    into = step.into
    by_query[(over(n, rows * each), step.heads)](
        *(step.query, step.key, step.value, of(step.kernel, step.query), step.index),
        *(of(step.optional[name], step.query) for name in ("shift", "beta", "seed", "own")),
        *(step.gradient, into["query"], into["slots"], into["beta"], *slots),
        *_numbers(step),
        **step.sizes,
        **step.choices,
        **has(step.kernel, step.optional),
        KP=padded(k),
        BM=rows,
        TILES=each,
        num_warps=warps,
    )


def pair_scores(step: Step) -> None:
    """Fill the gradients of given weights alone."""
    _by_query(step, (step.into["slots"],) * 2)


def pair_keys(step: Step) -> None:
    """Fill the gradient of values alone, from given weights."""
    _by_key(step, (step.into["slots"],) * 2)


def _by_slot(step: Step, slots: tuple[Tensor, ...]) -> None:
    n, k = step.index.shape[-2:]
    rows, each, some, rest, warps = slot_tile(step.heads, n, k, step.sizes["CP"])
    tiles = over(n, rows * each)
    parts = step.value.new_empty((step.heads * tiles, k, step.value.shape[-1]), dtype=torch.float32)
    by_slot[(tiles, step.heads, over(k, some))](
        *(step.value, step.index, step.gradient, _weights(step, slots)[0], parts),
        *(of(step.optional["seed"], step.query), n, step.query.shape[1], step.numbers[2]),
        *strides(step.value, 3),
        *strides(step.gradient, 3),
        *strides(step.index, 2),
        C=step.sizes["C"],
        CP=step.sizes["CP"],
        KK=k,
        BM=rows,
        TILES=each,
        BS=some,
        REST=rest,
        WEIGHT=step.choices["WEIGHT"],
        DROPOUT=step.optional["seed"] is not None,
        num_warps=warps,
    )
    _add_parts(parts, step.into["kernel"])


def _numbers(step: Step) -> tuple[Any, ...]:
    return (step.index.shape[-2], step.query.shape[1], *step.numbers, *_strides(step))


def _strides(step: Step) -> tuple[int, ...]:
    tensors = (step.query, step.key, step.value, step.gradient)
    return (*(stride for tensor in tensors for stride in strides(tensor, 3)), *strides(step.index, 2))


def _add_parts(parts: Tensor, into: Tensor) -> None:
    count, size = parts.shape[0], into.numel()
    split = 32 if count > 256 else 1
    channels = into.shape[0]  # they come last in the parts
    if split > 1:
        between = parts.new_empty(split, size)
        add_parts[(over(size, 128), split)](parts, between, count, size, 0, BLOCK=128, ROWS=8)
        parts, count = between, split
    add_parts[(over(size, 128), 1)](parts, into, count, size, channels, BLOCK=128, ROWS=8)


def _by_key(step: Step, slots: tuple[Tensor, ...]) -> None:
    keys = step.value.shape[-2]
    until, edges, ordered = inverse(step.index, keys, distinct=step.distinct)
    group, some, warps, registers = key_tile(step.wide)
    by_key[(over(keys, group), step.heads)](
        *(step.query, step.key, of(step.kernel, step.query), step.gradient, *_weights(step, slots)),
        *(until, edges, ordered, step.into["key"], step.into["value"], of(step.optional["seed"], step.query)),
        *(step.index.shape[-2], keys, step.query.shape[1], step.numbers[2]),
        *strides(step.query, 3),
        *strides(step.key, 3),
        *strides(step.gradient, 3),
        **_common(step),
        BJ=group,
        BS=some,
        SHORT=0 if edges is ordered else SHORT,
        num_warps=warps,
        **registers,
    )


def _scatter(step: Step, slots: tuple[Tensor, ...]) -> None:
    n, keys = step.index.shape[-2], step.value.shape[-2]
    rows, warps = scatter_tile(step.wide)
    sums = [torch.zeros_like(step.into[name], dtype=torch.float32) for name in ("key", "value")]
    scatter[(over(n, rows), step.heads)](
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


def inverse(index: Tensor, keys: int, *, distinct: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Up to where the slots of each key reach; the slots of every entry by key; and in order where there are many.

    The last two are one where all are in order, which is possible if no row chooses a key twice.
    """
    batch, heads, n, k = index.shape
    entries, slots = batch * heads, n * k
    until = index.new_empty((entries, keys), dtype=torch.int32)
    ordered = index.new_empty((entries, slots), dtype=torch.int32)
    shape = (keys, slots, *strides(index, 2), heads)
    if distinct and max(n, keys) <= WHOLE and slots <= INVERTED:
        words = padded(over(n, 32), 1)
        chosen, before = (index.new_empty((entries, keys, words), dtype=torch.int32) for _ in range(2))
        block, warps = invert_tile(slots)
        sizes = {"KK": k, "WORDS": words, "MP": padded(keys), "BLOCK": block}
        invert[(entries,)](index, chosen, before, until, ordered, *shape, **sizes, num_warps=warps)
        return until, ordered, ordered
    count = torch.zeros_like(until)
    edges = torch.empty_like(ordered)
    grid = (over(slots, 512), entries)
    # Who came first is written where the order will be.
    count_edges[grid](index, count, ordered, *shape, BLOCK=512)
    scan[(entries,)](count, until, keys, BLOCK=min(4096, padded(keys)), num_warps=8)
    fill_edges[grid](index, until, count, ordered, edges, *shape, BLOCK=512)
    sort_edges[(over(keys, 64), entries)](
        *(until, count, edges, ordered, keys, slots), SHORT=SHORT, LONG=LONG, KEYS=64, num_warps=1
    )
    if slots > LONG:  # not n: a row of somebody's own neighbours may name a key more than once
        hubs = (over(keys, 16), entries)
        order_hubs[hubs](index, until, count, ordered, *shape, LONG=LONG, KEYS=16, BLOCK=1024)
    return until, edges, ordered

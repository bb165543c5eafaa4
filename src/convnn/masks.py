"""Who may be chosen? A mask forbids pairs of a query and a key, or shifts their scores.

A mask is a tensor with the meaning it has in ``F.scaled_dot_product_attention`` (True may be chosen; a float is added
and gets gradients; ``-inf`` forbids), or a rule ``(i, j) -> bool or float``. A rule is called with broadcasting integer
tensors, row numbers of queries and of keys, a block at a time: it never fills a whole N x M tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from math import prod
from operator import or_
from typing import TypeAlias

import torch
from torch import Tensor

from convnn import checks
from convnn.hashing import drawn

Entry: TypeAlias = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Lookup:
    """A float mask that is looked up in a table, which may differ along leading dimensions, as from head to head.

    Args:
        place: ``(i, j) ->`` where in the table the number of that pair stands.
        sizes: N and M, for which the places are meant.

    Shape:
        table ``(..., 1, T)``.
    """

    place: Entry
    table: Tensor
    sizes: tuple[int, int]

    def __call__(self, i: Tensor, j: Tensor) -> Tensor:
        """Look up the numbers of queries i and keys j."""
        place = self.place(i, j)  # (..., N, K)
        lead = torch.broadcast_shapes(self.table.shape[:-2], place.shape[:-2])
        flat = place.expand(*lead, -1, -1).flatten(-2)
        return self.table[..., 0, :].expand(*lead, -1).gather(-1, flat).unflatten(-1, place.shape[-2:])


Mask: TypeAlias = Tensor | Entry | Lookup


@dataclass(frozen=True, eq=False)
class Rule:
    """A rule that says True or False, and combines with others by ``&``, ``|`` and ``~``.

    Args:
        sizes: N and M, where the rule is for so many queries and keys only.

    Example:
        >>> near_past = window(2) & causal
        >>> near_past(torch.arange(4)[:, None], torch.arange(4)[None, :]).int()
        tensor([[1, 0, 0, 0],
                [1, 1, 0, 0],
                [1, 1, 1, 0],
                [0, 1, 1, 1]], dtype=torch.int32)
    """

    entry: Entry
    sizes: tuple[int, int] | None = None

    def __call__(self, i: Tensor, j: Tensor) -> Tensor:
        """Say for which queries i and keys j it holds."""
        return _truth(self.entry, i, j)

    def __and__(self, other: Entry) -> Rule:
        return Rule(partial(both, one=self, other=other), _sizes(self, other))

    def __or__(self, other: Entry) -> Rule:
        return Rule(partial(_either, one=self, other=other), _sizes(self, other))

    def __invert__(self) -> Rule:
        return Rule(partial(_not, one=self), self.sizes)


def _sizes(*rules: Entry) -> tuple[int, int] | None:
    return next((rule.sizes for rule in rules if isinstance(rule, Rule) and rule.sizes is not None), None)


def _truth(entry: Entry, i: Tensor, j: Tensor) -> Tensor:
    said = entry(i, j)
    if not isinstance(said, Tensor) or said.dtype != torch.bool:
        came = said.dtype if isinstance(said, Tensor) else type(said).__name__
        raise ValueError(
            f"rules combine where they return a bool tensor, got {came}; pass floats as a mask of their own"
        )
    return said


# The entries of rules are functions with names, so that a layer that holds one can be pickled.


def both(i: Tensor, j: Tensor, *, one: Entry, other: Entry) -> Tensor:
    """Where both rules hold."""
    return _truth(one, i, j) & _truth(other, i, j)


def _either(i: Tensor, j: Tensor, *, one: Entry, other: Entry) -> Tensor:
    return _truth(one, i, j) | _truth(other, i, j)


def _not(i: Tensor, j: Tensor, *, one: Entry) -> Tensor:
    return ~_truth(one, i, j)


def _past(i: Tensor, j: Tensor) -> Tensor:
    return j <= i


def near(i: Tensor, j: Tensor, *, radius: int) -> Tensor:
    """Where a key is at most so many places away."""
    return (i - j).abs() <= radius


def _in_step(i: Tensor, j: Tensor, *, step: int) -> Tensor:
    return (i - j) % step == 0


def _same_block(i: Tensor, j: Tensor, *, stride: int) -> Tensor:
    return i // stride == j // stride


def _summary(i: Tensor, j: Tensor, *, stride: int, summary: int) -> Tensor:  # noqa: ARG001
    return j % stride >= stride - summary


def _ends(i: Tensor, j: Tensor, *, count: int) -> Tensor:
    return (i < count) | (j < count)


def _drawn(i: Tensor, j: Tensor, *, seed: int, keys: int) -> Tensor:
    return drawn(i, seed) % keys == j


def _around(i: Tensor, j: Tensor, *, size: tuple[int, ...], sides: tuple[int, ...]) -> Tensor:
    inside = torch.ones_like(i + j, dtype=torch.bool)
    for n, r in zip(reversed(size), reversed(sides), strict=True):
        first = (i % n - r // 2).clamp(0, n - r)
        inside = inside & (j % n >= first) & (j % n < first + r)
        i, j = i // n, j // n
    return inside


# Let query i choose key j up to and including i, counted from the top left as torch does.
causal = Rule(_past)


def window(radius: int) -> Rule:
    """Let a query choose the keys at most ``radius`` places from its own."""
    checks.whole("radius", radius, 0)
    return Rule(partial(near, radius=radius))


def dilated(radius: int, step: int) -> Rule:
    """Let a query choose every ``step``-th key, ``radius`` of them to either side."""
    checks.whole("radius", radius, 0)
    checks.whole("step", step, 1)
    return window(radius * step) & Rule(partial(_in_step, step=step))


def strided(stride: int) -> Rule:
    """The Sparse Transformer's strided pattern: the keys up to ``stride`` away, and every ``stride``-th one.

    Published for ``strided(...) & causal``.
    """
    checks.whole("stride", stride, 1)
    return window(stride) | Rule(partial(_in_step, step=stride))


def fixed(stride: int, summary: int = 1) -> Rule:
    """The Sparse Transformer's fixed pattern: one's own block of ``stride``, and the last ``summary`` keys of each.

    Published for ``fixed(...) & causal``.
    """
    checks.whole("stride", stride, 1)
    if not 1 <= summary <= stride:
        raise ValueError(f"summary must be from 1 to the stride, {stride}, got {summary}")
    return Rule(partial(_same_block, stride=stride)) | Rule(partial(_summary, stride=stride, summary=summary))


def bigbird(window: int, globals: int, random: int, *, keys: int, seed: int = 0) -> Rule:  # noqa: A002 - its own names
    """BigBird: a window, the first ``globals`` tokens seeing and seen by all, and ``random`` keys for each query.

    Args:
        window: how far the window reaches to either side.
        keys: M, out of which the random keys are drawn; two of one query may fall together.
        seed: the same seed draws the same keys.
    """
    for name, size in (("window", window), ("globals", globals), ("random", random)):
        checks.whole(name, size, 0)
    checks.whole("keys", keys, 1)
    chosen = [Rule(partial(_drawn, seed=number + 7919 * seed, keys=keys)) for number in range(random)]
    return reduce(or_, chosen, Rule(partial(near, radius=window)) | Rule(partial(_ends, count=globals)))


def neighborhood(size: Sequence[int], kernel_size: int | Sequence[int]) -> Rule:
    """Let a cell of a map choose the window around it, moved inwards at the border so that it stays whole.

    This is the pattern of neighbourhood attention.

    Args:
        size: the sides of the map, row-major, whose cells queries and keys are.
        kernel_size: the sides of the window; odd, so that it has a middle.
    """
    sides = (kernel_size,) * len(size) if isinstance(kernel_size, int) else tuple(kernel_size)
    if len(sides) != len(size) or any(r % 2 == 0 or not 1 <= r <= n for r, n in zip(sides, size, strict=True)):
        raise ValueError(f"a window must have odd sides within the map of {tuple(size)}, got {kernel_size}")
    return Rule(partial(_around, size=tuple(size), sides=sides), (prod(size), prod(size)))


MASKS: dict[str, Rule] = {"causal": causal}

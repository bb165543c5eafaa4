"""Who may be chosen? A mask forbids pairs of a query and a key, or shifts their scores.

A mask is a tensor with the meaning it has in ``F.scaled_dot_product_attention`` (True may be chosen; a float is added
and gets gradients; ``-inf`` forbids), or a rule ``(i, j) -> bool or float``. A rule is called with broadcasting integer
tensors, row numbers of queries and of keys, a block at a time: it never fills a whole N x M tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from operator import or_
from typing import TypeAlias

import torch
from torch import Tensor, nn

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

    Example:
        >>> near_past = window(2) & causal
        >>> near_past(torch.arange(4)[:, None], torch.arange(4)[None, :]).int()
        tensor([[1, 0, 0, 0],
                [1, 1, 0, 0],
                [1, 1, 1, 0],
                [0, 1, 1, 1]], dtype=torch.int32)
    """

    entry: Entry

    def __call__(self, i: Tensor, j: Tensor) -> Tensor:
        """Say for which queries i and keys j it holds."""
        return _truth(self.entry, i, j)

    def __and__(self, other: Entry) -> Rule:
        return Rule(lambda i, j: self(i, j) & _truth(other, i, j))

    def __or__(self, other: Entry) -> Rule:
        return Rule(lambda i, j: self(i, j) | _truth(other, i, j))

    def __invert__(self) -> Rule:
        return Rule(lambda i, j: ~self(i, j))


def _truth(entry: Entry, i: Tensor, j: Tensor) -> Tensor:
    said = entry(i, j)
    if not isinstance(said, Tensor) or said.dtype != torch.bool:
        came = said.dtype if isinstance(said, Tensor) else type(said).__name__
        raise ValueError(
            f"rules combine where they return a bool tensor, got {came}; pass floats as a mask of their own"
        )
    return said


@Rule
def causal(i: Tensor, j: Tensor) -> Tensor:
    """Let query i choose key j up to and including i, counted from the top left as torch does."""
    return j <= i


def window(radius: int) -> Rule:
    """Let a query choose the keys at most ``radius`` places from its own."""
    checks.whole("radius", radius, 0)
    return Rule(lambda i, j: (i - j).abs() <= radius)


def dilated(radius: int, step: int) -> Rule:
    """Let a query choose every ``step``-th key, ``radius`` of them to either side."""
    checks.whole("radius", radius, 0)
    checks.whole("step", step, 1)
    return Rule(lambda i, j: ((i - j).abs() <= radius * step) & ((i - j) % step == 0))


def strided(stride: int) -> Rule:
    """The Sparse Transformer's strided pattern: the keys up to ``stride`` away, and every ``stride``-th one.

    Published for ``strided(...) & causal``.
    """
    checks.whole("stride", stride, 1)
    return window(stride) | Rule(lambda i, j: (i - j) % stride == 0)


def fixed(stride: int, summary: int = 1) -> Rule:
    """The Sparse Transformer's fixed pattern: one's own block of ``stride``, and the last ``summary`` keys of each.

    Published for ``fixed(...) & causal``.
    """
    checks.whole("stride", stride, 1)
    if not 1 <= summary <= stride:
        raise ValueError(f"summary must be from 1 to the stride, {stride}, got {summary}")
    own = Rule(lambda i, j: i // stride == j // stride)
    return own | Rule(lambda _, j: j % stride >= stride - summary)


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
    near = Rule(lambda i, j: (i - j).abs() <= window)
    ends = Rule(lambda i, j: (i < globals) | (j < globals))
    return reduce(or_, [_drawn(number, seed, keys) for number in range(random)], near | ends)


def _drawn(number: int, seed: int, keys: int) -> Rule:
    """One random key for every query."""
    return Rule(lambda i, j: drawn(i, number + 7919 * seed) % keys == j)


class RelativeBias(nn.Module):
    r""":math:`S_{ij} + B[\Delta_{ij}]`: a learned number for every offset from a query's cell to a key's cell.

    The table starts at 0, where it changes nothing. On another map than it was made for (see :meth:`on`), an offset is
    still counted in cells; one beyond the table takes the number at its edge.

    Args:
        size: the sides of the map, row-major, whose cells the tokens are.
        heads: how many tables there are, one for each entry of the last leading dimension; None for one for all.
        class_tokens: how many tokens without a place come before the cells. They share three numbers: for a class
            token looking at a cell, a cell looking at a class token, and class tokens looking at each other.

    Shape:
        table ``(*sides)`` or ``(heads, *sides)`` with a side of 2n - 1 for n cells; class_table ``(3,)`` or
        ``(heads, 3)``.

    Example:
        >>> bias = RelativeBias((4, 6), heads=2)
        >>> bias.table.shape
        torch.Size([2, 7, 11])
        >>> from convnn.functional import convnn
        >>> x = torch.randn(3, 2, 24, 5)
        >>> torch.equal(convnn(x, x, x, k=7, mask=bias), convnn(x, x, x, k=7))
        True
    """

    def __init__(
        self,
        size: Sequence[int],
        *,
        heads: int | None = None,
        class_tokens: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for side in size:
            checks.whole("a side of the map", side, 1)
        checks.whole("class_tokens", class_tokens, 0)
        self.size, self.class_tokens = tuple(size), class_tokens
        lead = () if heads is None else (heads,)
        sides = [2 * side - 1 for side in size]
        self.table = nn.Parameter(torch.empty(*lead, *sides, device=device, dtype=dtype))
        classes = torch.empty(*lead, 3, device=device, dtype=dtype) if class_tokens else None
        self.class_table = None if classes is None else nn.Parameter(classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start at 0."""
        for table in self.parameters():
            nn.init.zeros_(table)

    def on(self, size: Sequence[int], queries: Tensor | None = None) -> Lookup:
        """Make the mask for keys that are the cells of a map of this size.

        Args:
            queries: the number of each query's token among the keys, ``(N,)``; None where queries and keys are the same
                tokens.
        """
        if len(size) != len(self.size):
            raise ValueError(f"a bias for maps of {len(self.size)} sides was given one of {tuple(size)}")
        table = self.table.flatten(-len(self.size))
        table = table if self.class_table is None else torch.cat([table, self.class_table], -1)
        tokens = prod(size) + self.class_tokens

        def place(i: Tensor, j: Tensor) -> Tensor:
            return self._place(i if queries is None else queries[i], j, tuple(size))

        return Lookup(place, table[..., None, :], (tokens if queries is None else queries.shape[0], tokens))

    def forward(self, i: Tensor, j: Tensor) -> Tensor:
        """The numbers of tokens i looking at tokens j."""
        return self.on(self.size)(i, j)

    def _place(self, i: Tensor, j: Tensor, size: tuple[int, ...]) -> Tensor:
        here, there = i - self.class_tokens, j - self.class_tokens
        place, length = torch.zeros_like(i + j), 1
        for side, own in zip(reversed(size), reversed(self.size), strict=True):
            offset = (there % side - here % side).clamp(1 - own, own - 1) + own - 1
            place, length = place + length * offset, length * (2 * own - 1)
            here, there = here // side, there // side
        if not self.class_tokens:
            return place
        looking, looked_at = (i < self.class_tokens).long(), (j < self.class_tokens).long()
        return torch.where((looking + looked_at) > 0, length + looking + 2 * looked_at - 1, place)


MASKS: dict[str, Rule] = {"causal": causal}

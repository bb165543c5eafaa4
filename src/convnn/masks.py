"""Who may be chosen? A mask forbids pairs of a query and a key, or shifts their scores.

A mask is a tensor with the meaning it has in ``F.scaled_dot_product_attention`` (True may be chosen; a float is added
and gets gradients; ``-inf`` forbids), or a rule ``(i, j) -> bool or float``. A rule is called with broadcasting integer
tensors, row numbers of queries and of keys, a block at a time: it never fills a whole N x M tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from math import prod
from operator import or_
from typing import TypeAlias

import torch
from torch import Tensor

from convnn import checks
from convnn.hashing import drawn

Entry: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Mask: TypeAlias = Tensor | Entry


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


MASKS: dict[str, Rule] = {"causal": causal}


def combine(entries: Iterable[Tensor]) -> tuple[Tensor | None, list[Tensor]]:
    """Combine evaluated masks into who is allowed, a bool or None for all, and what is added to a score."""
    allowed: Tensor | None = None
    shifts: list[Tensor] = []
    for entry in entries:
        allow = entry if entry.dtype == torch.bool else entry != -torch.inf
        allowed = allow if allowed is None else allowed & allow
        if entry.dtype != torch.bool:
            shifts.append(torch.where(allow, entry, 0.0))
    return allowed, shifts


def lay(scores: Tensor, allowed: Tensor | None, shifts: list[Tensor]) -> Tensor:
    """Lay combined masks over the scores they belong to; a forbidden score is -inf, whatever it was."""
    scores = sum((shift.to(scores.dtype) for shift in shifts), scores)
    return scores if allowed is None else torch.where(allowed, scores, -torch.inf)


def block(mask: Mask, rows: Tensor, first: int, last: int) -> Tensor:
    """Evaluate a mask for all queries of a block, ``rows`` (N, 1), against the keys from ``first`` up to ``last``."""
    if isinstance(mask, Tensor):
        return mask if mask.shape[-1] == 1 else mask[..., first:last]
    return _said(mask, rows, torch.arange(first, last, device=rows.device)[None, :])


def pairs(mask: Mask, rows: Tensor, index: Tensor) -> Tensor:
    """Evaluate a mask for each query of ``rows`` (N, 1) with its keys of ``index``, (..., N, K) or (..., 1, K)."""
    index = index.clamp(min=0)
    if not isinstance(mask, Tensor):
        return _said(mask, rows, index)
    if mask.shape[-1] == 1:
        return mask
    lead = torch.broadcast_shapes(mask.shape[:-1], index.shape[:-1])
    return mask.expand(*lead, -1).gather(-1, index.expand(*lead, -1))


def _said(rule: Entry, i: Tensor, j: Tensor) -> Tensor:
    """What a rule says of queries i and keys j; no more than it was asked."""
    entry = rule(i, j)
    if not isinstance(entry, Tensor) or not (entry.dtype == torch.bool or entry.is_floating_point()):
        came = entry.dtype if isinstance(entry, Tensor) else type(entry).__name__
        raise ValueError(f"a mask rule must return a bool or floating point tensor, got {came}")
    asked = torch.broadcast_shapes(i.shape, j.shape)
    if prod(entry.shape[:-2]) > max(1, prod(asked[:-2])):
        sizes = f"{tuple(asked)}, got {tuple(entry.shape)}"
        raise ValueError(f"a mask rule knows rows and keys only and must return {sizes}")
    return entry

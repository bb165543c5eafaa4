"""Who may be chosen? A mask forbids pairs of a query and a key, or shifts their scores.

A mask is a tensor with the meaning it has in ``F.scaled_dot_product_attention`` (True may be chosen; a float is added
and gets gradients; ``-inf`` forbids), or a rule ``(i, j) -> bool or float``. A rule is called with broadcasting integer
tensors, row numbers of queries and of keys, a block at a time: it never fills a whole N x M tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

Rule: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Mask: TypeAlias = Tensor | Rule


def causal(i: Tensor, j: Tensor) -> Tensor:
    """Let query i choose key j up to and including i, counted from the top left as torch does."""
    return j <= i


MASKS: dict[str, Rule] = {"causal": causal}


def combine(entries: Iterable[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """Combine evaluated masks into who is allowed, a bool, and what is added to a score; None where nothing is said."""
    allowed: Tensor | None = None
    shift: Tensor | None = None
    for entry in entries:
        allow = entry if entry.dtype == torch.bool else entry != -torch.inf
        allowed = allow if allowed is None else allowed & allow
        if entry.dtype != torch.bool:
            add = torch.where(allow, entry, 0.0)
            shift = add if shift is None else shift + add
    return allowed, shift


def lay(scores: Tensor, allowed: Tensor | None, shift: Tensor | None) -> Tensor:
    """Lay combined masks over the scores they belong to; a forbidden score is -inf, whatever it was."""
    scores = scores if shift is None else scores + shift.to(scores.dtype)
    return scores if allowed is None else torch.where(allowed, scores, -torch.inf)


def block(mask: Mask, rows: Tensor, first: int, last: int) -> Tensor:
    """Evaluate a mask for all queries of a block, ``rows`` (N, 1), against the keys from ``first`` up to ``last``."""
    if isinstance(mask, Tensor):
        return mask if mask.shape[-1] == 1 else mask[..., first:last]
    entry = mask(rows, torch.arange(first, last, device=rows.device)[None, :])
    if not isinstance(entry, Tensor) or not (entry.dtype == torch.bool or entry.is_floating_point()):
        came = entry.dtype if isinstance(entry, Tensor) else type(entry).__name__
        raise ValueError(f"a mask rule must return a bool or floating point tensor, got {came}")
    if prod(entry.shape[:-2]) != 1:
        sizes = f"({rows.shape[0]}, {last - first})"
        raise ValueError(f"a mask rule knows rows and keys only and must return {sizes}, got {tuple(entry.shape)}")
    return entry


def pairs(mask: Mask, rows: Tensor, index: Tensor) -> Tensor:
    """Evaluate a mask for the chosen pairs: each query of ``rows`` (N, 1) with its K keys of ``index`` (..., N, K)."""
    index = index.clamp(min=0)
    if not isinstance(mask, Tensor):
        return mask(rows, index)
    if mask.shape[-1] == 1:
        return mask
    lead = torch.broadcast_shapes(mask.shape[:-1], index.shape[:-1])
    return mask.expand(*lead, -1).gather(-1, index.expand(*lead, -1))

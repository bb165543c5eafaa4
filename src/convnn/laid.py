"""Laying masks over scores: evaluating them for a block or for chosen pairs, combining them, applying them."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor

from convnn.masks import Entry, Lookup, Mask


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


def _said(rule: Entry | Lookup, i: Tensor, j: Tensor) -> Tensor:
    """What a rule says of queries i and keys j; no more than it was asked."""
    entry = rule(i, j)
    if isinstance(rule, Lookup):
        return entry
    if not isinstance(entry, Tensor) or not (entry.dtype == torch.bool or entry.is_floating_point()):
        came = entry.dtype if isinstance(entry, Tensor) else type(entry).__name__
        raise ValueError(f"a mask rule must return a bool or floating point tensor, got {came}")
    asked = torch.broadcast_shapes(i.shape, j.shape)
    if prod(entry.shape[:-2]) > max(1, prod(asked[:-2])):
        sizes = f"{tuple(asked)}, got {tuple(entry.shape)}"
        raise ValueError(f"a mask rule knows rows and keys only and must return {sizes}")
    return entry

"""From free leading dimensions to the two the kernels know, and from masks to what is fused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from convnn import masks
from convnn.masks import Mask, Rule
from convnn.neighbors import together
from convnn.search import Search

# So many entries of a mask are evaluated at a time.
ENTRIES = 2**26
# As far as 32 bits count.
REACH = 2**31 - 1


def lead_of(search: Search) -> tuple[int, ...]:
    """The leading dimensions of a search."""
    tensors: list[Any] = [search.query, search.key, search.candidates, search.own]
    tensors += [getattr(mask, "table", mask) for mask in search.mask]
    shapes = [tensor.shape[:-2] for tensor in tensors if isinstance(tensor, Tensor)]
    return tuple(together(*shapes))


def reached(tensor: Tensor) -> Tensor:
    """Rows as kernels read them: channels side by side, and the last row within what 32 bits count."""
    *_, rows, channels = tensor.shape
    together = channels <= 1 or tensor.stride(-1) == 1
    return tensor if together and rows * tensor.stride(-2) <= REACH else tensor.contiguous()


def folded(tensor: Tensor, lead: Sequence[int]) -> Tensor:
    """Give a tensor ``(..., n, c)`` the leading dimensions ``lead``, and fold them into two: ``(B, H, n, c)``."""
    tensor = reached(tensor)
    if tensor.shape[:-2] != tuple(lead):
        tensor = tensor.expand(*lead, *tensor.shape[-2:])
    if len(lead) == 2:
        return tensor
    if len(lead) > 2:
        return tensor.flatten(0, len(lead) - 2)
    return tensor[(None,) * (2 - len(lead))]


def lead_folded(mask: Tensor, lead: Sequence[int]) -> Tensor:
    """Like ``folded``, but leave leading dimensions of 1 as they are where possible: ``(B or 1, H or 1, n, c)``."""
    if len(lead) > 2 and prod(mask.shape[:-2]) > 1:
        return folded(mask, lead)
    mask = mask.reshape(1, 1, *mask.shape[-2:]) if len(lead) > 2 else mask
    return mask[(None,) * (4 - mask.ndim)]


def unfolded(tensor: Tensor, lead: Sequence[int]) -> Tensor:
    """Take back what ``folded`` did to the leading dimensions."""
    return tensor.reshape(*lead, *tensor.shape[2:])


@dataclass(frozen=True)
class Fused:
    """What of the masks the kernels know themselves.

    Args:
        window: how far a key may be, or -1 for any distance.
        padding: which keys may be chosen by anybody, ``(..., 1, M)``.
        others: what is evaluated entry by entry.
    """

    causal: bool
    window: int
    padding: Tensor | None
    others: tuple[Mask, ...]


def fuse(search: Search) -> Fused:
    """Sort out the masks the kernels know."""
    causal, window, others = False, -1, []
    padding: Tensor | None = None
    for mask in _flat(search.mask):
        radius = _radius(mask)
        if mask is masks.causal:
            causal = True
        elif radius is not None:
            window = radius if window < 0 else min(window, radius)
        elif (
            isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape[-2] == 1 and search.candidates is None
        ):
            padding = mask if padding is None else padding & mask
        else:
            others.append(mask)
    return Fused(causal, window, padding, tuple(others))


def _flat(given: Sequence[Mask]) -> Iterator[Any]:
    for mask in given:
        entry = mask.entry if isinstance(mask, Rule) else None
        if isinstance(entry, partial) and entry.func is masks.both:
            yield from _flat([entry.keywords["one"], entry.keywords["other"]])
        else:
            yield mask


def _radius(mask: Mask) -> int | None:
    entry = mask.entry if isinstance(mask, Rule) else None
    return entry.keywords["radius"] if isinstance(entry, partial) and entry.func is masks.near else None


def blocks(search: Search, others: tuple[Mask, ...], lead: Sequence[int]) -> Iterator[tuple[int, int, Any, Any]]:
    """Evaluate masks block by block of rows: the first and last row, who may be chosen, and what is added.

    Where sizes must stay symbolic all rows are one block.
    """
    n, width = search.query.shape[-2], search.width
    if not others:
        yield 0, n, None, None
        return
    single = others[0]
    if len(others) == 1 and isinstance(single, Tensor) and single.dtype == torch.bool and search.candidates is None:
        yield 0, n, folded(single.expand(*single.shape[:-2], n, width), lead), None
        return
    whole = torch.compiler._is_exporting_flag
    step = n if whole else max(1, min(n, ENTRIES // max(1, prod(lead) * width)))
    for first in (0,) if whole else range(0, max(n, 1), step):
        last = n if whole else min(first + step, n)
        rows = slice(first, last)
        cut = tuple(m[..., rows, :] if isinstance(m, Tensor) and m.shape[-2] != 1 else m for m in others)
        allowed, shifts = replace(search, block=search.rows[rows], mask=cut).entries()
        shift = sum((each.detach().float() for each in shifts[1:]), shifts[0].detach().float()) if shifts else None
        yield first, last, _laid_out(allowed, last - first, width, lead), _laid_out(shift, last - first, width, lead)


def _laid_out(entry: Tensor | None, rows: int, width: int, lead: Sequence[int]) -> Tensor | None:
    return None if entry is None else folded(entry.expand(*entry.shape[:-2], rows, width), lead)


def says_bool(mask: Mask) -> bool:
    """Whether a mask only forbids."""
    return isinstance(mask, Rule) or (isinstance(mask, Tensor) and mask.dtype == torch.bool)


def not_below(shift: Tensor, least: float) -> Tensor:
    """Lift what is added to scores to the least number kernels take; its gradient is that of what was given."""
    finite = shift.masked_fill(shift == -torch.inf, least)
    return finite + torch.where(finite < least, least - finite, 0.0).detach()

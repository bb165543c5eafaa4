"""Kernels that mix channels of few candidates: every tap is applied to every candidate before rows are looked up.

That is fewer products by as much as there are fewer candidates than queries. And gradients of what was looked up need
no product for each slot of a key that very many have chosen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from convnn.backends.triton import given, mixed
from convnn.neighbors import take
from convnn.search import Search

# So many queries there must be for each candidate.
TIMES = 8


def takes(search: Search) -> bool:
    """Whether there are few candidates, in the slots behind one's own key."""
    behind = search.own is not None
    if search.candidates is None or (behind and search.order != "score") or torch.compiler._is_exporting_flag:
        return False
    return search.k > behind and search.query.shape[-2] >= TIMES * search.width


def combine(
    search: Search, value: Tensor, index: Tensor, weights: Tensor | None, kernel: Tensor, *lost: Tensor
) -> Tensor:
    """What ``mixed.combine`` gives."""
    if weights is None:
        weights = (index >= 0).float()
        if lost:
            by_row, by_key = lost
            weights = weights + (by_row[..., None] + take(by_key[..., None], index.long())[..., 0])
    behind = int(search.own is not None)
    among, places = _compact(search.candidates, value, index[..., behind:])
    output = _spread(among, places, weights[..., behind:], kernel[..., behind:])
    if behind:
        output = output + mixed.combine(value, index[..., :1], weights[..., :1], kernel[..., :1].contiguous())
    return output.to(value.dtype)


def _compact(candidates: Any, value: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """The values of the candidates ``(..., r, C)``, and which of them an index of keys means."""
    numbers = candidates[..., 0, :]  # they are sorted
    one = (numbers >= 0)[..., None].float()
    among = given.combine(value, numbers[..., None], one, None, atomic=False)
    if numbers.shape[:-1].numel() == 1:
        places = torch.searchsorted(numbers.flatten(), index.to(numbers.dtype).contiguous(), out_int32=True)
    else:
        sought = index.to(numbers.dtype).flatten(-2).contiguous()
        numbers = numbers.expand(*sought.shape[:-1], -1).contiguous()
        places = torch.searchsorted(numbers, sought, out_int32=True).unflatten(-1, index.shape[-2:])
    return among, torch.where(index < 0, -1, places)


def _spread(value: Tensor, index: Tensor, weights: Tensor, kernel: Tensor) -> Tensor:
    channels, k = kernel.shape[1:]
    groups = value.shape[-1] // channels
    # In float32: half types would round every slot.
    rows = value.float().unflatten(-1, (groups, channels)).transpose(-3, -2)  # (..., G, r, C/G)
    taps = kernel.float().unflatten(0, (groups, -1)).permute(0, 2, 3, 1).flatten(2)  # (G, C/G, K O/G)
    mixed_rows = (rows @ taps).unflatten(-1, (k, -1))  # (..., G, r, K, O/G)
    mixed_rows = mixed_rows.movedim(-4, -2).flatten(-2).flatten(-3, -2)  # (..., r K, O)
    slots = torch.arange(k, device=index.device, dtype=torch.int32)
    named = torch.where(index < 0, -1, index.int() * k + slots)
    return given.combine(mixed_rows, named, weights, None, atomic=False, distinct=True)

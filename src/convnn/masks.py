"""Who may be chosen? A mask forbids pairs of a query and a key, or shifts their scores.

A mask is a tensor with the meaning it has in ``F.scaled_dot_product_attention`` (True may be chosen; a float is added
and gets gradients; ``-inf`` forbids), or a rule ``(i, j) -> bool or float``. A rule is called with broadcasting integer
tensors, row numbers of queries and of keys, a block at a time: it never fills a whole N x M tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

Rule: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Mask: TypeAlias = Tensor | Rule


def causal(i: Tensor, j: Tensor) -> Tensor:
    """Let query i choose key j up to and including i, counted from the top left as torch does."""
    return j <= i


MASKS: dict[str, Rule] = {"causal": causal}


def lay(scores: Tensor, mask: Tensor) -> Tensor:
    """Lay evaluated mask entries over the scores they belong to."""
    if mask.dtype == torch.bool:
        return torch.where(mask, scores, -torch.inf)
    mask = mask.to(scores.dtype)
    # Where the mask forbids, the score must not matter: NaN - inf would still be NaN.
    return torch.where(mask == -torch.inf, -torch.inf, scores + mask)


def block(mask: Mask, rows: Tensor, first: int, last: int) -> Tensor:
    """Evaluate a mask for all queries of a block, ``rows`` (N, 1), against the keys from ``first`` up to ``last``."""
    if not isinstance(mask, Tensor):
        return mask(rows, torch.arange(first, last, device=rows.device)[None, :])
    return mask if mask.shape[-1] == 1 else mask[..., first:last]


def pairs(mask: Mask, rows: Tensor, index: Tensor) -> Tensor:
    """Evaluate a mask for the chosen pairs: each query of ``rows`` (N, 1) with its K keys of ``index`` (..., N, K)."""
    index = index.clamp(min=0)
    if not isinstance(mask, Tensor):
        return mask(rows, index)
    if mask.shape[-1] == 1:
        return mask
    lead = torch.broadcast_shapes(mask.shape[:-1], index.shape[:-1])
    return mask.expand(*lead, -1).gather(-1, index.expand(*lead, -1))

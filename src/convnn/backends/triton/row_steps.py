"""Run the small kernels that say something of rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from convnn.backends.triton.kernels.rows import add_to_rows, level_rows, own_first, unit_rows
from convnn.backends.triton.sizes import interpreted, over, padded


def added(by_row: Tensor, by_key: Tensor, index: Tensor) -> Tensor:
    """What a row brings and the key brings, over all slots of a row that are filled, ``(B, H, N)``."""
    total = torch.empty_like(by_row)
    n, k = index.shape[-2:]
    if total.numel():
        add_to_rows[(over(total.numel(), 256),)](
            by_row, by_key, index, total, total.numel(), n, by_key.shape[-1], KK=k, BM=256
        )
    return total


def with_own(own: Tensor, index: Tensor, into: Tensor) -> None:
    """Fill ``into`` with the slots of every row, its own key first."""
    if own.numel():
        own_first[(over(own.numel(), 256),)](own, index, into, own.numel(), KK=index.shape[-1], BM=256)


def unit(rows: Tensor, into: Tensor, lost: Tensor) -> None:
    """Fill ``into`` with the directions of the rows, and ``lost`` with 0, or NaN where a row has one."""
    _each(unit_rows, rows, into, lost)


def level(rows: Tensor, into: Tensor, factor: Tensor, lost: Tensor) -> None:
    """Fill ``into`` with rows of like size, ``factor`` with what makes directions of them, and ``lost`` as above."""
    _each(level_rows, rows, into, factor, lost)


def _each(kernel: Any, rows: Tensor, into: Tensor, *said: Tensor) -> None:
    count = said[0].numel()
    if rows.numel() == 0:
        for each in said:
            each.zero_()
        return
    flat = rows.flatten(0, -3) if rows.ndim > 2 else rows[None]
    flat = flat if flat.stride(-1) == 1 else flat.contiguous()
    channels = flat.shape[-1]
    per = 256 if interpreted() else max(1, 1024 // padded(channels))
    kernel[(over(count, per),)](
        *(flat, into, *said, count, flat.shape[1], *flat.stride()[:2]), E=channels, EP=padded(channels), BM=per
    )

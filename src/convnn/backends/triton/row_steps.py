"""Run the small kernels that say something of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from convnn.backends.triton.kernels.rows import add_to_rows, unit_rows
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


def unit(rows: Tensor, into: Tensor, lost: Tensor) -> None:
    """Fill ``into`` with the directions of the rows, and ``lost`` with 0, or NaN where a row has one."""
    if rows.numel() == 0:
        lost.zero_()
        return
    flat = rows.flatten(0, -3) if rows.ndim > 2 else rows[None]
    flat = flat if flat.stride(-1) == 1 else flat.contiguous()
    channels = flat.shape[-1]
    per = 256 if interpreted() else max(1, 1024 // padded(channels))
    unit_rows[(over(lost.numel(), per),)](
        *(flat, into, lost, lost.numel(), flat.shape[1], *flat.stride()[:2]), E=channels, EP=padded(channels), BM=per
    )

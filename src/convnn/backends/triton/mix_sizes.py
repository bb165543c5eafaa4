"""Tiles of the kernels that mix channels, as measured on an H200."""

from __future__ import annotations

import torch
from torch import Tensor

from convnn.backends.triton.sizes import interpreted, over, padded, precision

# Fewer tiles than this leave too many multiprocessors idle.
FEW = 100


def mix_tile(rows: int, outputs: int, groups: int, channels: int, value: Tensor) -> dict[str, int] | None:
    """Of the product of gathered rows with a kernel: rows, outputs and channels; None where torch's own is better."""
    half = value.dtype != torch.float32
    if not half and precision(value) != "tf32":
        return None
    wide, deep = min(128, padded(outputs)), min(64 if half else 32, padded(channels))
    others = over(outputs, wide) * groups
    if over(rows, 64) * others < FEW and not interpreted():
        return None
    tile = {"BN": wide, "BC": deep}
    if over(rows, 128) * others < FEW:
        return {"BM": 64, **tile, "num_warps": 4, "num_stages": 4}
    return {"BM": 128, **tile, "num_warps": 8 if wide > 32 else 4, "num_stages": 3}


def taps_tile(outputs: int, channels: int, value: Tensor) -> dict[str, int] | None:
    """Of the gradient of such a kernel: rows, outputs and channels; None where torch's products are better."""
    if value.dtype == torch.float32:
        return None
    return {
        "BM": 64,
        "BN": min(64, padded(outputs)),
        "BC": min(64, padded(channels)),
        "num_warps": 4,
        "num_stages": 3,
    }


def take_tile(channels: int) -> tuple[int, int, int]:
    """Of laying out slots: slots and channels of a program, and warps."""
    wide = min(256, padded(channels))
    return (256 if interpreted() else 4096 // wide), wide, 4


def sum_tile(channels: int, value: Tensor) -> tuple[int, int, int, int]:
    """Of adding up slots by key: keys, slots at a time and channels of a program, and warps."""
    wide = min(64, padded(channels))
    return (64, 4, wide, 1) if interpreted() else (512 // wide // value.element_size(), 8, wide, 1)

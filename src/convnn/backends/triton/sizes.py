"""Sizes of tiles and grids, and what kernels are told of tensors."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

# Up to so many keys a row of scores is held as a whole; up to so many neighbours a stream is certified.
WHOLE, STREAMED = 256, 128
# The number of a tile takes low bits of a score: up to so many tiles, no more than half types can tell apart.
TILES = 256
# From so many channels on, a tile of scores is summed in pieces; single precision in smaller ones, which fit registers.
PIECE, SINGLE_PIECE = 128, 16
# So many numbers, all slots of a row, are held by a program of the backward pass.
HELD = 1024
# A key chosen more often than this has its slots sorted in memory.
LONG = 64

Strides = tuple[int, ...]


# Rows and warps of a program, as measured on an H200.


def whole_tile(k: int, *, plain: bool) -> tuple[int, int]:
    """Of a search over whole rows."""
    if plain:
        return 32, 8
    return (64, 4) if k <= 12 else (16, 1)


def pieces(width: int) -> tuple[int, int, int]:
    """Columns as a sum of at most three powers of two."""
    left = -(-width // 16) * 16
    if bin(left).count("1") > 3:
        left = padded(left)
    powers = [1 << bit for bit in reversed(range(4, 9)) if left >> bit & 1]
    return (*powers, 0, 0, 0)[:3]  # type: ignore[return-value]


def stream_tile(width: int, k: int, plain: bool) -> tuple[int, int, int, int, int]:
    """Of a stream: rows, bins, how many of each, warps and stages."""
    if plain:
        return (32, 64, 3, 4, 2) if k <= 20 else (32, 128, 4, 8, 2)
    if k <= 12 and width <= 4096:
        return 64, 32, 3, 4, 3
    return (64, 64, 3, 4, 3) if k <= 20 and width <= 64 * TILES else (64, 128, 4, 8, 3)


def combine_tile(channels: int) -> tuple[int, int]:
    """Of the aggregation."""
    return (64 if interpreted() else max(1, min(8, 512 // channels))), 1


def query_tile(channels: int) -> tuple[int, int, int]:
    """Of the backward pass by query, and how many tiles a program takes: one warp needs no barriers."""
    return max(1, min(4, 256 // channels)), 1, 4


def row_tile(n: int) -> tuple[int, int]:
    """Of the backward pass by row, where all slots of a row are held at once: rows of a program, and warps."""
    return triton.cdiv(n, triton.cdiv(n, 25)), 1


def key_tile(channels: int) -> tuple[int, int]:
    """Of the backward pass by key."""
    return (32 if interpreted() else max(1, min(4, 256 // channels))), 1


def interpreted() -> bool:
    """Whether Triton interprets its kernels on the CPU."""
    return bool(triton.knobs.runtime.interpret)


def padded(size: int, least: int = 16) -> int:
    """The next power of two."""
    return max(least, triton.next_power_of_2(size))


def of(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """A pointer must be passed also where nobody follows it."""
    return stand_in if tensor is None else tensor


def strides(tensor: Tensor | None, count: int) -> Strides:
    """The first strides of a tensor, or 0."""
    return (0,) * count if tensor is None else tensor.stride()[:count]


def precision(tensor: Tensor) -> str:
    """What torch is told about matrix products of float32."""
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if tensor.dtype == torch.float32 and tf32 else "ieee"


def sizes_of(channels: int, values: int, k: int) -> dict[str, int]:
    """Channels of queries and values, as they are and padded, and slots."""
    return {"E": channels, "EP": padded(channels), "C": values, "CP": padded(values), "KK": k}


def has(kernel: Tensor | None, optional: dict[str, Tensor | None]) -> dict[str, bool]:
    """What is there and what is not."""
    names = {"HAS_S": "shift", "HAS_BETA": "beta", "HAS_OWN": "own", "DROPOUT": "seed"}
    return {"HAS_W": kernel is not None, **{flag: optional[name] is not None for flag, name in names.items()}}

"""Sizes of tiles and grids, and what kernels are told of tensors."""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor

# Up to so many keys a row of scores is held as a whole; up to so many neighbours a stream is certified.
WHOLE, STREAMED = 256, 128
# The number of a tile takes low bits of a score: up to so many tiles, no more than half types can tell apart.
TILES = 256
# From so many channels on, a tile of scores is summed in pieces; single precision in smaller ones, which fit registers.
PIECE, SINGLE_PIECE = 128, 16
# Up to so many bytes, all slots of a row are held in the backward pass.
HELD = 4096
# Up to so many slots of an entry are put in order by one program.
INVERTED = 16_384
# A key chosen more often than SHORT has its slots sorted in memory; more often than LONG, they are searched for.
SHORT, LONG = 64, 1024
# Fewer programs than this leave a device idle, unless their keys are cut into parts, no smaller than PART; all that the
# parts bring is MERGED by one program.
PROGRAMS, PART, MERGED = 264, 4096, 16_384

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


# So many bytes are left to numbers that change places between threads; since Hopper a stream of wide bins needs more.
SPARE, SORTED = 1024, 4096
# More pieces than MANY take a compiler minutes, unless they are short of LARGE together. A single warp has no registers
# for what it would read ahead of SEVERAL pieces of WIDE rows, and four warps before Hopper none for more than FEW.
MANY, LARGE, SEVERAL, WIDE, FEW = 32, 4096, 2, 64, 4


@cache
def room(device: int) -> int:
    """Bytes of shared memory that a program may have."""
    return triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"]


@cache
def capability(device: int) -> tuple[int, int]:
    """Of compute, which names a generation of devices."""
    return torch.cuda.get_device_capability(device)


def hopper(tensor: Tensor) -> bool:
    """Whether a device is of Hopper's generation or a later one; matrix units of those read all from shared memory."""
    return interpreted() or capability(tensor.device.index) >= (9, 0)


def ahead(tensor: Tensor, stages: int) -> int:
    """How many tiles of a loop have a place in shared memory at once."""
    return stages if hopper(tensor) else stages - 1


def rolled(tensor: Tensor, held: int, count: int = 1, width: int = 1, warps: int = 4, more: int = SPARE) -> bool:
    """Whether channels are taken piece by piece, as so many numbers at once do not fit or pieces are too many.

    Args:
        count: pieces.
        width: columns of a piece.
        more: bytes beside the numbers.
    """
    if interpreted():
        return False
    several = count > SEVERAL and width > WIDE if warps == 1 else count > MANY and count * width >= LARGE
    return several or held * tensor.itemsize + more > room(tensor.device.index)


def parts_of(entries: int, n: int, width: int, k: int, plain: bool) -> int:
    """Into how many parts keys are cut: so that tiles can be numbered, and so that the device is filled."""
    if k > STREAMED:
        return 1
    least = 1 if plain else over(width, TILES * (64 if k <= 20 else 128))
    parts = max(least, min(over(PROGRAMS, max(1, entries * over(n, 64))), width // PART))
    parts = min(parts, MERGED // padded(k))
    return max(1, parts if parts >= least else 1)


def merge_tile(columns: int) -> tuple[int, int, int]:
    """Of what merges lists: columns, rows and warps."""
    columns = padded(columns)
    return columns, max(1, (32 * 64 if interpreted() else 1024) // columns), max(1, min(8, columns // 512))


Registers = dict[str, int]


def at_most(registers: int) -> Registers:
    """A bound on the registers of a thread, so that more programs run at a time."""
    return {} if interpreted() else {"maxnreg": registers}


def combine_tile(channels: int, k: int) -> tuple[int, int, int, int, Registers]:
    """Of the aggregation: rows, slots at a time, slots left over at the end, padded, warps and registers."""
    rows = 32 if interpreted() else max(1, min(16, 512 // channels))
    slots = max(1, min(8, 4096 // (rows * channels), 1 << (k.bit_length() - 1)))
    return rows, slots, padded(k % slots, 1) if k % slots else 0, 1, at_most(128)


def scatter_tile(channels: int) -> tuple[int, int]:
    """Of the backward pass that adds up in no fixed order: rows and warps."""
    return (64 if interpreted() else max(1, min(8, 512 // channels))), 1


def query_tile(channels: int) -> tuple[int, int, int]:
    """Of the backward pass by query, and how many tiles a program takes: one warp needs no barriers."""
    return max(1, min(4, 256 // channels)), 1, 4


def row_tile(channels: int, k: int) -> tuple[int, int, int, Registers]:
    """Of the backward pass by row: rows of a tile, tiles of a program, warps and registers."""
    rows = 32 if interpreted() else max(1, min(8, 256 // channels))
    held = k * channels
    if held <= 640:
        return rows, 2, 1, at_most(128)
    return (max(1, rows // 2), 2, 1, at_most(128)) if held <= 1024 else (rows, 4, 1, {})


def slot_tile(entries: int, n: int, k: int, channels: int) -> tuple[int, int, int, int, int]:
    """Of the kernel's gradient: rows of a tile, tiles of a program, slots, slots at the end, padded, and warps."""
    rows = 32 if interpreted() else max(1, min(8, 256 // channels))
    slots = max(1, min(8, 2048 // (rows * channels), 1 << (k.bit_length() - 1)))
    # Enough programs to fill the device, and few sums to be added up.
    some = over(4096, entries * over(k, slots))
    return rows, over(over(n, rows), some), slots, padded(k % slots, 1) if k % slots else 0, 1


def invert_tile(slots: int) -> tuple[int, int]:
    """Of what puts the slots of an entry in order by bits: slots of a program, and warps, of which it may have 32."""
    block = padded(slots, 128)
    return block, 16 if block > 2048 else max(1, block // 64)


def slot_pieces(k: int) -> tuple[int, int, int]:
    """Slots as a sum of at most three powers of two."""
    left = k
    while bin(left).count("1") > 3:
        left += left & -left
    powers = [1 << bit for bit in reversed(range(left.bit_length())) if left >> bit & 1]
    return (*powers, 0, 0, 0)[:3]  # type: ignore[return-value]


def key_tile(channels: int) -> tuple[int, int, int, Registers]:
    """Of the backward pass by key: keys, slots at a time, warps and registers."""
    keys = 32 if interpreted() else max(1, min(8, 256 // channels))
    return keys, max(1, min(4, 1024 // (keys * channels))), 1, at_most(96)


def interpreted() -> bool:
    """Whether Triton interprets its kernels on the CPU."""
    return bool(triton.knobs.runtime.interpret)


def over(size: int, by: int) -> int:
    """How many of a size it takes; Triton's own is slow to call."""
    return -(-size // by)


def padded(size: int, least: int = 16) -> int:
    """The next power of two."""
    return max(least, 1 << (size - 1).bit_length())


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

"""Run the kernels for few keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from convnn.backends.triton.kernels.by_slot import add_parts
from convnn.backends.triton.kernels.few import attend_few
from convnn.backends.triton.kernels.few_backward import attend_few_backward
from convnn.backends.triton.kernels.few_keys import add_few
from convnn.backends.triton.sizes import (
    SINGLE_PIECE,
    hopper,
    interpreted,
    of,
    over,
    padded,
    precision,
    sizes_of,
    strides,
)

# So many programs keep a device busy.
BUSY = 264
# Up to so many bytes of keys or values, programs fit three times on a multiprocessor.
HELD = 4096


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Tensor | None,
    optional: dict[str, Tensor | None],
    into: tuple[Tensor, Tensor, Tensor],
    numbers: tuple[float, float],
    choices: dict[str, Any],
) -> None:
    """Fill the output, the places and the sums of weights."""
    batch, heads, n, _ = query.shape
    width = _width(key, optional)
    common = _common(query, value, kernel, optional, width)
    rows, warps, most = forward_tile(_held(query, value, common))
    attend_few[(over(n, rows), batch * heads)](
        *(query, key, value, of(kernel, query), *(of(optional[name], query) for name in optional), *into),
        *(n, width, heads, *numbers),
        *strides(query, 3),
        *strides(key, 3),
        *strides(value, 3),
        *strides(optional["B"], 2),
        *strides(optional["CAND"], 2),
        *strides(optional["MASK"], 3),
        *strides(optional["SHIFT"], 3),
        **common,
        **choices,
        HAS_B=optional["B"] is not None,
        HAS_MASK=optional["MASK"] is not None,
        PLAIN=query.dtype == torch.float32,
        FAST=is_fast(value),
        BM=rows,
        num_warps=warps,
        maxnreg=most,
    )


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Tensor | None,
    optional: dict[str, Tensor | None],
    kept: tuple[Tensor, Tensor, Tensor],
    into: tuple[Tensor, ...],
    numbers: tuple[float, float],
    choices: dict[str, int],
) -> None:
    """Fill all gradients from what the forward pass kept, and the gradient of its output."""
    batch, heads, n, _ = query.shape
    width = _width(key, optional)
    common = _common(query, value, kernel, optional, width)
    rows, warps, most = backward_tile(_held(query, value, common))
    tiles, entries = over(n, rows), batch * heads
    per = over(tiles, min(tiles, over(BUSY, entries)))
    splits = over(tiles, per)
    _, keys, values, taps, shifts, betas = into
    ends = [keys, values]
    if splits > 1:
        ends = [_parts(t, (entries, splits, common["R"], t.shape[-1])) for t in ends]
    shares = _parts(taps, (entries * splits, *taps.shape))
    attend_few_backward[(splits, entries)](
        *(query, key, value, of(kernel, query), *(of(optional[name], query) for name in optional), *kept),
        *(into[0], *ends, shares, shifts, betas),
        *(n, key.shape[-2], width, heads, per, *numbers),
        *strides(query, 3),
        *strides(key, 3),
        *strides(value, 3),
        *strides(optional["CAND"], 2),
        *strides(optional["SHIFT"], 3),
        *strides(kept[2], 3),
        **common,
        **choices,
        KP=padded(choices["KK"]),
        PARTS=splits > 1,
        BM=rows,
        num_warps=warps,
        maxnreg=most,
    )
    if splits > 1:
        for parts, total in zip(ends, (keys, values), strict=True):
            _add(parts, total, optional["CAND"], width)
    if kernel is not None:
        add_parts[(over(taps.numel(), 32), 1)](shares, taps, entries * splits, taps.numel(), 0, BLOCK=32, ROWS=128)


def _add(parts: Tensor, total: Tensor, candidates: Tensor | None, width: int) -> None:
    if total.numel() == 0:
        return
    entries, splits, held, channels = parts.shape
    if candidates is not None:
        total.zero_()
    block = min(16, padded(channels))
    add_few[(over(channels, block), entries)](
        *(parts, of(candidates, parts), total, splits, total.shape[-2], width, total.shape[1]),
        *strides(candidates, 2),
        C=channels,
        BC=block,
        R=held,
        HAS_CAND=candidates is not None,
    )


def _parts(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    return like.new_empty(shape if like.numel() else (0,), dtype=torch.float32)


def _width(key: Tensor, optional: dict[str, Tensor | None]) -> int:
    candidates = optional["CAND"]
    return key.shape[-2] if candidates is None else candidates.shape[-1]


def _common(
    query: Tensor,
    value: Tensor,
    kernel: Tensor | None,
    optional: dict[str, Tensor | None],
    width: int,
) -> dict[str, Any]:
    sizes = sizes_of(query.shape[-1], value.shape[-1], 0)
    del sizes["KK"]
    single = query.dtype == torch.float32
    return {
        **sizes,
        "BE": min(sizes["EP"], SINGLE_PIECE) if single else sizes["EP"],
        "R": padded(width),
        "HAS_W": kernel is not None,
        "HAS_CAND": optional["CAND"] is not None,
        "HAS_SHIFT": optional["SHIFT"] is not None,
        "HAS_BETA": optional["BETA"] is not None,
        "INTERPRETED": interpreted(),
        "PRECISION": precision(query),
    }


def _held(query: Tensor, value: Tensor, common: dict[str, Any]) -> int:
    return common["R"] * max(common["EP"] * query.element_size(), common["CP"] * value.element_size())


def is_fast(value: Tensor) -> bool:
    """Whether the device compares and multiplies two numbers of half types at once."""
    halves = value.dtype != torch.float32
    return halves and value.is_cuda and not interpreted() and hopper(value)


# Rows and warps of a program, and the most registers of a thread, as measured on an H200.


def forward_tile(held: int) -> tuple[int, int, int | None]:
    """Rows, warps and registers of the forward pass.

    One warp: as fast as four, and the assembler of Triton 3.6 reads a register nobody wrote where four multiply by few
    channels.
    """
    return 16, 1, 168 if held <= HELD else None


def backward_tile(held: int) -> tuple[int, int, int | None]:
    """Of the backward pass."""
    return (64, 4, 168) if held <= HELD else (64, 8, None)

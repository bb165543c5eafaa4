"""Run what mixes channels, backwards: gradients whose sums have one order."""

from __future__ import annotations

import torch
from torch import Tensor

from convnn.backends.triton import mix_steps
from convnn.backends.triton.backward import inverse
from convnn.backends.triton.kernels.mix_backward import mix_taps, order_short, sum_by_key
from convnn.backends.triton.mix_sizes import sum_tile, taps_tile
from convnn.backends.triton.mix_steps import Mix, Piece, pieces, product, take, taps_of
from convnn.backends.triton.sizes import SHORT, interpreted, of, over, precision


def backward(mix: Mix, gradient: Tensor, into: dict[str, Tensor]) -> None:
    """Fill the gradients that are asked for: of the value, the weights and the kernel."""
    if mix.index.numel() == 0 or mix.value.numel() == 0:
        for tensor in into.values():
            tensor.zero_()
        return
    gradient = gradient.contiguous()
    listed = edges_of(mix.index, mix.value.shape[2], distinct=mix.distinct) if "value" in into else None
    tile = taps_tile(mix.outputs, mix.kernel.shape[1], mix.value) if "kernel" in into else None
    if tile is not None:
        _mix_taps(mix, gradient, tile, into["kernel"])
    laid = "kernel" in into and tile is None
    if laid or "value" in into or "weights" in into:
        for piece in pieces(mix, mix_steps.BUDGET):
            _piece_backward(mix, piece, gradient, into, listed, laid=laid)


def _piece_backward(
    mix: Mix,
    piece: Piece,
    gradient: Tensor,
    into: dict[str, Tensor],
    listed: tuple[Tensor, Tensor] | None,
    *,
    laid: bool,
) -> None:
    rows = gradient.view(mix.entries, -1, mix.groups, mix.outputs)[piece.first : piece.last]
    pulled = rows.flatten(0, 1).transpose(0, 1)  # (G, rows, O)
    spread = product(pulled, taps_of(mix, piece)) if "value" in into or "weights" in into else None
    if listed is not None and spread is not None:
        _sum_by_key(mix, piece, spread, listed, into["value"])
    taken = take(mix, piece, spread, into.get("weights"), takes=laid)
    if laid:
        part = product(pulled.mT, taken, whole=True).unflatten(-1, (-1, piece.width)).mT
        taps = into["kernel"].view(mix.groups, mix.outputs, -1, mix.index.shape[3])
        here = taps[:, :, piece.channel : piece.until]
        here.copy_(part if piece.first == 0 else here + part)


def _mix_taps(mix: Mix, gradient: Tensor, tile: dict[str, int], into: Tensor) -> None:
    """The gradient of the kernel in one go: sums over some rows each, and their sum in a fixed order."""
    rows, (outputs, channels, k) = gradient.shape[:-1].numel(), mix.kernel.shape
    count = k * over(mix.outputs, tile["BN"]) * over(channels, tile["BC"])
    splits = max(1, min(over(rows, tile["BM"]), 2 if interpreted() else 528 // (count * mix.groups)))
    per = over(over(rows, splits), tile["BM"]) * tile["BM"]
    splits = over(rows, per)
    parts = gradient.new_empty((splits, outputs, k, channels), dtype=torch.float32)
    mix_taps[(count, splits, mix.groups)](
        *(mix.value, mix.index, of(mix.weights, mix.value), gradient, parts),
        *(rows, per, mix.index.shape[2], mix.index.shape[1], *mix.value.stride()[:3]),
        **mix.sizes,
        **tile,
        O=mix.outputs,
        KK=k,
        WEIGHTED=mix.weights is not None,
        PRECISION=precision(mix.value),
        INTERPRETED=interpreted(),
    )
    torch.sum(parts.mT, 0, out=into)


def _sum_by_key(mix: Mix, piece: Piece, spread: Tensor, listed: tuple[Tensor, Tensor], into: Tensor) -> None:
    keys = (piece.last - piece.first) * into.shape[2]
    group, per, channels, warps = sum_tile(mix.groups * piece.width, into)
    sum_by_key[(over(keys, group), over(mix.groups * piece.width, channels))](
        *(spread, of(mix.weights, spread), *listed, into),
        *(keys, piece.first * into.shape[2], piece.first * mix.edges, into.shape[2], mix.edges, piece.channel),
        **mix.sizes,
        CN=piece.width,
        BJ=group,
        BE=per,
        BC=channels,
        WEIGHTED=mix.weights is not None,
        num_warps=warps,
    )


def edges_of(index: Tensor, keys: int, *, distinct: bool = False) -> tuple[Tensor, Tensor]:
    """Up to where the slots of each key reach, and the slots of every entry by key and in order.

    Shape:
        ``(B H, M)`` and ``(B H, N K)``, int32; slots are numbered i K + k.
    """
    until, edges, ordered = inverse(index, keys, distinct=distinct)
    if edges is ordered:
        return until, ordered
    entries, slots = edges.shape
    order_short[(over(slots, 128), entries)](
        index, until, edges, ordered, keys, slots, SHORT=SHORT, BLOCK=128, num_warps=4
    )
    return until, ordered

"""Run the kernels of the forward half."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from convnn.backends.triton.kernels.combine import combine
from convnn.backends.triton.kernels.exact import select_exact
from convnn.backends.triton.kernels.repair import repair
from convnn.backends.triton.kernels.stream import select_stream
from convnn.backends.triton.kernels.whole import select_whole
from convnn.backends.triton.sizes import (
    PIECE,
    SINGLE_PIECE,
    STREAMED,
    TILES,
    WHOLE,
    combine_tile,
    has,
    interpreted,
    of,
    over,
    padded,
    pieces,
    precision,
    sizes_of,
    stream_tile,
    strides,
    whole_tile,
)


def select(
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    candidates: Tensor | None,
    mask: Tensor | None,
    shift: Tensor | None,
    own: Tensor | None,
    index: Tensor,
    scores: Tensor,
    *,
    row0: int,
    causal: bool,
    window: int,
    difference: bool,
) -> None:
    """Fill ``index`` with the best keys of every row, and ``scores`` with what they were ranked by."""
    batch, heads, n, channels = query.shape
    width = key.shape[-2] if candidates is None else candidates.shape[-1]
    k = index.shape[-1]
    if query.numel() == 0 or index.numel() == 0:
        return
    whole = padded(channels)
    # What matrix units may round is compared without its last digits, as half types are.
    exact = query.dtype == torch.float32 and (difference or precision(query) == "ieee")
    given: list[Any] = [query, key, *(of(t, query) for t in (bias, candidates, mask, shift, own)), index, scores]
    steps = (
        *strides(query, 3),
        *strides(key, 3),
        *strides(bias, 2),
        *strides(candidates, 2),
        *strides(mask, 3),
        *strides(shift, 3),
        *strides(own, 2),
        *strides(index, 2),
    )
    sizes = (n, width, heads, row0)
    choices: dict[str, Any] = {
        "E": channels,
        "EP": whole,
        "BE": min(whole, SINGLE_PIECE if exact else PIECE * 2 // query.itemsize),
        "KK": k,
        "HAS_B": bias is not None,
        "HAS_CAND": candidates is not None,
        "HAS_MASK": mask is not None,
        "HAS_SHIFT": shift is not None,
        "HAS_OWN": own is not None,
        "CAUSAL": causal,
        "WINDOW": window,
        "DIFFERENCE": difference,
        "INTERPRETED": interpreted(),
        "PRECISION": precision(query),
    }
    if width <= WHOLE:
        rows, warps = whole_tile(k, plain=exact)
        n1, n2, n3 = pieces(width)
        select_whole[(over(n, rows), batch * heads)](
            *given,
            *sizes,
            *steps,
            **choices,
            BM=rows,
            N1=n1,
            N2=n2,
            N3=n3,
            PLAIN=exact,
            num_warps=warps,
        )
        return
    # Single precision is compared bit by bit, and so is what has too many tiles.
    plain = exact or width > 128 * TILES
    rows, group, depth, warps, stages = stream_tile(width, k, plain)
    tiles = over(n, rows)
    scratch = [index] * 3
    if k <= STREAMED:
        deep = over(width, group)
        # The number of a tile takes the low bits of a score.
        bits = max(1, (deep - 1).bit_length())
        flagged = query.new_empty((batch * heads * tiles, rows), dtype=torch.int32)
        scratch = [flagged, *(flagged.new_empty(batch * heads * tiles) for _ in range(2))]
        shared: dict[str, Any] = {"BM": rows, "G": group, "T": depth, "BITS": bits, "PLAIN": plain, **choices}
        select_stream[(tiles, batch * heads)](
            *given, *scratch, *sizes, *steps, **shared, STAGES=stages, num_warps=warps
        )
        repair[(min(n, 2 if interpreted() else max(8, 4096 // (batch * heads))), batch * heads)](
            *given,
            *scratch,
            *sizes,
            *steps,
            tiles,
            **shared,
            KP=padded(k),
            TP=padded(tiles),
            DEPTH=padded(deep),
            CHUNK=min(whole, max(16, 2048 // padded(deep))),
            num_warps=1 if deep <= 256 else 4,
        )
    programs = over(n, 16) if k > STREAMED else min(over(n, 16), 1 if interpreted() else max(1, 512 // (batch * heads)))
    select_exact[(programs, batch * heads)](
        *given,
        *scratch,
        *sizes,
        *steps,
        tiles,
        **choices,
        KP=padded(k),
        BR=16,
        G=64,
        TP=padded(tiles),
        ALL=k > STREAMED,
        num_warps=4,
    )


def combine_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Tensor | None,
    index: Tensor,
    optional: dict[str, Tensor | None],
    output: Tensor,
    lse: Tensor,
    numbers: tuple[float, float, float],
    choices: dict[str, Any],
) -> None:
    """Fill ``output``, and ``lse`` where weights are a softmax."""
    batch, heads, n, channels = query.shape
    if output.numel() == 0:
        return
    sizes = sizes_of(channels, value.shape[-1], index.shape[-1])
    rows, slots, rest, warps, registers = combine_tile(max(sizes["EP"], sizes["CP"]), index.shape[-1])
    names = ("shift", "given", "beta", "seed", "own")
    combine[(over(n, rows), batch * heads)](
        *(query, key, value, of(kernel, query), index),
        *(of(optional[name], query) for name in names),
        *(output, lse, n, heads, *numbers),
        *strides(query, 3),
        *strides(key, 3),
        *strides(value, 3),
        *strides(output, 3),
        *strides(index, 2),
        **sizes,
        **choices,
        **has(kernel, optional),
        BM=rows,
        BS=slots,
        REST=rest,
        num_warps=warps,
        **registers,
    )

"""Run the kernels of the forward half."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from convnn.backends.triton import split
from convnn.backends.triton.compiled import Launch, run
from convnn.backends.triton.kernels.combine import combine
from convnn.backends.triton.kernels.exact import select_exact
from convnn.backends.triton.kernels.repair import repair
from convnn.backends.triton.kernels.stream import select_stream
from convnn.backends.triton.kernels.whole import select_whole
from convnn.backends.triton.sizes import (
    FEW,
    PIECE,
    SINGLE_PIECE,
    SORTED,
    SPARE,
    STREAMED,
    TILES,
    WHOLE,
    ahead,
    combine_tile,
    has,
    hopper,
    interpreted,
    of,
    over,
    padded,
    parts_of,
    pieces,
    precision,
    rolled,
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
    **told: Any,
) -> None:
    """Fill ``index`` with the best keys of every row, and ``scores`` with what they were ranked by.

    Args:
        told: ``row0``, ``causal``, ``window``, ``difference`` and ``scales`` as ``ops.select`` has them.
    """
    if query.numel() == 0 or index.numel() == 0:
        return
    given = {"query": query, "key": key, "bias": bias, "candidates": candidates, "mask": mask, "shift": shift}
    given["own"] = own
    entries, n, width, k = query.shape[0] * query.shape[1], query.shape[2], key.shape[-2], index.shape[-1]
    parts = parts_of(entries, n, width, k, _is_exact(query, told["difference"])) if candidates is None else 1
    if parts > 1:
        split.select(_whole, parts, given, index, scores, **told)
    else:
        _whole(given, index, scores, **told)


def _is_exact(query: Tensor, difference: bool) -> bool:
    """What matrix units may round is compared without its last digits, as half types are."""
    return query.dtype == torch.float32 and (difference or precision(query) == "ieee")


def _whole(
    tensors: dict[str, Any],
    index: Tensor,
    scores: Tensor,
    *,
    row0: int,
    causal: bool,
    window: int,
    difference: bool,
    scales: int,
) -> None:
    """All keys of a row in one program."""
    query, key, bias, candidates, mask, shift, own = tensors.values()
    batch, heads, n, channels = query.shape
    width = key.shape[-2] if candidates is None else candidates.shape[-1]
    k = index.shape[-1]
    whole = padded(channels)
    exact = _is_exact(query, difference)
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
        "HAS_B": 0 if bias is None else 1 + scales,
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
        count = whole // choices["BE"]
        # Before Hopper queries pass by in registers, which have room for few pieces. Without matrix units a piece of
        # the keys changes its place once more.
        queries = whole if exact or hopper(query) or count > FEW else choices["BE"]
        held = rows * queries + (1 + exact) * n1 * choices["BE"]
        select_whole[(over(n, rows), batch * heads)](
            *given,
            *sizes,
            *steps,
            **choices,
            BM=rows,
            N1=n1,
            N2=n2,
            N3=n3,
            ROLLED=rolled(query, held, count, width, warps),
            PLAIN=exact,
            num_warps=warps,
        )
        return
    run(_stream(given, index, (*sizes, *steps), choices, exact=exact))


def _stream(
    given: list[Any], index: Tensor, numbers: tuple[int, ...], choices: dict[str, Any], *, exact: bool
) -> list[Launch]:
    """What goes through any number of keys."""
    (batch, heads, n, k), width = index.shape, numbers[1]
    query, entries, count = given[0], batch * heads, choices["EP"] // choices["BE"]
    # Scores of single precision are compared bit by bit, and all where a tile's number has no room in them.
    plain = exact or width > 128 * TILES
    rows, group, depth, warps, stages = stream_tile(width, k, plain)
    tiles = over(n, rows)
    scratch, launches = [index] * 3, []
    if k <= STREAMED:
        deep = over(width, group)
        # The number of a tile takes the low bits of a score.
        bits = max(1, (deep - 1).bit_length())
        flagged = index.new_empty((entries * tiles, rows), dtype=torch.int32)
        scratch = [flagged, *(flagged.new_empty(entries * tiles) for _ in range(2))]
        shared: dict[str, Any] = {"BM": rows, "G": group, "T": depth, "BITS": bits, "PLAIN": plain, **choices}
        # Without matrix units nothing is read ahead of its turn.
        held = (rows + (1 if exact else ahead(query, stages)) * group) * choices["EP"]
        more = SORTED if hopper(query) and group > 64 and not exact else SPARE
        alone = count > 1 and rolled(query, held, count, group, more=more)
        how = {"ROLLED": alone, "STAGES": 1 if alone else stages, "num_warps": warps}
        launches.append(Launch(select_stream, (tiles, entries), [*given, *scratch, *numbers], {**shared, **how}))
        again = {
            "KP": padded(k),
            "TP": padded(tiles),
            "DEPTH": padded(deep),
            "CHUNK": min(choices["EP"], max(16, 2048 // padded(deep))),
            "num_warps": 1 if deep <= 256 else 4,
        }
        grid = (min(n, 2 if interpreted() else max(8, 4096 // entries)), entries)
        launches.append(Launch(repair, grid, [*given, *scratch, *numbers, tiles], {**shared, **again}))
    programs = over(n, 16) if k > STREAMED else min(over(n, 16), 1 if interpreted() else max(1, 512 // entries))
    lists = {"KP": padded(k), "BR": 16, "G": 64, "TP": padded(tiles), "ALL": k > STREAMED, "num_warps": 4}
    lists["ROLLED"] = count > 1 and rolled(query, 16 * choices["EP"] + 64 * choices["BE"], count, lists["G"])
    given = [*given, *scratch, *numbers, tiles]
    launches.append(Launch(select_exact, (programs, entries), given, {**choices, **lists}))
    return launches


def combine_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Tensor | None,
    index: Tensor,
    optional: dict[str, Tensor | None],
    output: Tensor,
    numbers: tuple[float, float, float],
    choices: dict[str, Any],
) -> None:
    """Fill ``output``."""
    batch, heads, n, channels = query.shape
    if output.numel() == 0:
        return
    sizes = sizes_of(channels, value.shape[-1], index.shape[-1])
    rows, slots, rest, warps, registers = combine_tile(max(sizes["EP"], sizes["CP"]), index.shape[-1])
    names = ("shift", "given", "beta", "seed", "own")
    combine[(over(n, rows), batch * heads)](
        *(query, key, value, of(kernel, query), index),
        *(of(optional[name], query) for name in names),
        *(output, n, heads, *numbers),
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

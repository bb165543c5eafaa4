"""Searches among more keys than one program should go through: among parts of them, whose best are then compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from convnn.backends.triton.kernels.merge import merge
from convnn.backends.triton.sizes import merge_tile, over, strides

Given: TypeAlias = dict[str, Any]
Lists: TypeAlias = tuple[Tensor, Tensor]
Whole: TypeAlias = Callable[..., None]
# Keys of a part are a multiple of this.
STEP = 256


def select(search: Whole, parts: int, given: Given, index: Tensor, scores: Tensor, **told: Any) -> None:
    """Fill ``index`` and ``scores`` from so many parts of the keys.

    Args:
        search: the search without parts, of ``given``: query, key, bias, mask, shift and own, ``(B, H, ...)``.
        told: the options of the search.
    """
    width = given["key"].shape[-2]
    size = min(width, over(over(width, parts), STEP) * STEP)
    parts, whole = over(width, size), width // size
    # One place says where all parts begin, which only some searches need not know; and masks are not copied for each.
    at_once = not told["causal"] and told["window"] < 0 and given["mask"] is None and given["shift"] is None
    lists = [_together(search, given, told, (whole, size), index)] if at_once else []
    for part in range(whole if at_once else 0, parts):
        lists.append(_alone(search, given, told, (part * size, min(size, width - part * size)), index))
    found, of = (each[0] if len(each) == 1 else torch.cat(each, 1) for each in zip(*lists, strict=True))
    batch, heads, n, k = index.shape
    columns, rows, warps = merge_tile(parts * k)
    merge[(over(n, rows), batch * heads)](
        *(found, of, index, scores, n, heads, size, *strides(index, 2)),
        PARTS=parts,
        KK=k,
        WIDTH=columns,
        BM=rows,
        num_warps=warps,
    )


def _together(search: Whole, given: Given, told: dict[str, Any], part: tuple[int, int], like: Tensor) -> Lists:
    """Numbers and what ranks them, ``(B H, parts, N, K)``, of so many parts at once, as if they were heads."""
    count, size = part
    flat: Given = {name: None if tensor is None else tensor.flatten(0, 1) for name, tensor in given.items()}
    for name, tensor in flat.items():
        if name in ("key", "bias") and tensor is not None:
            flat[name] = tensor[:, : count * size].unflatten(1, (count, size))
        elif tensor is not None:
            flat[name] = tensor[:, None].expand(-1, count, *tensor.shape[1:])
    if flat["own"] is not None:
        starts = size * torch.arange(count, device=like.device, dtype=torch.int32)
        flat["own"] = flat["own"] - starts[:, None]
    return _run(search, flat, told, like)


def _alone(search: Whole, given: Given, told: dict[str, Any], part: tuple[int, int], like: Tensor) -> Lists:
    """The same, ``(B H, 1, N, K)``, of the keys from a place on."""
    first, size = part
    axes = {"key": -2, "bias": -1, "mask": -1, "shift": -1}
    here: Given = {
        name: tensor if tensor is None or name not in axes else tensor.narrow(axes[name], first, size)
        for name, tensor in given.items()
    }
    if here["own"] is not None:
        here["own"] = here["own"] - first
    found = _run(search, here, {**told, "row0": told["row0"] - first}, like)
    return tuple(each.flatten(0, 1)[:, None] for each in found)  # type: ignore[return-value]


def _run(search: Whole, given: Given, told: dict[str, Any], like: Tensor) -> Lists:
    shape = (*given["query"].shape[:-1], like.shape[-1])
    index, scores = like.new_empty(shape, dtype=torch.int32), like.new_empty(shape, dtype=torch.float32)
    search(given, index, scores, **told)
    return index, scores

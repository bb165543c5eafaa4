"""A search as the tensors that blocks are cut from, and back."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from convnn.backends.blocks import Pieces
from convnn.masks import Lookup, Mask
from convnn.search import Search


def tensors(search: Search) -> tuple[list[Tensor], list[Tensor]]:
    """Say which tensors of a search are cut by row, and which are shared by the rows."""
    by_row, shared = [search.query, search.rows], [search.key]
    if search.own is not None:
        by_row.append(search.own)
    if search.candidates is not None:
        shared.append(search.candidates)
    for mask in search.mask:
        if isinstance(mask, Lookup):
            shared.append(mask.table)
        elif isinstance(mask, Tensor):
            (shared if mask.shape[-2] == 1 else by_row).append(mask)
    return by_row, shared


def rebuild(search: Search, by_row: Pieces, shared: Pieces) -> Search:
    """Make a search of one block's tensors, given in the order of ``tensors``."""
    rows_left, shared_left = iter(by_row), iter(shared)
    query, rows, key = next(rows_left), next(rows_left).reshape(-1, 1), next(shared_left)
    own = None if search.own is None else next(rows_left)
    candidates = None if search.candidates is None else next(shared_left)
    mask: list[Mask] = []
    for whole in search.mask:
        if isinstance(whole, Lookup):
            mask.append(replace(whole, table=next(shared_left)))
        elif isinstance(whole, Tensor):
            mask.append(next(shared_left if whole.shape[-2] == 1 else rows_left))
        else:
            mask.append(whole)
    return replace(search, query=query, key=key, block=rows, mask=tuple(mask), own=own, candidates=candidates)

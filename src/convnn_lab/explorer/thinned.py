"""Maps with more cells than a page should hold, or an eye can tell apart."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import torch

from convnn_lab.explorer.layer import Layer
from convnn_lab.explorer.places import Map


def thinned(layer: Layer, cells: int) -> Layer:
    """Every so many-th cell of a map that has more than ``cells`` of them, without its padding.

    Its own candidates and masks number cells that are no longer there: they are left out, and a note says so.
    """
    _, _, rows, columns = layer.map.inner
    if rows * columns <= cells or layer.map.before:
        return layer
    step = ceil((rows * columns / cells) ** 0.5)
    top, left = layer.map.inner[:2]
    down, across = (torch.arange(0, side, step) for side in (rows, columns))
    kept = ((down + top)[:, None] * layer.map.cells[1] + across + left).flatten()
    own = layer.own
    if own.candidates != "all" or own.mask != "none":
        own = replace(own, candidates="all", mask="none")
    near = replace(Map.whole(len(down), len(across)), kernel=layer.map.kernel, dilation=(1, 1))
    query, notes = None, [f"every {step}. cell of {rows} x {columns} is kept, without padding"]
    if layer.query is not None:
        if layer.map.queries != layer.map.keys and layer.query.shape[-2] != rows * columns:
            notes.append("its queries are shown as the keys in their places")
        else:
            places = (down[:, None] * columns + across).flatten()
            query = layer.query[:, places]
    return Layer(
        layer.name, layer.kind, near, layer.key[:, kept], query, own, notes=(*layer.notes, *notes)
    )  # fmt: skip

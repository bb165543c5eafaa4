"""Numbers about neighbours: how far a layer looks, how local it is, how alike its heads are, what reaches the class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from convnn.backends import BACKENDS
from convnn.neighbors import Neighbors
from convnn_lab.explorer.layer import Choices, Layer, found

SEARCH = BACKENDS["chunked"]


@dataclass(frozen=True)
class Reach:
    """How far the queries of a layer look, by head; every neighbour counts by its weight.

    Args:
        distance: the mean distance of neighbours in pixels of the picture.
        inside3, inside5: the share of neighbours inside the window of 3 x 3 and 5 x 5 cells around a query; class
            tokens are inside no window.
    """

    distance: tuple[float, ...]
    inside3: tuple[float, ...]
    inside5: tuple[float, ...]


def own(layer: Layer) -> tuple[Neighbors, Tensor]:
    """A layer's own neighbours and their weights, ``(H, N, K)``."""
    return found(layer, layer.own, SEARCH)


def reach(layer: Layer, picture: tuple[int, int], chosen: tuple[Neighbors, Tensor] | None = None) -> Reach:
    """Measure how far the cells of a layer look.

    Args:
        picture: its width and height in pixels.
    """
    near, weights = own(layer) if chosen is None else chosen
    where, before = layer.map, layer.map.before
    index, weights = near.index[:, before:], weights[:, before:].double()  # (H, N, K)
    cell = index - before
    placed = cell >= 0
    rows, columns = cell.div(where.cells[1], rounding_mode="floor"), cell % where.cells[1]
    down, across = (
        places.double() - centre[:, None]
        for places, centre in zip((rows, columns), where.centres().unbind(-1), strict=True)
    )
    height, width = picture[1] / where.inner[2], picture[0] / where.inner[3]
    distance = torch.hypot(down * height, across * width)
    far = torch.maximum(down.abs(), across.abs())
    total = weights.sum((-2, -1)).clamp(min=1e-30)
    on_map = (weights * placed).sum((-2, -1)).clamp(min=1e-30)
    inside = [(weights * (placed & (far <= side))).sum((-2, -1)) / total for side in (1, 2)]
    mean = (weights * placed * distance).sum((-2, -1)) / on_map
    return Reach(tuple(mean.tolist()), tuple(inside[0].tolist()), tuple(inside[1].tolist()))


def dense(layer: Layer, chosen: tuple[Neighbors, Tensor] | None = None) -> Tensor:
    """The weights of all M keys, each row summing to 1 where it has any, ``(H, N, M)``."""
    near, weights = own(layer) if chosen is None else chosen
    whole = weights.new_zeros(*weights.shape[:-1], layer.map.keys)
    whole = whole.scatter_add(-1, near.index.clamp(min=0), weights)
    return whole / whole.sum(-1, keepdim=True).clamp(min=1e-30)


def overlap(layer: Layer) -> Tensor:
    r""":math:`\sum_j \min(w^a_{ij}, w^b_{ij})`, averaged over queries, for every pair of heads: 1 where they agree.

    Shape:
        ``(H, H)``.
    """
    weights = dense(layer)
    pairs = [torch.minimum(one, other).sum(-1).mean() for one in weights for other in weights]
    return torch.stack(pairs).reshape(layer.heads, layer.heads)


def rollout(layers: Sequence[Layer]) -> Tensor:
    r"""What reaches the class token: :math:`\prod_l (\tfrac12 I + \tfrac12 \bar W_l)`, its row, without class tokens.

    :math:`\bar W` is the mean over heads; the half of each token that passes by the layer stays where it is.

    Shape:
        ``(rows, columns)`` of the map.
    """
    first = layers[0].map
    if not first.before or any(layer.map != first for layer in layers):
        raise ValueError(
            "what reaches the class token is defined where all layers have the same tokens, and one has it"
        )
    through = torch.eye(first.keys, dtype=torch.float64)
    for layer in layers:
        mean = dense(layer).double().mean(0)
        through = (0.5 * torch.eye(first.keys, dtype=torch.float64) + 0.5 * mean) @ through
    return through[0, first.before :].reshape(first.cells)


def dial(layer: Layer, turn: float, temperature: float = 1.0) -> Choices:
    """A way from a convolution to attention.

    At 0 the nine nearest in space count alike; at 1 every key counts by its likeness; in between the share of features
    rises with the turn, and the number of neighbours by equal factors.
    """
    keys = layer.map.keys - layer.map.before
    space = replace(
        layer.own, share=0.0, k=min(9, keys), weighting="uniform", candidates="all", mask="none", self="any"
    )
    space = replace(space, space="chebyshev")
    if turn == 0:
        return space
    k = "all" if turn == 1 else round(9 ** (1 - turn) * keys**turn)
    return replace(space, share=turn, k=k, weighting="softmax_at", temperature=temperature)  # type: ignore[arg-type]

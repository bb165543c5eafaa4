"""The k largest numbers of every row, with less looking on a CPU."""

from __future__ import annotations

from math import isqrt

import torch
from torch import Tensor

TALL = 8  # columns of fewer numbers do not pay


def largest(scores: Tensor, k: int, *, ordered: bool) -> tuple[Tensor, Tensor]:
    """The k largest numbers of every row and their places, as :func:`torch.topk` has them; NaN is the largest.

    On a CPU torch carries every number of a row around with its place. Lay a row out in columns: the k largest are in
    the k columns of largest maximum, and a maximum is found many columns at a time.

    Shape:
        scores ``(..., M)``, results ``(..., k)``.
    """
    # Under torch.compile the question would tie the graph to this number of keys.
    if scores.device.type != "cpu" or torch.compiler.is_compiling() or scores.shape[-1] < TALL**2 * k:
        return tuple(scores.topk(k, sorted=ordered))  # type: ignore[return-value]
    tall = isqrt(scores.shape[-1] // k)
    columns = scores.shape[-1] // tall
    end = tall * columns
    top = scores[..., :end].unflatten(-1, (tall, columns)).amax(-2)  # (..., columns)
    column = top.topk(k, sorted=False).indices[..., None, :]
    place = torch.arange(0, end, columns)[:, None] + column  # (..., tall, k)
    beside = torch.arange(end, scores.shape[-1]).expand(*scores.shape[:-1], -1)
    place = torch.cat([place.flatten(-2), beside], -1)
    best, chosen = scores.gather(-1, place).topk(k, sorted=ordered)
    return best, place.gather(-1, chosen)

"""How near is a key to a query? Larger is nearer, always: a distance is negated where it is defined.

A similarity maps queries ``(..., N, E)`` and keys ``(..., M, E)`` to scores ``(..., N, M)``. The score of a pair may
depend on that query and that key only: the operator scores the pairs it has chosen a second time, one query with its
own K keys, and the two must agree. The half types arrive as float32.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Similarity(Protocol):
    """Anything called as ``similarity(query, key)``; a function, or a module if it has something to learn."""

    def __call__(self, query: Tensor, key: Tensor, /) -> Tensor:
        """Score every key against every query."""
        ...


def dot(query: Tensor, key: Tensor) -> Tensor:
    r""":math:`q^\top k`."""
    return query @ key.mT


def scaled_dot(query: Tensor, key: Tensor) -> Tensor:
    r""":math:`q^\top k / \sqrt{E}`, the score of attention."""
    return dot(query * query.shape[-1] ** -0.5, key)


def cosine(query: Tensor, key: Tensor) -> Tensor:
    r""":math:`q^\top k / \lVert q \rVert \lVert k \rVert`; 0, with gradient 0, where either vector is 0."""
    return dot(_unit(query), _unit(key))


def sqeuclidean(query: Tensor, key: Tensor) -> Tensor:
    r""":math:`-\lVert q - k \rVert^2`."""
    return -_square_distance(query, key)


def euclidean(query: Tensor, key: Tensor) -> Tensor:
    r""":math:`-\lVert q - k \rVert`; the gradient at distance 0 is 0."""
    return -_root(_square_distance(query, key))


def _square_distance(query: Tensor, key: Tensor) -> Tensor:
    r"""Expand :math:`\lVert q - k \rVert^2 = \lVert q \rVert^2 - 2 q^\top k + \lVert k \rVert^2` about a centre."""
    # Centring keeps the expansion from cancelling away its own digits. A single query is its own centre: what is left
    # of the expansion is then the difference itself. A NaN must not reach other pairs through the mean.
    centre = query if query.shape[-2] == 1 else key.nan_to_num(0.0, 0.0, 0.0).mean(-2, keepdim=True)
    query, key = query - centre.detach(), key - centre.detach()
    square = query.square().sum(-1)[..., :, None] - 2 * dot(query, key) + key.square().sum(-1)[..., None, :]
    return square.clamp(min=0)


def _unit(vector: Tensor) -> Tensor:
    """Scale to length 1; the zero vector stays, and passes no gradient."""
    # Dividing by the largest entry first keeps tiny and huge vectors inside the range of squares; the unit vector does
    # not depend on that scale, so neither does its gradient.
    largest = vector.detach().abs().amax(-1, keepdim=True)
    vector = vector / torch.where(largest == 0, 1, largest)
    length = _root(vector.square().sum(-1, keepdim=True))
    return torch.where(length == 0, 0, vector / torch.where(length == 0, 1, length))


def _root(square: Tensor) -> Tensor:
    """Take the square root, with gradient 0 at 0 where the derivative has a pole."""
    return torch.where(square == 0, 0, torch.where(square == 0, 1, square).sqrt())


SIMILARITIES: dict[str, Similarity] = {
    "dot": dot,
    "scaled_dot": scaled_dot,
    "cosine": cosine,
    "euclidean": euclidean,
    "sqeuclidean": sqeuclidean,
}

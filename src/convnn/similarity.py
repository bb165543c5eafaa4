"""How near is a key to a query? Larger is nearer, always: a distance is negated where it is defined.

A similarity maps queries ``(..., N, E)`` and keys ``(..., M, E)`` to scores ``(..., N, M)``. The score of a pair may
depend on that query and that key only: the operator scores the pairs it has chosen a second time, one query with its
own K keys, and the two must agree. The half types arrive as float32.
"""

from __future__ import annotations

from math import prod
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
    # One matrix of keys for many batches of queries: as a matrix, matmul does not copy it for each.
    shared = 2 < key.ndim <= query.ndim and prod(key.shape[:-2]) == 1
    return query @ (key.flatten(0, -2) if shared else key).mT


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
    r""":math:`\lVert q - k \rVert^2`: in few channels, as coordinates have, by difference; in many, expanded."""
    largest = torch.finfo(query.dtype).max  # a distance beyond is far, but not forbidden
    if query.shape[-1] <= 8:
        pairs = zip(query.unbind(-1), key.unbind(-1), strict=True)
        squares = [(q[..., :, None] - k[..., None, :]).square() for q, k in pairs]
        return sum(squares[1:], squares[0]).clamp(max=largest)
    # Centring keeps the expansion |q|^2 - 2qk + |k|^2 from cancelling away its own digits. A single query with keys of
    # its own is the best centre: what is left of the expansion is then the difference itself.
    own = query.shape[-2] == 1 and torch.broadcast_shapes(query.shape[:-2], key.shape[:-2]) == key.shape[:-2]
    centre = query.detach() if own else _middle(key.detach())
    query, key = query - centre, key - centre
    square = query.square().sum(-1)[..., :, None] - 2 * dot(query, key) + key.square().sum(-1)[..., None, :]
    return square.clamp(min=0, max=largest)


def _middle(key: Tensor) -> Tensor:
    """The key nearest to the mean of all: a key, so that differences of whole numbers stay whole numbers."""
    # A NaN must not reach other pairs through the mean.
    key = key.nan_to_num(0.0, 0.0, 0.0)
    nearest = (key - key.mean(-2, keepdim=True)).square().sum(-1, keepdim=True).argmin(-2, keepdim=True)
    return key.gather(-2, nearest.expand(*key.shape[:-2], 1, key.shape[-1]))


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

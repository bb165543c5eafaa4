"""How near is a key to a query? Larger is nearer, always: a distance is negated where it is defined.

A similarity maps queries ``(..., N, E)`` and keys ``(..., M, E)`` to scores ``(..., N, M)``. The score of a pair may
depend on that query and that key only: the operator scores the pairs it has chosen a second time, one query with its
own K keys, and the two must agree. The half types arrive as float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from math import inf, prod
from typing import Protocol

import torch
from torch import Tensor, nn

# Up to so many channels, all that coordinates have, distances are computed by difference.
FEW = 8


class Similarity(Protocol):
    """Anything called as ``similarity(query, key)``; a function, or a module if it has something to learn."""

    def __call__(self, query: Tensor, key: Tensor, /) -> Tensor:
        """Score every key against every query."""
        ...


def dot(query: Tensor, key: Tensor) -> Tensor:
    r""":math:`q^\top k`."""
    # A matrix of keys for many queries: matmul does not copy it for each. Asked in an export, it would fix the batch.
    shared = not torch.compiler._is_exporting_flag and 2 < key.ndim <= query.ndim and prod(key.shape[:-2]) == 1
    return query @ (key.flatten(0, -2) if shared else key).mT


def scaled_dot(query: Tensor, key: Tensor) -> Tensor:
    r""":math:`q^\top k / \sqrt{E}`, the score of attention."""
    return dot(query * query.shape[-1] ** -0.5, key)


def cosine(query: Tensor, key: Tensor) -> Tensor:
    r""":math:`q^\top k / \lVert q \rVert \lVert k \rVert`; 0, with gradient 0, where either vector is 0."""
    return dot(unit(query), unit(key))


def sqeuclidean(query: Tensor, key: Tensor) -> Tensor:
    r""":math:`-\lVert q - k \rVert^2`."""
    return -_square_distance(query, key)


def euclidean(query: Tensor, key: Tensor) -> Tensor:
    r""":math:`-\lVert q - k \rVert`; the gradient at distance 0 is 0."""
    return -_root(_square_distance(query, key))


def pearson(query: Tensor, key: Tensor) -> Tensor:
    r""":math:`\cos(q - \bar q, k - \bar k)`, each vector centred on its own mean; 0 where either is constant."""
    return cosine(query - query.mean(-1, keepdim=True), key - key.mean(-1, keepdim=True))


def manhattan(query: Tensor, key: Tensor) -> Tensor:
    r""":math:`-\sum_e |q_e - k_e|`."""
    return -_lp_distance(query, key, 1.0)


def chebyshev(query: Tensor, key: Tensor) -> Tensor:
    r""":math:`-\max_e |q_e - k_e|`: on a grid the nearest keys fill a square."""
    return -_lp_distance(query, key, inf)


def minkowski(p: float) -> Similarity:
    r""":math:`-(\sum_e |q_e - k_e|^p)^{1/p}` for p from 1 to infinity; the gradient at distance 0 is 0.

    In more than 8 channels a search sums the powers as they are: a large finite p leaves the range of its type.

    Example:
        >>> minkowski(1) is manhattan, minkowski(2) is euclidean, minkowski(float("inf")) is chebyshev
        (True, True, True)
    """
    if not p >= 1:
        raise ValueError(f"minkowski needs a p of at least 1, below which there is no distance, got {p}")
    known: dict[float, Similarity] = {1.0: manhattan, 2.0: euclidean, inf: chebyshev}
    return known.get(float(p), partial(_minkowski, p=float(p)))


def _minkowski(query: Tensor, key: Tensor, *, p: float) -> Tensor:
    return -_lp_distance(query, key, p)


class Bilinear(nn.Module):
    r""":math:`q^\top W k` with a learned W that starts at the identity, where it is :func:`dot`.

    Args:
        channels: E, the compared channels.
    """

    def __init__(self, channels: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, channels, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start at the identity."""
        nn.init.eye_(self.weight)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:  # noqa: D102
        return dot(query @ self.weight.to(query.dtype), key)


class Mahalanobis(nn.Module):
    r""":math:`-\sqrt{(q - k)^\top \Sigma^{-1} (q - k)}`: Euclidean distance after a linear map.

    It keeps a factor F with :math:`\Sigma^{-1} = F F^\top`, so that learning cannot leave the positive matrices.

    Args:
        precision: :math:`\Sigma^{-1}`, symmetric and positive semi-definite.
        learned: whether the factor is a parameter; otherwise it is frozen.

    Shape:
        precision ``(E, E)``.

    Example:
        >>> query, key = torch.randn(3, 4), torch.randn(5, 4)
        >>> torch.allclose(Mahalanobis(torch.eye(4))(query, key), euclidean(query, key))
        True
    """

    factor: Tensor

    def __init__(self, precision: Tensor, *, learned: bool = False) -> None:
        super().__init__()
        if precision.ndim != 2 or precision.shape[0] != precision.shape[1] or not precision.is_floating_point():
            came = f"{tuple(precision.shape)} of {precision.dtype}"
            raise ValueError(f"precision must be a floating point matrix of shape (E, E), got {came}")
        exact = precision.detach().double()
        if not torch.allclose(exact, exact.mT, rtol=1e-3, atol=1e-5 * float(exact.abs().max())):
            raise ValueError("precision must be symmetric, as the inverse of a covariance is; got one that is not")
        values, vectors = torch.linalg.eigh(exact)
        if values[0] < -1e-5 * values[-1].abs():
            raise ValueError(f"precision must be positive semi-definite, got an eigenvalue of {values[0].item():.3g}")
        factor = (vectors * values.clamp(min=0).sqrt()).to(precision.dtype)
        if learned:
            self.factor = nn.Parameter(factor)
        else:
            self.register_buffer("factor", factor)

    @classmethod
    def fit(cls, data: Tensor, *, shrinkage: float = 1e-3, learned: bool = False) -> Mahalanobis:
        """Estimate the covariance from the rows of ``data``, ``(..., E)``.

        Args:
            shrinkage: how much of the mean variance is added to every direction, so that the inverse exists.
        """
        rows = data.detach().flatten(0, -2).double()
        if rows.shape[0] < 2:
            raise ValueError(f"a covariance needs at least two rows of data, got {rows.shape[0]}")
        covariance = torch.cov(rows.mT).reshape(2 * rows.shape[1:])
        ridge = shrinkage * covariance.diagonal().mean() + torch.finfo(torch.float32).tiny
        covariance = covariance + ridge * torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
        return cls(torch.linalg.inv(covariance).to(data.dtype), learned=learned)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:  # noqa: D102
        factor = self.factor.to(query.dtype)
        return euclidean(query @ factor, key @ factor)


def _square_distance(query: Tensor, key: Tensor) -> Tensor:
    r""":math:`\lVert q - k \rVert^2`: in few channels, as coordinates have, by difference; in many, expanded."""
    largest = torch.finfo(query.dtype).max  # a distance beyond is far, but not forbidden
    if query.shape[-1] <= FEW:
        squares = [difference.square() for difference in _differences(query, key)]
        return sum(squares[1:], squares[0]).clamp(max=largest)
    # Centring keeps the expansion |q|^2 - 2qk + |k|^2 from cancelling away its own digits. A single query with keys of
    # its own is the best centre: what is left of the expansion is then the difference itself.
    centre = query.detach() if _has_own_keys(query, key) else middle(key.detach())
    query, key = query - centre, key - centre
    square = query.square().sum(-1)[..., :, None] - 2 * dot(query, key) + key.square().sum(-1)[..., None, :]
    return square.clamp(min=0, max=largest)


def _lp_distance(query: Tensor, key: Tensor, p: float) -> Tensor:
    r""":math:`\lVert q - k \rVert_p`, without a tensor of all differences."""
    if _has_own_keys(query, key):
        return _norm((key - query).abs().unbind(-1), p)[..., None, :]
    if query.shape[-1] <= FEW:
        return _norm([difference.abs() for difference in _differences(query, key)], p)
    distance = torch.cdist(query, key, p=p, compute_mode="donot_use_mm_for_euclid_dist")
    # The largest of some numbers passes over a NaN there.
    lost = query.isnan().any(-1)[..., :, None] | key.isnan().any(-1)[..., None, :]
    return distance.masked_fill(lost, torch.nan)


def _norm(sizes: Sequence[Tensor], p: float) -> Tensor:
    """The p-norm of vectors given by the sizes of their entries."""
    if p == 1:
        return sum(sizes[1:], sizes[0])
    largest = reduce(torch.maximum, sizes)
    if p == inf:
        return largest
    # The largest entry is taken out, so that powers neither overflow nor vanish, and 0 has a gradient of 0.
    unit = torch.where(largest == 0, 1, largest).detach()
    powers = [torch.where(largest == 0, 1, size / unit) ** p for size in sizes]
    return torch.where(largest == 0, 0, unit * sum(powers[1:], powers[0]) ** (1 / p))


def _differences(query: Tensor, key: Tensor) -> list[Tensor]:
    """The difference of every pair, channel by channel."""
    channels = zip(query.unbind(-1), key.unbind(-1), strict=True)
    return [q[..., :, None] - k[..., None, :] for q, k in channels]


def _has_own_keys(query: Tensor, key: Tensor) -> bool:
    """Whether there is one query for each set of keys, so that their differences are no larger than the keys."""
    return query.shape[-2] == 1 and torch.broadcast_shapes(query.shape[:-2], key.shape[:-2]) == key.shape[:-2]


def middle(key: Tensor) -> Tensor:
    """The key nearest to the mean of all: a key, so that differences of whole numbers stay whole numbers."""
    # A NaN must not reach other pairs through the mean.
    key = key.nan_to_num(0.0, 0.0, 0.0)
    nearest = (key - key.mean(-2, keepdim=True)).square().sum(-1, keepdim=True).argmin(-2, keepdim=True)
    return key.gather(-2, nearest.expand(*key.shape[:-2], 1, key.shape[-1]))


def unit(vector: Tensor) -> Tensor:
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
    "pearson": pearson,
    "manhattan": manhattan,
    "chebyshev": chebyshev,
}

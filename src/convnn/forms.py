"""Which similarities are a dot product in disguise: what a matrix unit can rank and a kernel can differentiate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from convnn.neighbors import wide
from convnn.similarity import (
    FEW,
    Bilinear,
    Mahalanobis,
    Similarity,
    cosine,
    dot,
    euclidean,
    middle,
    pearson,
    scaled_dot,
    sqeuclidean,
    unit,
)

Kind: TypeAlias = Literal["dot", "distance", "square"]


@dataclass(frozen=True, eq=False)
class Form:
    r"""A similarity as :math:`a \, q'^\top k'`, :math:`-\lVert q' - k' \rVert` or :math:`-\lVert q' - k' \rVert^2`.

    Args:
        query, key: q' and k', through which gradients flow back to q and k.
        scale: a, which is above 0 and so does not change the ranks.
    """

    query: Tensor
    key: Tensor
    kind: Kind = "dot"
    scale: float = 1.0

    @property
    def by_difference(self) -> bool:
        """Whether distances are few enough channels to be ranked by difference."""
        return self.kind != "dot" and self.query.shape[-1] <= FEW

    @property
    def per_shift(self) -> float:
        """What a number added to the score counts among what is ranked; not defined for a distance."""
        if self.kind == "dot":
            return 1.0 / self.scale
        return 1.0 if self.by_difference else 0.5

    def ranked(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries, keys and a number per key such that :math:`q^\top k + b` ranks the keys of a query."""
        query, key = self.query.detach(), self.key.detach()
        if self.kind == "dot" or self.by_difference:
            return query, key, None
        # About one of the keys, as the search of the similarity itself does; half types would lose what is centred.
        query, key = wide(query), wide(key)
        centre = middle(key)
        query, key = query - centre, key - centre
        return query, key, -0.5 * key.square().sum(-1).nan_to_num(0.0, 1e37, 0.0).clamp(max=1e37)


def known(similarity: Similarity) -> bool:
    """Whether a similarity has such a form."""
    return any(similarity is each for each in _PLAIN) or type(similarity) in (Bilinear, Mahalanobis)


def form(similarity: Similarity, query: Tensor, key: Tensor, *, hides: bool = False) -> Form:
    """The form of a similarity that is ``known``.

    Args:
        hides: whether there may be queries and keys nobody pairs, as behind a mask: their NaN is then no part of any
            gradient.
    """
    if similarity in (dot, scaled_dot):
        return Form(query, key, scale=query.shape[-1] ** -0.5 if similarity is scaled_dot else 1.0)
    if similarity in (euclidean, sqeuclidean):
        return Form(query, key, kind(similarity))
    query, key = wide(query), wide(key)
    if not hides:
        return Form(*_mapped(similarity, query, key), kind(similarity))
    # Through a length or a projection a gradient of 0 would come back as 0 times NaN: what is lost goes around them.
    maps_keys = not isinstance(similarity, Bilinear)
    query, lost_query = _parted(query, similarity)
    key, lost_key = _parted(key, similarity) if maps_keys else (key, None)
    query, key = _mapped(similarity, query, key)
    return Form(query + lost_query, key if lost_key is None else key + lost_key, kind(similarity))


def kind(similarity: Similarity) -> Kind:
    """What a similarity that is ``known`` is, once queries and keys are mapped."""
    if similarity in (euclidean, sqeuclidean):
        return "square" if similarity is sqeuclidean else "distance"
    return "distance" if isinstance(similarity, Mahalanobis) else "dot"


def _mapped(similarity: Similarity, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(similarity, Bilinear):
        return query @ similarity.weight.to(query.dtype), key
    if isinstance(similarity, Mahalanobis):
        factor = similarity.factor.to(query.dtype)
        return query @ factor, key @ factor
    return directions(similarity, query, key)


def _parted(vectors: Tensor, similarity: Similarity) -> tuple[Tensor, Tensor]:
    """The vectors with 0 for those that map to NaN, and these, as NaN, with 0 for the others."""
    # A direction is NaN where an entry is infinite, too.
    whole = vectors.isfinite() if similarity in (cosine, pearson) else ~vectors.isnan()
    whole = whole.all(-1, keepdim=True)
    return torch.where(whole, vectors, 0.0), torch.where(whole, 0.0, vectors + torch.nan)


def directions(similarity: Similarity, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """What cosine and Pearson's correlation are the dot product of."""
    if similarity is pearson:
        query, key = query - query.mean(-1, keepdim=True), key - key.mean(-1, keepdim=True)
    return unit(query), unit(key)


PRODUCTS: tuple[Similarity, ...] = (dot, scaled_dot, cosine, pearson)
"""Those whose scores are one product of two matrices, which nobody else holds."""

FUSED = 1024
"""So many neighbours kernels look for; for more, and for other similarities, somebody else does."""

_PLAIN: tuple[Similarity, ...] = (*PRODUCTS, euclidean, sqeuclidean)

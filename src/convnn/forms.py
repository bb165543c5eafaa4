"""Which similarities are a dot product in disguise: what a matrix unit can rank and a kernel can differentiate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

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


def form(similarity: Similarity, query: Tensor, key: Tensor) -> Form:
    """The form of a similarity that is ``known``."""
    if similarity in (dot, scaled_dot):
        return Form(query, key, scale=query.shape[-1] ** -0.5 if similarity is scaled_dot else 1.0)
    if similarity in (euclidean, sqeuclidean):
        return Form(query, key, "square" if similarity is sqeuclidean else "distance")
    query, key = wide(query), wide(key)
    if isinstance(similarity, Bilinear):
        return Form(query @ similarity.weight.to(query.dtype), key)
    if isinstance(similarity, Mahalanobis):
        factor = similarity.factor.to(query.dtype)
        return Form(query @ factor, key @ factor, "distance")
    return Form(*directions(similarity, query, key))


def directions(similarity: Similarity, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """What cosine and Pearson's correlation are the dot product of."""
    if similarity is pearson:
        query, key = query - query.mean(-1, keepdim=True), key - key.mean(-1, keepdim=True)
    return unit(query), unit(key)


_PLAIN: tuple[Similarity, ...] = (dot, scaled_dot, cosine, pearson, euclidean, sqeuclidean)

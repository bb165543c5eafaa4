"""The first half of the operator as a record: queries looking for their K nearest keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from convnn import masks
from convnn.masks import Mask
from convnn.neighbors import Neighbors, take, wide
from convnn.similarity import Similarity

Order: TypeAlias = Literal["score", "key"]


@dataclass(frozen=True, eq=False)
class Search:
    """Everything that decides who a query's neighbours are; it may be a block of rows of a larger search.

    Args:
        rows: the number of each query in the whole, for mask rules.
        everything: all M keys were asked for, by ``k="all"``.

    Shape:
        query ``(..., N, E)``, key ``(..., M, E)``, rows ``(N, 1)``, mask tensors broadcast to ``(..., N, M)``.
    """

    query: Tensor
    key: Tensor
    rows: Tensor
    mask: tuple[Mask, ...]
    similarity: Similarity
    k: int
    order: Order
    everything: bool = False

    def scores(self, first: int = 0, last: int | None = None) -> Tensor:
        """Score the keys from ``first`` up to ``last`` for every query, ``(..., N, last - first)``; -inf forbids."""
        last = self.key.shape[-2] if last is None else last
        scores = self.similarity(wide(self.query), wide(self.key[..., first:last, :]))
        for mask in self.mask:
            scores = masks.lay(scores, masks.block(mask, self.rows, first, last))
        return scores

    def neighbors(self, index: Tensor) -> Neighbors:
        """Score the chosen keys ``index`` (..., N, K) again, with gradients, and put each row in order.

        Choosing has no gradient, scores have; so a backend may choose as it likes.
        """
        taken = wide(take(self.key, index))  # (..., N, K, E)
        scores = self.similarity(wide(self.query)[..., :, None, :], taken)[..., 0, :]  # (..., N, K)
        for mask in self.mask:
            scores = masks.lay(scores, masks.pairs(mask, self.rows, index))
        index = index.expand(scores.shape)
        place = _places(scores.detach(), index, self.order)
        scores, index = scores.gather(-1, place), index.gather(-1, place)
        return Neighbors(scores, index.masked_fill(scores == -torch.inf, -1))


def _places(scores: Tensor, index: Tensor, order: Order) -> Tensor:
    """Say which slot comes where: nearest first and ties by key, or by key; empty slots last either way."""
    last = torch.iinfo(index.dtype).max
    by_key = index.masked_fill(scores == -torch.inf, last).argsort(dim=-1)
    if order == "key":
        return by_key
    by_score = scores.gather(-1, by_key).argsort(dim=-1, descending=True, stable=True)
    return by_key.gather(-1, by_score)

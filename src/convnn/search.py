"""The first half of the operator as a record: queries looking for their K nearest keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
        scores = self._scored(wide(self.query), wide(self.key[..., first:last, :]))
        return masks.lay(scores, *self._laid(first, last))

    def neighbors(self, index: Tensor) -> Neighbors:
        """Score the chosen keys ``index`` (..., N, K) again, with gradients, and put each row in order.

        Choosing has no gradient, scores have; so a backend may choose as it likes.
        """
        allowed, shifts = masks.combine(masks.pairs(mask, self.rows, index) for mask in self.mask)
        query, taken = wide(self.query), wide(take(self.key, index))  # (..., N, E), (..., N, K, E)
        if allowed is not None:
            # What may not be chosen may not be seen, not even by the gradient: 0 times NaN is NaN.
            query = torch.where(allowed.any(-1, keepdim=True), query, 0.0)
            taken = torch.where(allowed[..., None], taken, 0.0)
        scores = masks.lay(self._scored(query[..., :, None, :], taken)[..., 0, :], allowed, shifts)  # (..., N, K)
        index = index.expand(scores.shape)
        place = _places(scores.detach(), index, self.order)
        scores, index = scores.gather(-1, place), index.gather(-1, place)
        return Neighbors(scores, index.masked_fill(scores == -torch.inf, -1))

    def without_the_unseen(self, value: Tensor) -> tuple[Search, Tensor]:
        """Put 0 for queries that may choose nothing, and for keys and values nobody may choose: see ``neighbors``."""
        allowed, _ = self._laid(0, self.key.shape[-2])
        if allowed is None:
            return self, value
        chooses, chosen = allowed.any(-1, keepdim=True), allowed.any(-2)[..., None]
        return replace(self, query=_where(chooses, self.query), key=_where(chosen, self.key)), _where(chosen, value)

    def _laid(self, first: int, last: int) -> tuple[Tensor | None, list[Tensor]]:
        return masks.combine(masks.block(mask, self.rows, first, last) for mask in self.mask)

    def _scored(self, query: Tensor, key: Tensor) -> Tensor:
        scores = self.similarity(query, key)
        required = (query.shape[-2], key.shape[-2])
        if not isinstance(scores, Tensor) or not scores.is_floating_point() or scores.shape[-2:] != required:
            came = f"{tuple(scores.shape)} of {scores.dtype}" if isinstance(scores, Tensor) else type(scores).__name__
            pair = f"{tuple(query.shape)} and {tuple(key.shape)}"
            raise ValueError(
                f"a similarity of {pair} must return float scores (..., {required[0]}, {required[1]}), got {came}"
            )
        return scores


def _where(seen: Tensor, tensor: Tensor) -> Tensor:
    """Keep ``tensor`` where anybody sees it, without broadcasting it up to the leading dimensions of ``seen``."""
    while seen.ndim > tensor.ndim:
        seen = seen.any(0)
    for axis in range(seen.ndim - 2):
        if tensor.shape[axis - seen.ndim] == 1:
            seen = seen.any(axis, keepdim=True)
    return torch.where(seen, tensor, 0.0)


def _places(scores: Tensor, index: Tensor, order: Order) -> Tensor:
    """Say which slot comes where: nearest first and ties by key, or by key; empty slots last either way."""
    last = torch.iinfo(index.dtype).max
    by_key = index.masked_fill(scores == -torch.inf, last).argsort(dim=-1)
    if order == "key":
        return by_key
    by_score = scores.gather(-1, by_key).argsort(dim=-1, descending=True, stable=True)
    return by_key.gather(-1, by_score)

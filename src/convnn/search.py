"""The first half of the operator as a record: queries looking for their K nearest keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from convnn import laid
from convnn.masks import Mask
from convnn.neighbors import Neighbors, ranked, take, wide
from convnn.selection import Selection
from convnn.similarity import Similarity, cosine, pearson

Order: TypeAlias = Literal["score", "key"]
SelfScore: TypeAlias = Literal["true", "one"]


@dataclass(frozen=True, eq=False)
class Search:
    """Everything that decides who a query's neighbours are; it may be a block of rows of a larger search.

    Args:
        block: the number of each query in the whole, for mask rules, where this is a block of it.
        everything: all M keys, or all candidates, were asked for, by ``k="all"``.
        candidates: the numbers of the keys to search among, or None for all; a negative one is no key.
        own: the number of each query's own key, always its first neighbour, or None; a negative one is no key.
        own_score: what the similarity of a query and its own key counts as, or None for what it is.
        selection: how often each searched key counts, or None where the K nearest count once.

    Shape:
        query ``(..., N, E)``, key ``(..., M, E)``, block ``(N, 1)``, mask tensors broadcast to ``(..., N, M)``,
        candidates ``(..., 1, r)``, own ``(..., N, 1)``.
    """

    query: Tensor
    key: Tensor
    mask: tuple[Mask, ...]
    similarity: Similarity
    k: int
    order: Order
    everything: bool = False
    candidates: Tensor | None = None
    own: Tensor | None = None
    own_score: float | None = None
    selection: Selection | None = None
    block: Tensor | None = None

    @property
    def rows(self) -> Tensor:
        """The number of each query in the whole, ``(N, 1)``; made only where it is asked for."""
        if self.block is not None:
            return self.block
        return torch.arange(self.query.shape[-2], device=self.query.device)[:, None]

    @property
    def width(self) -> int:
        """How many keys are searched: M, or the number of candidates."""
        return (self.key.shape[-2:-1] if self.candidates is None else self.candidates.shape[-1:])[0]

    @property
    def others(self) -> int:
        """How many keys are chosen, not counting one's own: k, unless all candidates were asked for."""
        # Asked only where it can be less: torch.export would make a condition of it.
        return min(self.k, self.width) if self.own is not None and self.candidates is not None else self.k

    def scores(self, first: int = 0, last: int | None = None) -> Tensor:
        """Score the searched keys from ``first`` up to ``last`` for every query; -inf forbids.

        A query's own key is forbidden here: see ``with_own``.

        Shape:
            ``(..., N, last - first)``.
        """
        last = self.width if last is None else last
        scores = self._scored(wide(self.query), wide(self._among(self.key, first, last)))
        scores = laid.lay(scores, *self.entries(first, last))
        return scores if self.own is None else torch.where(self.numbers(first, last) == self.own, -torch.inf, scores)

    def numbers(self, first: int, last: int) -> Tensor:
        """Number the searched keys from ``first`` up to ``last`` as the whole does, ``(..., 1, last - first)``."""
        if self.candidates is None:
            return torch.arange(first, last, device=self.query.device)[None, :]
        return self.candidates[..., first:last]

    def numbered(self, place: Tensor) -> Tensor:
        """Number the keys at ``place`` (..., N, K) among the searched ones as the whole does."""
        if self.candidates is None:
            return place
        lead = torch.broadcast_shapes(self.candidates.shape[:-2], place.shape[:-2])
        place = place.expand(*lead, -1, -1)
        return self.candidates.expand(*place.shape[:-1], -1).gather(-1, place)

    @property
    def own_is_allowed(self) -> bool:
        """Whether one's own key, where there is one, is the first neighbour for sure: no mask, no score of -inf."""
        return len(self.mask) == 0 and (self.own_score is not None or self.similarity in (cosine, pearson))

    def with_own(self, best: Tensor, index: Tensor) -> Tensor:
        """Put each query's own key, unless it is forbidden, before the best others, nearest first; keep k of them."""
        if self.own is None:
            return index
        forbidden = self.own < 0 if self.own_is_allowed else self._paired(self.own) == -torch.inf  # (..., N, 1)
        index = index.masked_fill(best == -torch.inf, -1)  # among them oneself, which would come back allowed
        lead = torch.broadcast_shapes(forbidden.shape[:-1], index.shape[:-1])
        own = self.own.expand(*lead, 1).masked_fill(forbidden, -1)
        return self._first(own, index.expand(*lead, -1), forbidden.expand(*lead, 1))

    def _first(self, own: Tensor, others: Tensor, forbidden: Tensor) -> Tensor:
        """Put what belongs to one's own key before what belongs to the others, unless it is forbidden; keep k."""
        joined = torch.cat([own, others], -1)
        if joined.shape[-1] == self.k:
            return joined
        return joined.gather(-1, torch.arange(self.k, device=joined.device) + forbidden.long())

    def neighbors(self, index: Tensor, *, some_empty: bool = False) -> Neighbors:
        """Score the chosen keys ``index`` (..., N, K) again, with gradients, and put each row in order.

        Choosing has no gradient, scores have; so a backend may choose as it likes.

        Args:
            some_empty: whether slots may be empty, -1, though no mask forbids anything: the similarity may, by -inf.
        """
        scores = self._paired(index, some_empty=some_empty)
        return self.ordered(scores, index.expand(scores.shape))

    def found(self, best: Tensor, index: Tensor) -> Neighbors:
        """Put the best others of a search in order by the scores it gave them: nobody weighs by these scores.

        Only where a product of two vectors is the score: a distance searched for in a hurry is off by more than ties.
        """
        if self.own is not None:
            own = self._paired(self.own)
            forbidden = own == -torch.inf
            lead = torch.broadcast_shapes(own.shape[:-1], index.shape[:-1])
            own, forbidden, best = (each.expand(*lead, -1) for each in (own, forbidden, best))
            best, index = self._first(own, best, forbidden), self.with_own(best, index)
        return self.ordered(best, index)

    def ordered(self, scores: Tensor, index: Tensor) -> Neighbors:
        """Put each row in order: by score and one's own key first, or by key; what scored -inf is empty."""
        place = _places(scores.detach(), index, self.order)
        if self.own is not None and self.order == "score":
            others = ((index != self.own) | (scores.detach() == -torch.inf)).gather(-1, place)
            place = place.gather(-1, ranked(others.long())[1])
        scores, index = scores.gather(-1, place), index.gather(-1, place)
        return Neighbors(scores, index.masked_fill(scores == -torch.inf, -1))

    def seen(self, value: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, list[Tensor]]:
        """Queries, searched keys and their values; who may choose whom, or None; and what is added to scores.

        0 stands for queries that may choose nothing, and for keys and values nobody may choose: see ``_paired``.
        """
        query, key, value = self.query, self._among(self.key, 0, self.width), self._among(value, 0, self.width)
        allowed, shifts = self.entries(0, self.width)
        if allowed is not None:
            chooses, chosen = allowed.any(-1, keepdim=True), allowed.any(-2)[..., None]
            query, key, value = _where(chooses, query), _where(chosen, key), _where(chosen, value)
        return query, key, value, allowed, shifts

    def attended(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Score all searched keys, and take their values; one's own key must be among them.

        Shape:
            ``(..., N, r)`` and ``(..., r, C)``, with r = M where there are no candidates.
        """
        query, key, value, allowed, shifts = self.seen(value)
        scores = self._scored(wide(query), wide(key))
        if self.own is not None:
            scores = scores.expand(*torch.broadcast_shapes(scores.shape[:-2], self.own.shape[:-2]), -1, -1)
        scores = self.with_own_score(scores, self.numbers(0, self.width))
        return laid.lay(scores, allowed, shifts), value

    def _paired(self, index: Tensor, *, some_empty: bool = False) -> Tensor:
        """Score each query with its own keys ``index`` (..., N, K)."""
        entries = [laid.pairs(mask, self.rows, index) for mask in self.mask]
        if some_empty or self.mask or self.candidates is not None or self.own is not None:
            entries.append(index >= 0)
        allowed, shifts = laid.combine(entries)
        query, taken = wide(self.query), wide(take(self.key, index))  # (..., N, E), (..., N, K, E)
        if allowed is not None:
            # What may not be chosen may not be seen, not even by the gradient: 0 times NaN is NaN.
            query = torch.where(allowed.any(-1, keepdim=True), query, 0.0)
            taken = torch.where(allowed[..., None], taken, 0.0)
        scores = self._scored(query[..., :, None, :], taken)[..., 0, :]  # (..., N, K)
        return laid.lay(self.with_own_score(scores, index), allowed, shifts)

    def with_own_score(self, scores: Tensor, index: Tensor) -> Tensor:
        """Give one's own key among ``index`` the score it has by agreement, if any."""
        if self.own is None or self.own_score is None:
            return scores
        return torch.where((index == self.own) & ~scores.isnan(), self.own_score, scores)

    def _among(self, rows: Tensor, first: int, last: int) -> Tensor:
        """Take the rows of the searched keys from ``first`` up to ``last``."""
        if self.candidates is None:
            return rows[..., first:last, :]
        return take(rows, self.candidates[..., first:last])[..., 0, :, :]

    def entries(self, first: int = 0, last: int | None = None) -> tuple[Tensor | None, list[Tensor]]:
        """Evaluate the masks for the searched keys from ``first`` up to ``last``: who is allowed, and what is added."""
        last = self.width if last is None else last
        if self.candidates is None:
            return laid.combine(laid.block(mask, self.rows, first, last) for mask in self.mask)
        index = self.candidates[..., first:last]
        return laid.combine([index >= 0, *(laid.pairs(mask, self.rows, index) for mask in self.mask)])

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
    by_score = ranked(scores.gather(-1, by_key), descending=True)[1]
    return by_key.gather(-1, by_score)

"""How much does each neighbour count? A weighting maps the K scores of a row to K weights: the thesis's rho.

It is called with ``(scores, filled)``, both ``(..., K)``, for one block of rows after the other. An empty slot comes
with a score far below any other, though finite: an infinite one would make NaN of the gradient of whatever multiplies
it. Whatever a weighting returns, the operator lets an empty slot weigh exactly 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor


class Weighting(Protocol):
    """Anything called as ``weighting(scores, filled)``; a function, or a module if it has something to learn."""

    def __call__(self, scores: Tensor, filled: Tensor, /) -> Tensor:
        """Weigh the slots of every row."""
        ...


W = TypeVar("W", bound=Weighting)


def order_free(weighting: W) -> W:
    """Mark a weighting whose weights follow their scores wherever these stand: ``k="all"`` then needs no sorting."""
    weighting.order_free = True  # type: ignore[attr-defined]
    return weighting


@order_free
def uniform(scores: Tensor, filled: Tensor) -> Tensor:
    r""":math:`\rho(s) = 1`: every neighbour counts once (once, not :math:`1/K`)."""
    return filled.to(scores.dtype)


@order_free
def softmax(scores: Tensor, filled: Tensor) -> Tensor:
    r""":math:`\rho(s)_k = e^{s_k} / \sum_l e^{s_l}`, over the filled slots."""
    # A row of nothing but -inf has no softmax; it is left as it came.
    return scores.masked_fill(~filled & filled.any(-1, keepdim=True), -torch.inf).softmax(-1)


WEIGHTINGS: dict[str, Weighting] = {"uniform": uniform, "softmax": softmax}


@dataclass(frozen=True, eq=False)
class Weigh:
    """A weighting with the operator's promises around it."""

    weighting: Weighting
    dropout_p: float = 0.0

    @property
    def order_free(self) -> bool:
        """Whether a weight depends on its slot's score but not on its place."""
        return bool(getattr(self.weighting, "order_free", False))

    def __call__(self, scores: Tensor, filled: Tensor) -> Tensor:
        """Weigh ``scores``: 0 in an empty slot, NaN throughout a row with a NaN, dropout last."""
        far = -(torch.finfo(scores.dtype).max ** 0.5)
        weights = self.weighting(scores.masked_fill(~filled, far), filled)
        if not isinstance(weights, Tensor) or weights.shape != scores.shape:
            came = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
            raise ValueError(f"a weighting must return a weight per score, shape {tuple(scores.shape)}, got {came}")
        weights = weights.masked_fill(~filled, 0.0)
        weights = weights.masked_fill(scores.isnan().any(-1, keepdim=True), torch.nan)
        return F.dropout(weights, self.dropout_p) if self.dropout_p > 0.0 else weights

    @property
    def may_be_random(self) -> bool:
        """Whether two calls may differ: by dropout, or by what somebody else's weighting does."""
        return self.dropout_p > 0.0 or self.weighting not in (uniform, softmax)

"""How much does each neighbour count? A weighting maps the K scores of a row to K weights: the thesis's rho.

It is called with ``(scores, filled)``, both ``(..., K)``, for one block of rows after the other. An empty slot comes
with a score far below any other, though finite: an infinite one would make NaN of the gradient of whatever multiplies
it. Whatever a weighting returns, the operator lets an empty slot weigh exactly 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log
from typing import ClassVar, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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


def ignores_scores(weighting: W) -> W:
    """Mark a weighting whose weights do not depend on the scores, so that nothing is learned through them."""
    weighting.ignores_scores = True  # type: ignore[attr-defined]
    return weighting


def proportional(weighting: W) -> W:
    """Mark a weighting whose weights are in proportion to a function of each score: a key may then count in part."""
    weighting.proportional = True  # type: ignore[attr-defined]
    return weighting


@ignores_scores
@order_free
def uniform(scores: Tensor, filled: Tensor) -> Tensor:
    r""":math:`\rho(s) = 1`: every neighbour counts once (once, not :math:`1/K`)."""
    return filled.to(scores.dtype)


@proportional
@order_free
def softmax(scores: Tensor, filled: Tensor) -> Tensor:
    r""":math:`\rho(s)_k = e^{s_k} / \sum_l e^{s_l}`, over the filled slots."""
    # A row of nothing but -inf has no softmax; it is left as it came.
    return scores.masked_fill(~filled & filled.any(-1, keepdim=True), -torch.inf).softmax(-1)


@order_free
def softmin(scores: Tensor, filled: Tensor) -> Tensor:
    r""":math:`\operatorname{softmax}(-s)`: the least similar of the neighbours counts most.

    The softmin of a *distance* weighs near neighbours most. Scores here are minus the distance, so that is
    :func:`softmax`.
    """
    return softmax(-scores, filled)


@order_free
def sparsemax(scores: Tensor, filled: Tensor) -> Tensor:
    r""":math:`\arg\min_{p \in \Delta} \lVert p - s \rVert^2`: the nearest distribution, most of it exactly 0."""
    # Scores matter by their differences; from the largest one on, an empty slot's is a number like any other.
    scores = (scores - scores.amax(-1, keepdim=True).detach()).masked_fill(~filled, -2.0)
    ranked = scores.sort(dim=-1, descending=True).values
    count = torch.arange(1, scores.shape[-1] + 1, device=scores.device, dtype=scores.dtype)
    # p = max(s - t, 0), with t such that the p of the first so many scores, those above it, sum to 1.
    support = (1 + count * ranked > ranked.cumsum(-1)).sum(-1, keepdim=True).clamp(min=1)  # 0 beside a NaN
    threshold = (ranked.cumsum(-1).gather(-1, support - 1) - 1) / support
    return (scores - threshold).clamp(min=0)


@dataclass(frozen=True)
class softmax_at:  # noqa: N801 - used as the function it is
    r""":math:`\operatorname{softmax}(s / T)`: towards T = 0 the nearest takes all, towards infinity all count alike."""

    temperature: float
    order_free: ClassVar[bool] = True
    proportional: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"the temperature must be greater than 0, got {self.temperature}")

    def __call__(self, scores: Tensor, filled: Tensor) -> Tensor:
        """Weigh the slots of every row."""
        return softmax(scores / self.temperature, filled)


class LearnedTemperature(nn.Module):
    r""":math:`\operatorname{softmax}(s / T)` with a learned :math:`T = e^\tau`, which stays above 0.

    Args:
        temperature: where T starts.
    """

    order_free = proportional = True

    def __init__(self, temperature: float = 1.0, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"the temperature must be greater than 0, got {temperature}")
        self.start = temperature
        self.log_temperature = nn.Parameter(torch.empty((), device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Go back to where it started."""
        nn.init.constant_(self.log_temperature, log(self.start))

    @property
    def temperature(self) -> Tensor:
        """T, as it is now."""
        return self.log_temperature.exp()

    def forward(self, scores: Tensor, filled: Tensor) -> Tensor:  # noqa: D102
        return softmax(scores / self.temperature.to(scores.dtype), filled)


class on_exp(nn.Module):  # noqa: N801 - used as the function it is
    r""":math:`\rho(e^s)`: for a distance, the thesis's score :math:`e^{-D}`, here weighed with but never ranked by."""

    def __init__(self, weighting: Weighting) -> None:
        super().__init__()
        self.weighting = weighting
        self.order_free = bool(getattr(weighting, "order_free", False))
        self.ignores_scores = bool(getattr(weighting, "ignores_scores", False))
        self.proportional = bool(getattr(weighting, "proportional", False))

    def forward(self, scores: Tensor, filled: Tensor) -> Tensor:  # noqa: D102
        return self.weighting(torch.where(filled, scores.exp(), scores), filled)  # an empty slot stays far below


WEIGHTINGS: dict[str, Weighting] = {
    "uniform": uniform,
    "softmax": softmax,
    "softmin": softmin,
    "sparsemax": sparsemax,
}


@dataclass(frozen=True, eq=False)
class Weigh:
    """A weighting with the operator's promises around it."""

    weighting: Weighting
    dropout_p: float = 0.0

    @property
    def order_free(self) -> bool:
        """Whether a weight depends on its slot's score but not on its place."""
        return bool(getattr(self.weighting, "order_free", False))

    @property
    def ignores_scores(self) -> bool:
        """Whether no weight depends on a score, so that no gradient does."""
        return bool(getattr(self.weighting, "ignores_scores", False))

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

    def counted(self, scores: Tensor, filled: Tensor, counts: Tensor) -> Tensor:
        r"""Weigh keys that count so often each: :math:`g_j f(s_j) / \sum_l g_l f(s_l)`, or :math:`g_j` where f = 1."""
        weights = replace(self, dropout_p=0.0)(scores, filled) * counts
        if not self.ignores_scores:
            total = weights.sum(-1, keepdim=True)
            weights = weights / torch.where(total == 0, 1.0, total)
        return F.dropout(weights, self.dropout_p) if self.dropout_p > 0.0 else weights

    @property
    def may_be_random(self) -> bool:
        """Whether two calls may differ: by dropout, or by what somebody else's weighting does."""
        return self.dropout_p > 0.0 or self.weighting not in WEIGHTINGS.values()

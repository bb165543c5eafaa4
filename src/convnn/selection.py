r"""Who wins? The K nearest do; a selection says how often each key counts, and so how the choice can be learned.

It is called with ``(scores, chosen)``, both ``(..., L)``: the scores of all keys a query looked at, -inf for those it
may not choose, and which of them won. It returns how often each counts, from 0 to 1. The hard selection counts winners
once and others not at all, and has no gradient; the others let every key's score have one, at the price of looking at
all keys once more: N times M weights, block by block, where the hard one holds N times K.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Protocol

import torch
from torch import Tensor

from convnn.names import resolve

# Halvings of an interval that end at the last digits of the type.
HALVINGS = {torch.float32: 32, torch.float64: 60}


class Selection(Protocol):
    """Anything called as ``selection(scores, chosen)``."""

    def __call__(self, scores: Tensor, chosen: Tensor, /) -> Tensor:
        """Say how often each key counts."""
        ...


def hard(scores: Tensor, chosen: Tensor) -> Tensor:
    r""":math:`g_j = 1` for the K nearest and 0 for the others; no gradient."""
    return chosen.to(scores.dtype)


@dataclass(frozen=True)
class soft:  # noqa: N801 - used as the function it is
    r""":math:`g_j = \sigma((s_j - \tau) / T)`, with the threshold :math:`\tau` at which they sum to K.

    These are the counts in [0, 1] that sum to K and make the sum of :math:`g_j s_j` plus T times their entropy largest.
    Towards T = 0 they are the hard ones, unless two keys are equally near at the threshold; at T = 0 the hard search
    runs.

    Example:
        >>> scores, chosen = torch.tensor([3.0, 2.0, 0.0, -1.0]), torch.tensor([True, True, False, False])
        >>> [round(each, 2) for each in soft(1.0)(scores, chosen).tolist()]
        [0.88, 0.73, 0.27, 0.12]
        >>> soft(0.01)(scores, chosen).tolist()
        [1.0, 1.0, 0.0, 0.0]
    """

    temperature: float

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < inf:
            raise ValueError(f"the temperature of a selection must be at least 0 and finite, got {self.temperature}")

    def __call__(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Say how often each key counts."""
        if self.temperature == 0:
            return hard(scores, chosen)
        return _soft(scores, chosen, self.temperature)


@dataclass(frozen=True)
class straight_through:  # noqa: N801 - likewise
    """The hard counts, with the gradient of :class:`soft` at a temperature.

    Example:
        >>> scores = torch.tensor([3.0, 2.0, 0.0], requires_grad=True)
        >>> counts = straight_through(1.0)(scores, torch.tensor([True, False, False]))
        >>> counts.tolist()
        [1.0, 0.0, 0.0]
        >>> counts[1].backward()
        >>> bool(scores.grad.ne(0).all())
        True
    """

    temperature: float

    def __post_init__(self) -> None:
        if not 0 < self.temperature < inf:
            raise ValueError(f"the temperature must be greater than 0 and finite, got {self.temperature}")

    def __call__(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Say how often each key counts."""
        counts = _soft(scores, chosen, self.temperature)
        return hard(scores, chosen) + (counts - counts.detach())


SELECTIONS: dict[str, Selection] = {"hard": hard}


def named(selection: Selection | str) -> Selection:
    """A selection, also by name."""
    chosen: Selection = resolve("selection", selection, SELECTIONS)
    return chosen


def is_hard(selection: Selection) -> bool:
    """Whether the K nearest count once and nothing else does, so that nobody has to look at the others."""
    return selection is hard or (isinstance(selection, soft) and selection.temperature == 0)


def _soft(scores: Tensor, chosen: Tensor, temperature: float) -> Tensor:
    winners, may = chosen.sum(-1, keepdim=True), scores != -torch.inf
    # Where all win, or nobody, there is no threshold.
    settled = (winners == 0) | (winners >= may.sum(-1, keepdim=True))
    counts = ((scores - _threshold(scores, chosen, settled, temperature)) / temperature).sigmoid()
    return torch.where(settled, chosen.to(scores.dtype), counts)


def _threshold(scores: Tensor, chosen: Tensor, settled: Tensor, temperature: float) -> Tensor:
    r"""The :math:`\tau` at which the counts sum to the number of winners, ``(..., 1)``; any where that is settled."""
    winners, may = chosen.sum(-1, keepdim=True), scores != -torch.inf
    known = scores.detach()
    # An infinite one would make NaN of the gradient of what may not be chosen.
    last = torch.where(settled, 0.0, torch.where(chosen, known, torch.inf).amin(-1, keepdim=True))
    next_ = torch.where(settled, 0.0, torch.where(chosen, -torch.inf, known).amax(-1, keepdim=True))
    # At these ends the last winner lacks at least what all others have, and the other way round.
    others = (may.sum(-1, keepdim=True) - winners).clamp(min=1)
    high = last + temperature * (2 * others).to(known.dtype).log()
    low = next_ - temperature * (2 * winners.clamp(min=1)).to(known.dtype).log()
    for _ in range(HALVINGS.get(known.dtype, 32)):
        middle = (low + high) / 2
        total = ((known - middle) / temperature).sigmoid().sum(-1, keepdim=True)
        low, high = torch.where(total >= winners, middle, low), torch.where(total <= winners, middle, high)
    middle = (low + high) / 2
    # The sum does not move, so the threshold moves by the mean of how the scores do, weighed by the slopes.
    counts = ((scores - middle) / temperature).sigmoid()
    slopes = (counts * (1 - counts)).detach().sum(-1, keepdim=True)
    moves = temperature * counts.sum(-1, keepdim=True) / torch.where(slopes == 0, 1.0, slopes)
    return middle + (moves - moves.detach())

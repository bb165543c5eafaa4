"""Which weightings are a softmax of scores times a number, or count every neighbour once."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from convnn.weighting import LearnedTemperature, Weigh, softmax, softmax_at, softmin, uniform

UNIFORM, SOFTMAX, GIVEN = 0, 1, 2


@dataclass(frozen=True)
class Known:
    """A weighting the kernels know: one of the modes, what scores are multiplied with before, and dropout."""

    mode: int
    beta: Tensor | float | None
    dropout_p: float


def known(weigh: Weigh) -> Known | None:
    """What the kernels know a weighting as, or None."""
    weighting, dropped = weigh.weighting, weigh.dropout_p
    if dropped == 1.0:  # the kernels divide by the share that is left
        return None
    if weighting is uniform or weighting is softmax:
        return Known(UNIFORM if weighting is uniform else SOFTMAX, None, dropped)
    if weighting is softmin:
        return Known(SOFTMAX, -1.0, dropped)
    if type(weighting) is softmax_at:
        return Known(SOFTMAX, 1.0 / weighting.temperature, dropped)
    if type(weighting) is LearnedTemperature:
        return Known(SOFTMAX, 1.0 / weighting.temperature.float(), dropped)
    return None

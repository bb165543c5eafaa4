"""What an epoch is judged by, beside its loss."""

from __future__ import annotations

from dataclasses import dataclass

from convnn_lab.data.text import TEXTS
from convnn_lab.recipes import Recipe


@dataclass(frozen=True)
class Measure:
    """A number that is worth more, or less, the better a run is.

    Args:
        name: of its columns, behind ``train_`` and ``val_``.
        title: what it is called.
        beside: another number of a test that goes into its row.
        rises: whether larger is better.
        seen: what a model is shown.
    """

    name: str
    title: str
    unit: str
    scale: float
    digits: int
    beside: str
    rises: bool
    seen: str

    def said(self, value: float) -> str:
        """The number as it is printed."""
        return f"{self.scale * value:.{self.digits}f}{self.unit}"

    def better(self, value: float, than: float) -> bool:
        """Whether a value is better than another."""
        return value > than if self.rises else value < than


ACCURACY = Measure("acc", "accuracy", " %", 100, 2, "top5", rises=True, seen="images")
BITS = Measure("bits", "bits per character", " bits", 1, 3, "acc", rises=False, seen="windows")


def measure(recipe: Recipe) -> Measure:
    """What the runs of a recipe are judged by."""
    return BITS if recipe.dataset in TEXTS else ACCURACY

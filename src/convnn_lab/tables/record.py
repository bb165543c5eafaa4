"""What a table of the thesis is: rows of a configuration and what was printed or logged for it. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Dataset: TypeAlias = Literal["cifar10", "cifar100", "imagenet", "fashion-mnist", "none"]


@dataclass(frozen=True)
class Printed:
    """The numbers of a row as the thesis prints them, digit by digit; None where it prints none.

    Args:
        loss: test loss.
        accuracy: top-1 test accuracy in percent.
        gflops: in the thesis's own count.
        parameters: with its unit, as ``"130.015M"``.
    """

    loss: str | None = None
    accuracy: str | None = None
    gflops: str | None = None
    parameters: str | None = None


@dataclass(frozen=True)
class Logged:
    """The final epoch of the author's own run of a row.

    Args:
        run: its name in the author's logs.
    """

    run: str
    loss: float
    accuracy: float
    gflops: float
    parameters: float
    """in millions"""


@dataclass(frozen=True)
class Row:
    """One row of a table, or one point of a figure.

    Args:
        label: what the row is called, as in ``"Branching, 0.5, with positions"``.
        configuration: what a preset builds the row from; see :mod:`convnn_lab.tables`.
        note: where the thesis itself is off.
    """

    label: str
    dataset: Dataset
    configuration: Mapping[str, Any]
    printed: Printed = field(default_factory=Printed)
    logged: Logged | None = None
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A table or figure, addressed by what it shows."""

    name: str
    title: str
    rows: tuple[Row, ...]

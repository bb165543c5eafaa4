"""A row of the table: its random cases, run on every backend, and the worst of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan, nan

import torch

from convnn.backends import BACKENDS, Backend
from convnn_lab.verify.drawing import Answer, Case, Problem

TOLERANCE = 1e-12  # the cases are float64

# The backends that run in double precision on any device, which is what is compared here.
ANYWHERE = {name: name for name, backend in BACKENDS.items() if backend.waits is None}


@dataclass(frozen=True)
class Comparison:
    """A row to be: what is compared with what, and on which backends."""

    operator: str
    peer: str
    case: Case
    backends: Mapping[str, str | Backend] = field(default_factory=lambda: dict(ANYWHERE))


@dataclass(frozen=True)
class Outcome:
    """What came of one case on one backend."""

    worst: str
    arguments: str
    difference: float = nan
    error: str | None = None

    @property
    def badness(self) -> tuple[bool, bool, float]:
        """What is worst is largest: an error, then a NaN, then a difference."""
        lost = isnan(self.difference)
        return self.error is not None, lost, 0.0 if lost else self.difference


@dataclass(frozen=True)
class Row:
    """One comparison: how many cases, every backend counted, and what came of the worst one."""

    operator: str
    peer: str
    cases: int
    largest_difference: float
    worst: str
    arguments: str
    error: str | None = None

    @property
    def holds(self) -> bool:
        """Whether every case agreed; a NaN does not."""
        return self.error is None and self.largest_difference <= TOLERANCE

    @property
    def verdict(self) -> str:
        """In one word."""
        return "FAILS" if self.error is not None else "equal" if self.holds else "DIFFERS"


def row(comparison: Comparison, outcomes: Sequence[Outcome]) -> Row:
    """Sum up what came of the cases."""
    worst = max(outcomes, key=lambda outcome: outcome.badness)
    return Row(
        comparison.operator,
        comparison.peer,
        len(outcomes),
        worst.difference,
        worst.worst,
        worst.arguments,
        worst.error,
    )


def outcomes(comparison: Comparison, seed: int) -> Iterator[Outcome]:
    """Draw the case of this seed and run it on every backend; whatever raises is an outcome too."""
    drawn: Problem | Exception
    try:
        torch.manual_seed(seed)
        drawn = comparison.case()
    except Exception as error:
        drawn = error
    for name, backend in comparison.backends.items():
        place = f"backend {name}, --seed {seed} --cases 1"
        if isinstance(drawn, Exception):
            yield Outcome(place, f"not drawn, seed {seed}", error=_said(drawn))
            continue
        arguments = f"{drawn.arguments}, backend {name}, seed {seed}"
        try:
            yield Outcome(place, arguments, _difference(drawn.ours(backend), drawn.theirs(), drawn.relative))
        except Exception as error:
            yield Outcome(place, arguments, error=_said(error))


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _difference(ours: Answer, theirs: Answer, relative: bool) -> float:
    """The largest difference of any two numbers; NaN if there is one."""
    pairs = zip(_parts(ours), _parts(theirs), strict=True)
    differences = []
    for our, their in pairs:
        if our.shape != their.shape or our.dtype != their.dtype:
            came = f"{our.dtype} {tuple(our.shape)} for {their.dtype} {tuple(their.shape)}"
            raise ValueError(f"the answers are not of one type and shape: {came}")
        difference = (our - their).detach().abs()
        differences.append((difference / their.detach().abs().clamp(min=1) if relative else difference).max())
    return torch.stack(differences).max().item()


def _parts(answer: Answer) -> list[torch.Tensor]:
    """The tensors of an answer."""
    several = answer if isinstance(answer, tuple) else (answer,)
    return [part for part in several if part is not None]

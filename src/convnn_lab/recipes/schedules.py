"""Schedules as words of a recipe. Nothing here imports torch, so that help answers at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["k", "share", "temperature", "selection"]
HOW = {
    "k": "k's such as all,25,9 or all@0,25@2,9@4",
    "share": "shares such as 0..1, 0..1@4 or 0,0.5@2,1@4",
    "temperature": "temperatures such as 1..0.1 or 1,0.5@2",
    "selection": "temperatures such as 1..0.05 or 1,0.1@2,0@4",
}


@dataclass(frozen=True)
class Words:
    """A schedule that was written down: values and the epochs they begin at, or two ends and how long it takes.

    Args:
        kind: what it is of.
        values: one after the other, or the two ends.
        times: the epochs at which each begins; of a line, the epoch at which it ends.
        line: whether it moves from one end to the other all the time.
    """

    kind: Kind
    values: tuple[float | str, ...]
    times: tuple[float, ...]
    line: bool


def read(flag: str, kind: Kind, said: str, epochs: int) -> Words:
    """Read a schedule for a run of so many epochs: values without times share the run evenly.

    Example:
        >>> read("--morph-k", "k", "all,25,9", 6).times
        (0.0, 2.0, 4.0)
        >>> read("--morph-share", "share", "0..1@4", 6)
        Words(kind='share', values=(0.0, 1.0), times=(4.0,), line=True)
    """
    try:
        words = _line(kind, said, epochs) if ".." in said else _stages(kind, said, epochs)
        _check(words)
    except ValueError as error:
        reason = f" ({error})" if str(error) else ""
        raise ValueError(f"{flag} must be {HOW[kind]}, got {said!r}{reason}") from None
    return words


def _line(kind: Kind, said: str, epochs: int) -> Words:
    ends, _, end = said.partition("@")
    first, last = ends.split("..")
    if kind == "k":
        raise ValueError("k goes from one whole number to the next: name them")
    over = float(end) if end else float(epochs)
    if not 0 < over <= epochs:
        raise ValueError(f"it must end within the {epochs} epochs")
    return Words(kind, (_value(kind, first), _value(kind, last)), (over,), True)


def _stages(kind: Kind, said: str, epochs: int) -> Words:
    parts = [part.partition("@") for part in said.split(",")]
    values = tuple(_value(kind, value) for value, _, _ in parts)
    if any(at for _, at, _ in parts[1:]):
        times = tuple(float(time) if at else 0.0 for _, at, time in parts)
    else:
        times = tuple(epochs * number / len(parts) for number in range(len(parts)))
    if times[0] != 0 or list(times) != sorted(set(times)) or times[-1] >= epochs:
        raise ValueError(f"stages must begin at 0 and one after the other, within the {epochs} epochs")
    return Words(kind, values, times, False)


def _value(kind: Kind, said: str) -> float | str:
    if kind == "k":
        return said if said == "all" else int(said)
    return float(said)


def _check(words: Words) -> None:
    for value in words.values:
        if isinstance(value, str):
            continue
        if words.kind == "k" and value < 1:
            raise ValueError("k must be at least 1")
        if words.kind == "share" and not 0 <= value <= 1:
            raise ValueError("a share is from 0 to 1")
        # A line of temperatures falls by factors, and 0 is infinitely many of them away.
        least = value >= 0 if words.kind == "selection" and not words.line else value > 0
        if words.kind in ("temperature", "selection") and not (least and value < float("inf")):
            raise ValueError("a temperature must be greater than 0; a selection may end hard, at a stage of 0")

"""How the tests of this folder call the command, stop it, and read what it wrote."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

from convnn_lab.train.callbacks import Keeper
from convnn_lab.train.run import Run

Call = Callable[..., int]


def written(output: Path, name: str = "results.csv") -> list[dict[str, str]]:
    with (output / "tiny" / name).open(newline="") as file:
        return list(csv.DictReader(file))


def epochs(run: Run) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in run.rows()]


def stop_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Let a run believe, after so many steps, that its time is up."""
    seen = []

    def must_stop(keeper: Keeper) -> bool:
        seen.append(keeper)
        keeper.asked = "--max-time" if len(seen) >= steps else ""
        return bool(keeper.asked)

    monkeypatch.setattr(Keeper, "_must_stop", must_stop)

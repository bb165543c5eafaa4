"""The tables of the thesis, counted again: parameters and operations of every row, beside what was printed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from math import floor
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table as Drawn

from convnn_lab.tables import TABLES, Row, Table


@dataclass(frozen=True)
class Counted:
    """A row with what it counts to.

    Args:
        convention: operations as the thesis counted them.
        true: two for every multiplication with addition of the published architecture.
        executed: what this library computes for it.
    """

    row: Row
    parameters: int
    convention: int
    true: int
    executed: int

    @property
    def agrees(self) -> bool:
        """Whether every printed number is the counted one, cut off where the thesis cuts."""
        return not self.differences

    @property
    def explained(self) -> bool:
        """Whether the note of the row speaks of every number that differs."""
        return all(name in self.row.note for name in self.differences)

    @property
    def differences(self) -> dict[str, str]:
        """Ours minus the printed number, where it is another."""
        printed = self.row.printed
        ours = {"parameters": cut(self.parameters / 1e6, 3), "GFLOPS": self.gflops(printed.gflops)}
        given = {"parameters": (printed.parameters or "").removesuffix("M"), "GFLOPS": printed.gflops or ""}
        return {
            name: f"{float(ours[name]) - float(said):+.3f}"
            for name, said in given.items()
            if said and float(said) != float(ours[name])
        }

    def gflops(self, like: str | None) -> str:
        """The thesis's count with as many digits as it prints."""
        digits = 3 if like is None else len(like.partition(".")[2])
        return cut(self.convention / 1e9, digits)


def cut(number: float, digits: int) -> str:
    """Write a number cut off after so many digits, as the thesis does."""
    return f"{floor(number * 10**digits + 1e-6) / 10**digits:.{digits}f}"


def static(chosen: Sequence[Row]) -> list[Counted]:
    """Count parameters and operations of rows that are models."""
    counted = []
    console = Console()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for row in progress.track(chosen, description="counting"):
            if "model" in row.configuration:
                told = {name: value for name, value in row.configuration.items() if name not in ("lr", "epochs")}
                counted.append(Counted(row, *_counts(tuple(sorted(told.items())), row.dataset)))
    return counted


@cache
def _counts(configuration: tuple[tuple[str, Any], ...], dataset: str) -> tuple[int, int, int, int]:
    from convnn_lab.tables.flops import count, executed
    from convnn_lab.tables.presets import build, image_size

    row = dict(configuration)
    model = build(row, dataset, device="meta").eval()
    flops = count(model, image_size(row), fused=bool(row.get("fused")))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return parameters, flops.thesis, flops.true, executed(model, image_size(row))


def show(of: Table, counted: Sequence[Counted]) -> None:
    """Print the table: thesis, ours, difference."""
    drawn = Drawn(title=f"{of.name}: {of.title}", box=SIMPLE, caption="GFLOPS: the thesis's count, twice the "
                  "multiplications with addition, and what this library computes")  # fmt: skip
    for name in ("row", "data"):
        drawn.add_column(name)
    for name in ("parameters", "ours", "GFLOPS", "ours", "true", "executed"):
        drawn.add_column(name, justify="right", no_wrap=True)
    drawn.add_column("difference")
    for each in counted:
        printed = each.row.printed
        said = [printed.parameters or "-", f"{each.parameters:,}", printed.gflops or "-", each.gflops(printed.gflops)]
        said += [f"{each.true / 1e9:.3f}", f"{each.executed / 1e9:.3f}"]
        drawn.add_row(
            each.row.label,
            each.row.dataset,
            *said,
            ", ".join(f"{name} {by}" for name, by in each.differences.items()) or "0",
        )
    console = _console()
    console.print(drawn)
    notes: dict[str, list[str]] = {}
    for each in counted:
        if each.row.note:
            notes.setdefault(each.row.note, []).append(f"{each.row.label}, {each.row.dataset}")
    for note, labels in notes.items():
        some = "; ".join(labels[:3]) + ("; ..." if len(labels) > 3 else "")
        console.print(f"- {note} ({some})", markup=False, highlight=False)
    differing = sum(not each.agrees for each in counted)
    console.print(f"{len(counted)} rows, {differing} with a printed number that differs", highlight=False)


def as_json(of: Table, counted: Sequence[Counted]) -> str:
    """Write the table for machines."""
    said = []
    for each in counted:
        flops = {"thesis": each.convention, "true": each.true, "executed": each.executed}
        row = asdict(each.row) | {"configuration": dict(each.row.configuration)}
        told = {"agrees": each.agrees, "differences": each.differences}
        said.append({**row, "parameters": each.parameters, "flops": flops, **told})
    return json.dumps({"table": of.name, "title": of.title, "rows": said}, indent=2) + "\n"


def listed() -> None:
    """Print which tables there are."""
    drawn = Drawn(box=SIMPLE)
    drawn.add_column("table")
    drawn.add_column("shows")
    drawn.add_column("rows", justify="right")
    for each in TABLES.values():
        drawn.add_row(each.name, each.title, str(len(each.rows)))
    _console().print(drawn)


def _console() -> Console:
    """As wide as the terminal, and wide enough for a table: numbers are never cut."""
    console = Console()
    return Console(width=max(console.width if console.is_terminal else 160, 130))

"""The two tables of the thesis that are of single layers: how fast the fused kernel is, and how exact."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table as Drawn

from convnn import ConvNNAttention
from convnn_lab.bench import correctness, measure, plain
from convnn_lab.bench.layer import Around, check_layer
from convnn_lab.bench.report import headline, surroundings
from convnn_lab.tables import Table
from convnn_lab.train import store


@dataclass(frozen=True)
class Quantity:
    """A number of a layer: what the thesis prints, on an H100, and what is measured here."""

    row: str
    quantity: str
    thesis: str
    ours: str


def measured(table: Table) -> list[Quantity]:
    """Measure a table of layers."""
    return KINDS[table.name](table)


def _correctness(table: Table) -> list[Quantity]:
    """Largest differences in float32 between the default backend, the plain implementation and float64."""
    (row,) = table.rows
    printed = [value for name, value in row.configuration.items() if name.startswith("printed_")]
    shape = {name: row.configuration[name] for name in ("batch", "tokens", "heads", "k")}
    pairs = correctness.differences(
        **shape, dim=row.configuration["width"], device="cuda" if torch.cuda.is_available() else "cpu"
    )
    return [
        Quantity(pair.pair, name, said if number == 0 else "", f"{value:.2e}")
        for number, pair in enumerate(pairs)
        for name, said, value in zip(correctness.QUANTITIES, printed, pair.largest, strict=True)
    ]


def _speed(table: Table, device: str = "cuda") -> list[Quantity]:
    """Milliseconds and mebibytes in float32, by graph replay, for the 8 neighbours of the caption and the text's 9."""
    measure.require_device()
    found = []
    told = table.rows[0].configuration
    x = torch.randn(told["batch"], told["tokens"], told["width"], device=device)
    for k in (told["k"], told["k"] + 1):
        layer = ConvNNAttention(told["width"], told["heads"], k=k, device=device)
        check_layer(f"{table.name}, k = {k}", layer, x)
        ways: dict[str, Any] = {"Original": Around(layer, partial(plain.convnn, k=k)), "Triton": layer}
        for row in table.rows:
            cost = asdict(measure.cost(ways[row.label], [x], list(layer.parameters())))
            measure.release()
            for way in ("forward", "backward"):
                ours = {"ms": cost[way] / 1e3, "mb": cost[f"memory_{way}"]}
                for unit, value in ours.items():
                    said = row.configuration[f"printed_{way}_{unit}"]
                    found.append(Quantity(f"{row.label}, k = {k}", f"{way}, {unit}", said, f"{value:.3f}"))
    return found


KINDS: dict[str, Callable[[Table], list[Quantity]]] = {"fast-speed": _speed, "fast-correctness": _correctness}


def write(path: Path, table: Table, found: list[Quantity]) -> None:
    """Write what was measured, and on what."""
    about, text = surroundings(), io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["table", "row", "quantity", "thesis", "ours", *about])
    writer.writerows([table.name, *asdict(each).values(), *about.values()] for each in found)
    with store.storing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    store.write(path, text.getvalue())


def show(table: Table, found: list[Quantity]) -> None:
    """Print it."""
    drawn = Drawn(title=f"{table.name}: {table.title}", box=SIMPLE, caption=headline(surroundings()))
    for name in ("row", "quantity"):
        drawn.add_column(name)
    for name in ("thesis", "ours"):
        drawn.add_column(name, justify="right")
    for each in found:
        drawn.add_row(each.row, each.quantity, each.thesis or "-", each.ours)
    console = Console()
    (console if console.is_terminal else Console(width=120)).print(drawn)

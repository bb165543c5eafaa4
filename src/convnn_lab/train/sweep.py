"""Several runs that differ in some fields: run what is missing, resume what was stopped, one table and one figure."""

from __future__ import annotations

import csv
import io
import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from convnn_lab.recipes import Recipe
from convnn_lab.tables.flops import count
from convnn_lab.train import figures, fit, store, surroundings
from convnn_lab.train.build import build, irrelevant
from convnn_lab.train.measure import ACCURACY, Measure, measure
from convnn_lab.train.module import NonFiniteError
from convnn_lab.train.run import Row, Run, averaged
from convnn_lab.train.source import load


@dataclass(frozen=True)
class Point:
    """One run of a sweep: what it differs in, and its recipe."""

    differs: Mapping[str, str]
    recipe: Recipe

    @property
    def name(self) -> str:
        """The name of its folder."""
        said = ",".join(f"{name}={value}" for name, value in self.differs.items())
        return said.replace("/", "_").replace(":", "-") or "run"


@dataclass(frozen=True)
class Result:
    """Runs that differ in their seed alone."""

    differs: Mapping[str, str]
    finals: tuple[float, ...]
    losses: tuple[float, ...]
    bests: tuple[float, ...]
    parameters: int
    flops: int
    seconds: float
    rows: tuple[Row, ...]
    failed: int = 0
    measure: Measure = ACCURACY


def points(axes: Mapping[str, Sequence[str]], read: Callable[[Mapping[str, str]], Recipe]) -> list[Point]:
    """Every combination of the values of some fields; what is wrong with any of them is said before the first runs."""
    combined = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
    return [Point(each, read(each)) for each in combined]


def run_all(name: str, folder: Path, asked: Sequence[Point], *, max_seconds: float | None = None) -> list[Result]:
    """Run what is missing; the results of all that finished."""
    deadline = None if max_seconds is None else time.monotonic() + max_seconds
    source = load(asked[0].recipe)
    for point in asked:
        build(point.recipe, source.channels, source.size, len(source.classes), device="meta")
        there = Run(folder / point.name)
        if there.exists and not _same(there.recipe()[1], point.recipe):
            raise ValueError(f"{there.folder} holds a run of another recipe; choose another --output")
    _require_distinct(asked)
    failed = set()
    for number, point in enumerate(asked):
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            break
        if surroundings.global_rank(point.recipe.devices) == 0:
            sys.stdout.write(f"[{number + 1}/{len(asked)}] {point.name}\n")
            sys.stdout.flush()
        try:
            run = _run(name, folder / point.name, point.recipe, left)
        except NonFiniteError as error:
            sys.stdout.write(f"{error}\n")
            failed.add(point.name)
            continue
        if not run.finished and run.interrupted:
            raise KeyboardInterrupt
    results = _results(folder, asked, failed)
    if surroundings.global_rank(asked[0].recipe.devices) == 0:
        _write(folder, results)
    return results


def _require_distinct(asked: Sequence[Point]) -> None:
    """Refuse fields that change nothing, and runs that would be the same."""
    for field in asked[0].differs:
        if all(field in irrelevant(point.recipe) for point in asked):
            recipe = asked[0].recipe
            flag = f"--{field.replace('_', '-')}"
            raise ValueError(f"{flag} means nothing to {recipe.model} with layer {recipe.layer}; leave it out")
    for number, point in enumerate(asked):
        for other in asked[:number]:
            if point.recipe == other.recipe:
                raise ValueError(f"{other.name} and {point.name} are the same run; name it once")


def _run(name: str, folder: Path, recipe: Recipe, left: float | None) -> Run:
    limit = recipe.max_time if left is None else f"{left:.3f}s"
    if Run(folder).exists:
        return fit.resume(folder, max_time=limit)
    return fit.train(name, replace(recipe, max_time=limit), folder)


def _same(one: Recipe, other: Recipe) -> bool:
    def plain(recipe: Recipe) -> Recipe:
        resolved = None if recipe.data_dir is None else recipe.data_dir.resolve()
        return replace(recipe, max_time=None, data_dir=resolved)

    return plain(one) == plain(other)


def _results(folder: Path, asked: Sequence[Point], failed: set[str]) -> list[Result]:
    groups: dict[tuple[tuple[str, str], ...], list[Point]] = {}
    for point in asked:
        key = tuple((name, value) for name, value in point.differs.items() if name != "seed")
        groups.setdefault(key, []).append(point)
    results = []
    for key, members in groups.items():
        runs = [run for run in (Run(folder / point.name) for point in members) if run.exists and run.finished]
        lost = sum(point.name in failed for point in members)
        if not runs and not lost:
            continue
        summaries: list[Any] = [run.summary() for run in runs]
        recipe = members[0].recipe
        judged = f"val_{measure(recipe).name}"
        results.append(
            Result(
                dict(key),
                tuple(each["final"][judged] for each in summaries),
                tuple(each["final"]["val_loss"] for each in summaries),
                tuple(each["best"][judged] for each in summaries),
                summaries[0]["parameters"] if summaries else 0,
                _flops(recipe, runs[0]) if runs else 0,
                mean(each["seconds"] for each in summaries) if summaries else 0.0,
                tuple(averaged([run.rows() for run in runs])),
                lost,
                measure(recipe),
            )
        )
    return results


def _flops(recipe: Recipe, run: Run) -> int:
    about = store.read_json(run.folder / "data.json")
    model = build(recipe, about["channels"], about["size"], len(about["classes"]), device="meta").eval()
    return count(model, about["size"], published=False).true


def _spread(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def _write(folder: Path, results: Sequence[Result]) -> None:
    """One table and one figure."""
    fields, by = (list(results[0].differs), results[0].measure) if results else ([], ACCURACY)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    judged = [f"val_{by.name}", f"val_{by.name}_std", "val_loss", f"best_val_{by.name}"]
    writer.writerow([*fields, *judged, "seeds", "parameters", "flops", "seconds"])
    for each in results:
        if each.finals:
            measured = [mean(each.finals), _spread(each.finals), mean(each.losses), mean(each.bests)]
            numbers = [*map(repr, measured), len(each.finals), each.parameters, each.flops, repr(each.seconds)]
            writer.writerow([*each.differs.values(), *numbers])
    with store.storing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    store.write(folder / "table.csv", text.getvalue())
    drawn = {label(each.differs): each.rows for each in results if each.rows}
    if drawn:
        figures.curves(folder / "curves.png", drawn, by)


def label(differs: Mapping[str, str]) -> str:
    """What a line of the table or the figure is called."""
    return " ".join(value if name == "layer" else f"{name} {value}" for name, value in differs.items()) or "all seeds"


def show(title: str, results: Sequence[Result]) -> None:
    """Print the table; what runs are judged by is that of the last epoch."""
    drawn, by = Table(title=title, box=SIMPLE), results[0].measure if results else ACCURACY
    drawn.add_column("")
    for name in (f"test {by.title}", "best epoch", "test loss", "seeds", "parameters", "MFLOPs", "time"):
        drawn.add_column(name, justify="right")
    for each in results:
        if not each.finals:
            drawn.add_row(label(each.differs), "not finite", *[""] * 6)
            continue
        spread = f" ± {by.scale * _spread(each.finals):.{by.digits}f}" if len(each.finals) > 1 else ""
        drawn.add_row(
            label(each.differs),
            f"{by.said(mean(each.finals))}{spread}",
            by.said(mean(each.bests)),
            f"{mean(each.losses):.4f}",
            str(len(each.finals)),
            f"{each.parameters:,}",
            f"{each.flops / 1e6:,.2f}",
            f"{each.seconds:.1f} s",
        )
    console = Console()
    (console if console.is_terminal else Console(width=120)).print(drawn)

"""Reads what came of rows: the finished runs of each, pooled over seeds, and runs on their way."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from convnn_lab.recipes import Recipe
from convnn_lab.rerun.plan import Job, homes, plain, recipe_of, trained
from convnn_lab.rerun.records import EPOCH, Going, Result
from convnn_lab.tables import Row, Table
from convnn_lab.tables.flops import count
from convnn_lab.train import store
from convnn_lab.train.build import build
from convnn_lab.train.run import Row as Epoch
from convnn_lab.train.run import Run


def collect(table: Table, output: Path, at: int | None = None) -> list[Result]:
    """The finished runs of every row, whichever call or table trained them.

    Args:
        at: so many first epochs instead, of all runs that have them; where the rate is constant they are a run of their
            own.
    """
    there = homes(output)
    found = []
    for row in table.rows:
        if trained(row):
            found += _of_row(row, there[recipe_of(row)[1]], at)
    return found


def going(table: Table, output: Path) -> list[Going]:
    """The runs that have epochs and have not finished."""
    there = homes(output)
    found = []
    for row in table.rows:
        for run in _runs(there[recipe_of(row)[1]] if trained(row) else None):
            with _leaving_out():
                rows = () if run.finished else tuple(_epochs(run))
                if rows:
                    found.append(Going(row, Job(run.recipe()[0], _of(row, run), run.folder), rows, (_device(run),)))
    return found


def _runs(home: Path | None) -> list[Run]:
    """The runs of a row, by their seeds."""
    folders = [] if home is None else sorted(home.glob("seed-*"), key=lambda path: (len(path.name), path.name))
    return [run for run in map(Run, folders) if run.exists]


@contextmanager
def _leaving_out() -> Iterator[None]:
    """Let a run that is damaged hide no others."""
    try:
        yield
    except (ValueError, OSError) as error:
        sys.stderr.write(f"convnn: note: left out: {error}\n")


def _of_row(row: Row, home: Path, at: int | None) -> list[Result]:
    groups: dict[Any, list[Run]] = {}
    for run in _runs(home):
        with _leaving_out():
            if run.finished if at is None else len(run.rows()) >= at:
                groups.setdefault((replace(_recipe(row, run, at), seed=0), run.counts()), []).append(run)
    found = []
    for runs in groups.values():
        with _leaving_out():
            found.append(_result(row, runs, at))
    return found


def _epochs(run: Run) -> list[Epoch]:
    """The epochs of a run, once all that is quoted of them is known to be there."""
    rows = run.rows()
    lacking = [name for name in EPOCH if any(name not in row for row in rows)]
    if lacking:
        raise ValueError(f"{run.folder / 'metrics.csv'} lacks {', '.join(lacking)}")
    return rows


def _of(row: Row, run: Run) -> Recipe:
    """What a run is run by."""
    recipe = plain(run.recipe()[1])
    if _freed(recipe) != _freed(recipe_of(row)[1]):
        raise ValueError(f"{run.folder} holds a run of another recipe than {row.label} on {row.dataset}")
    return recipe


def _recipe(row: Row, run: Run, at: int | None) -> Recipe:
    """What a run, or its first epochs, were run by, once all that is quoted is known to be there."""
    recipe = _of(row, run)
    if at is not None and (recipe.schedule != "constant" or recipe.warmup):
        raise ValueError(f"the rate of {run.folder} depends on its length: its beginning is no run of its own")
    recipe = recipe if at is None else replace(recipe, epochs=at)
    if [int(epoch["epoch"]) for epoch in _epochs(run)[:at]] != list(range(recipe.epochs)):
        raise ValueError(f"{run.folder / 'metrics.csv'} does not have the {recipe.epochs} epochs of the run")
    _device(run)
    return recipe


def _freed(recipe: Recipe) -> Recipe:
    """A recipe without what a call may choose."""
    told: dict[str, Any] = {"precision": "float32", "deterministic": False, "compile": False}
    return replace(plain(recipe), seed=0, epochs=1, warmup=0.0, **told)


def _result(row: Row, runs: Sequence[Run], at: int | None) -> Result:
    name, recipe = runs[0].recipe()
    recipe = recipe if at is None else replace(recipe, epochs=at)
    return Result(
        row,
        Job(name, recipe, runs[0].folder),
        tuple(tuple(run.rows()[:at]) for run in runs),
        tuple(run.recipe()[1].seed for run in runs),
        min(int(row.configuration.get("epochs", recipe.epochs)), recipe.epochs),
        tuple(map(_device, runs)),
        *_counts(replace(plain(recipe), seed=0), runs[0].folder / "data.json"),
    )


def _device(run: Run) -> str:
    """What a run was on when it was last started."""
    path = run.folder / "environment.json"
    started = store.read_json(path)
    try:
        gpus = started[-1]["gpus"]
        return str(gpus[0]) if gpus and run.recipe()[1].accelerator != "cpu" else "cpu"
    except (IndexError, KeyError, TypeError):
        raise ValueError(f"{path} must hold a list of starts with their gpus, got {str(started)[:60]}") from None


@cache
def _counts(recipe: Recipe, about: Path) -> tuple[int, float]:
    """Parameters, and true GFLOPS."""
    said = store.read_json(about)
    model = build(recipe, said["channels"], said["size"], len(said["classes"]), device="meta").eval()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return parameters, count(model, said["size"], published=recipe.published).true / 1e9

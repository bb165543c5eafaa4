"""Epochs that were written beside a table, taken for runs: what they are long enough for need not be trained again."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import isfinite
from pathlib import Path
from typing import Any

from convnn_lab.recipes import Recipe
from convnn_lab.rerun import plan
from convnn_lab.rerun.plan import Job
from convnn_lab.rerun.records import EPOCH
from convnn_lab.rerun.report import EPOCHS
from convnn_lab.tables import TABLES
from convnn_lab.train import store
from convnn_lab.train.run import Row as Epoch
from convnn_lab.train.run import Run
from convnn_lab.train.source import load


@dataclass(frozen=True)
class Known:
    """A run that a file tells of.

    Args:
        recipe: what it was run by; None where no row is called so any more.
        epochs: those it has, of however many its recipe has.
    """

    recipe: Recipe | None
    device: str
    epochs: tuple[Epoch, ...]


def read(path: Path) -> list[Known]:
    """The runs of a file of epochs, as ``convnn reproduce`` writes it."""
    try:
        with path.open(newline="") as file:
            names, *lines = list(csv.reader(file)) or [list(EPOCHS)]
        if names != list(EPOCHS):
            raise ValueError(f"columns must be {', '.join(EPOCHS)}, got {', '.join(names)}")
        about = [name for name in EPOCHS if name not in EPOCH]
        return [
            _known(dict(zip(about, whose, strict=True)), tuple(_epoch(line) for line in of))
            for whose, of in groupby(lines, key=lambda line: tuple(line[: len(about)]))
        ]
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def _epoch(line: list[str]) -> Epoch:
    said = dict(zip(EPOCHS, line, strict=True))
    epoch = {name: float(said[name]) for name in EPOCH}
    if not all(map(isfinite, epoch.values())):
        raise ValueError(f"every number must be finite, got {','.join(line)}")
    return epoch


def _known(whose: dict[str, str], epochs: tuple[Epoch, ...]) -> Known:
    if [epoch["epoch"] for epoch in epochs] != list(range(len(epochs))) or len(epochs) > int(whose["of"]):
        raise ValueError(f"{whose['row']} with seed {whose['seed']} must have epochs from 0 on, at most {whose['of']}")
    if whose["compiled"] not in ("True", "False") or not whose["device"]:
        raise ValueError(f"compiled must be True or False and a device named, got {whose}")
    rows = TABLES[whose["table"]].rows if whose["table"] in TABLES else ()
    found = [row for row in rows if (row.label, row.dataset) == (whose["row"], whose["dataset"])]
    how: Any = {"precision": whose["precision"], "compile": whose["compiled"] == "True", "seed": int(whose["seed"])}
    recipe = replace(plan.recipe_of(found[0])[1], **how, epochs=int(whose["of"])) if found else None
    return Known(recipe, whose["device"], epochs)


def adopt(asked: Sequence[Job], files: Iterable[Path]) -> list[Job]:
    """Make folders of finished runs out of those that files tell of; the jobs that need not be trained for it.

    A longer run at a constant rate is the one asked for, too. What has begun is left as it is.
    """
    there = [known for path in files for known in read(path)]
    adopted = []
    for job in asked:
        known = None if Run(job.folder).exists else _like(job.recipe, there)
        if known is not None:
            _make(job, known)
            adopted.append(job)
    return adopted


def _make(job: Job, known: Known) -> None:
    """Make a folder, which is there as a whole or not at all."""
    Run(job.folder).require_new()
    run = Run(job.folder.with_name(f".{job.folder.name}"))
    run.remove()
    run.create(job.recipe_name, job.recipe, load(job.recipe))
    run.started({"gpus": [] if known.device == "cpu" else [known.device]})
    run.write_rows(list(known.epochs[: job.recipe.epochs]))
    store.write_json(run.folder / "summary.json", {"status": "finished", "published": True})
    Run(job.folder).remove()  # what a process that was killed in its first moment left
    with store.storing(job.folder):
        run.folder.replace(job.folder)


def _like(recipe: Recipe, there: Sequence[Known]) -> Known | None:
    """A run that is one of a recipe, or at a constant rate begins with it."""
    steady = recipe.schedule == "constant" and not recipe.warmup
    for known in there:
        if known.recipe is None or len(known.epochs) < recipe.epochs:
            continue
        was = replace(known.recipe, epochs=recipe.epochs) if steady else known.recipe
        if plan.plain(was) == plan.plain(recipe):
            return known
    return None

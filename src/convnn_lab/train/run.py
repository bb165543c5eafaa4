"""A run's folder: what was asked for, what was measured, and where it can be taken up again.

config.json         the recipe, written before the first step
environment.json    what it ran on, one entry for each start
metrics.csv         one row for each epoch
summary.json        the last and the best epoch, and how it ended
curves.png          loss and accuracy
kernels/            what the kernels were at the start and after each epoch
data.json           what pictures must look like, and what the classes are called
checkpoints/        last, previous and best, each with weights.safetensors
"""

from __future__ import annotations

import csv
import fcntl
import io
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from statistics import mean
from typing import Any

from convnn_lab.recipes import Recipe, from_dict
from convnn_lab.train import store

Row = dict[str, float]


class Run:
    """A run on disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.interrupted = False  # by a signal, in this process

    @property
    def checkpoints(self) -> Path:
        """Where weights are."""
        return self.folder / "checkpoints"

    @property
    def exists(self) -> bool:
        """Whether there is a run."""
        return (self.folder / "config.json").exists()

    def require_new(self) -> None:
        """Refuse a folder that holds anything."""
        folder = self.folder
        if self.exists:
            raise ValueError(f"{folder} holds a run already; convnn train --resume {folder} goes on with it")
        begun = {"data.json", ".lock"}  # what a process killed in its first moment leaves
        if folder.exists() and (not folder.is_dir() or any(each.name not in begun for each in folder.iterdir())):
            raise ValueError(f"--output must name a new or empty folder, got {folder}")

    def create(self, name: str, recipe: Recipe, source: Any) -> None:
        """Begin a run: what its data look like, then what was asked for."""
        with store.storing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        names = ("classes", "channels", "native", "size", "mean", "std", "train_count", "test_count")
        store.write_json(self.folder / "data.json", {name: getattr(source, name) for name in names})
        # Time is given to a process, not to a run.
        store.write_json(self.folder / "config.json", {"recipe": name, **recipe.as_dict(), "max_time": None})

    def counts(self) -> tuple[int | None, int | None]:
        """How many samples it learns from and is tested on; None in runs that did not note it."""
        about = store.read_json(self.folder / "data.json")
        return about.get("train_count"), about.get("test_count")

    def require_same(self, source: Any) -> None:
        """Refuse data that are not as many as at the start."""
        began, now = self.counts(), (source.train_count, source.test_count)
        if None not in began and began != now:
            said = " and ".join(f"{count:,}" for count in began if count is not None)
            raise ValueError(
                f"{self.folder} learns from and is tested on {said} samples, got {now[0]:,} and {now[1]:,}"
            )

    def remove(self) -> None:
        """Take a run away of which nothing came."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @classmethod
    def open(cls, folder: Path) -> Run:
        """Open a run that is there."""
        run = cls(folder)
        if not run.exists:
            raise ValueError(f"{folder} holds no run: there is no config.json in it")
        return run

    def recipe(self) -> tuple[str, Recipe]:
        """The name of its recipe, and the recipe."""
        given = store.read_json(self.folder / "config.json")
        if not isinstance(given, dict):
            raise ValueError(f"{self.folder / 'config.json'} must hold an object, got {type(given).__name__}")
        name = str(given.pop("recipe", "run"))
        try:
            return name, from_dict(given)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.folder / 'config.json'} is no recipe: {error}") from None

    def summary(self) -> dict[str, Any] | None:
        """How it ended, if it did; one that cannot be read is none, and a run that goes on writes it anew."""
        path = self.folder / "summary.json"
        try:
            return store.read_json(path) if path.exists() else None
        except ValueError:
            return None

    @property
    def finished(self) -> bool:
        """Whether it ran to its last epoch."""
        return (self.summary() or {}).get("status") == "finished"

    def rows(self) -> list[Row]:
        """The epochs that were measured."""
        path = self.folder / "metrics.csv"
        if not path.exists():
            return []
        try:
            with path.open(newline="") as file:
                return [{name: float(text) for name, text in row.items() if text} for row in csv.DictReader(file)]
        except (ValueError, TypeError, csv.Error) as error:
            raise ValueError(f"{path} is damaged: {error}") from None

    def write_rows(self, rows: list[Row]) -> None:
        """Write the epochs anew: an epoch has one row, however often it was begun."""
        names = list(dict.fromkeys(name for row in rows for name in row))
        text = io.StringIO()
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {name: int(value) if name == "epoch" else repr(float(value)) for name, value in row.items()} for row in rows
        )
        store.write(self.folder / "metrics.csv", text.getvalue())

    def started(self, environment: dict[str, Any]) -> None:
        """Note a start, and what it happens on."""
        path = self.folder / "environment.json"
        starts = store.read_json(path) if path.exists() else []
        began = {"time": datetime.now().astimezone().isoformat(timespec="seconds"), "command": sys.argv}
        store.write_json(path, [*starts, {**began, **environment}])

    def last(self, warn: Any) -> Path | None:
        """The newest checkpoint that is whole, or None where none was written yet."""
        seen = False
        for name in ("last", "previous"):
            folder = self.checkpoints / name
            if not folder.exists():
                continue
            wrong = store.damage(folder)
            if wrong is None:
                return folder
            seen = True
            warn(f"checkpoint {folder} is damaged: {wrong}")
            aside = self.checkpoints / "damaged"
            shutil.rmtree(aside, ignore_errors=True)
            with suppress(OSError):  # another process of the run may have been faster
                os.replace(folder, aside)  # so that no whole one makes way for it
        if seen:
            warn("no checkpoint is whole; the run starts again from its first step")
        return None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let no other process train in this folder; the lock goes with the process, however that ends."""
        with (self.folder / ".lock").open("w") as file:
            for left in reversed(range(100)):
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    # What a killed process started to read images holds the lock a few seconds longer.
                    if not left:
                        raise ValueError(f"another process is training in {self.folder}") from None
                    time.sleep(0.1)
                except OSError:
                    break  # a file system without locks
            yield


def averaged(runs: Sequence[Sequence[Row]]) -> list[Row]:
    """The mean over runs of every number of every epoch."""
    return [
        {name: mean(row[name] for row in rows) for name in rows[0] if all(name in row for row in rows)}
        for rows in zip(*runs, strict=False)
    ]


def default_folder(name: str, recipe: Recipe) -> Path:
    """Where a run goes that was not told where: named by recipe, layer and time."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{name}-{recipe.layer}-{stamp}"

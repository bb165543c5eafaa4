"""What came of rows: finished runs of each, pooled over seeds, and runs on their way."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from convnn_lab.recipes import Recipe
from convnn_lab.rerun.plan import Job, homes, plain, recipe_of, trained
from convnn_lab.tables import Row, Table
from convnn_lab.tables.flops import count
from convnn_lab.train import store
from convnn_lab.train.build import build
from convnn_lab.train.run import Row as Epoch
from convnn_lab.train.run import Run

# What is quoted of an epoch.
EPOCH = ("epoch", "train_loss", "train_acc", "val_loss", "val_acc", "seconds")
LATE = 10  # epochs at the end of a run, of which the mean moves less than the last one does


@dataclass(frozen=True)
class Result:
    """Runs of a row that differ in their seed alone; numbers are those of the last epoch, or the one the row is of.

    Args:
        runs: the epochs of each run.
        devices: what each was last on.
        epochs: how many the numbers are quoted after.
        gflops: two for every multiplication with addition of the published architecture.
    """

    row: Row
    job: Job
    runs: tuple[tuple[Epoch, ...], ...]
    seeds: tuple[int, ...]
    epochs: int
    devices: tuple[str, ...]
    parameters: int
    gflops: float

    @property
    def accuracies(self) -> tuple[float, ...]:
        """Of each run, in percent."""
        return tuple(100 * run[self.epochs - 1]["val_acc"] for run in self.runs)

    @property
    def losses(self) -> tuple[float, ...]:
        """Test losses."""
        return tuple(run[self.epochs - 1]["val_loss"] for run in self.runs)

    @property
    def bests(self) -> tuple[float, ...]:
        """The accuracies of the best epochs."""
        return tuple(100 * max(epoch["val_acc"] for epoch in run[: self.epochs]) for run in self.runs)

    @property
    def lasts(self) -> tuple[tuple[float, ...], ...]:
        """The accuracies of the last ten epochs of each run, or the last third; one epoch is not like the next."""
        late = min(LATE, self.epochs // 3)
        ends = [run[self.epochs - late : self.epochs] for run in self.runs if late > 1]
        return tuple(tuple(100 * epoch["val_acc"] for epoch in end) for end in ends)

    @property
    def device(self) -> str:
        """What the runs were on."""
        return ", ".join(dict.fromkeys(self.devices))

    @property
    def seconds(self) -> float:
        """What the epochs of a run took, in the mean."""
        return mean(sum(epoch["seconds"] for epoch in run) for run in self.runs)

    @property
    def curves(self) -> tuple[Epoch, ...]:
        """The mean over seeds of every number of every epoch."""
        return tuple(averaged(self.runs))

    @property
    def how(self) -> list[str]:
        """How long and how precisely it was trained."""
        return [f"{self.epochs} epochs", *_computed(self.job.recipe)]

    @property
    def spread(self) -> float | None:
        """The standard deviation over seeds, where there are several."""
        return stdev(self.accuracies) if len(self.accuracies) > 1 else None

    @property
    def accuracy(self) -> str:
        """The mean over seeds with its spread, in percent."""
        return with_spread(self.accuracies)

    @property
    def late(self) -> list[float | None]:
        """Of these epochs: the mean, its deviation over seeds, and that of an epoch within a run."""
        if not self.lasts:
            return [None] * 3
        means = [mean(each) for each in self.lasts]
        return [mean(means), stdev(means) if len(means) > 1 else None, mean(stdev(each) for each in self.lasts)]


@dataclass(frozen=True)
class Going:
    """A run that has not finished, as far as it is: a curve, and no result."""

    row: Row
    job: Job
    curves: tuple[Epoch, ...]
    device: str

    @property
    def devices(self) -> tuple[str]:
        """What it was last on."""
        return (self.device,)

    @property
    def runs(self) -> tuple[tuple[Epoch, ...]]:
        """It alone."""
        return (self.curves,)

    @property
    def epochs(self) -> int:
        """How many it has."""
        return len(self.curves)

    @property
    def seeds(self) -> tuple[int]:
        """Its own."""
        return (self.job.recipe.seed,)

    @property
    def how(self) -> list[str]:
        """How far it is, how precisely it is trained, and its seed."""
        recipe = self.job.recipe
        return [f"{self.epochs} of {recipe.epochs} epochs", *_computed(recipe), f"seed {recipe.seed}"]


def _computed(recipe: Recipe) -> list[str]:
    return [recipe.precision, *(["compiled"] if recipe.compile else [])]


def with_spread(values: Sequence[float]) -> str:
    """Write the mean of values, with their standard deviation where there are several."""
    spread = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
    return f"{mean(values):.2f}{spread}"


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
                    found.append(Going(row, Job(run.recipe()[0], _of(row, run), run.folder), rows, _device(run)))
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
    if not (run.folder / "environment.json").exists() or not (run.folder / "data.json").exists():
        raise ValueError(f"{run.folder} lacks environment.json or data.json")
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


def averaged(runs: Sequence[Sequence[Epoch]]) -> list[Epoch]:
    """The mean over runs of every number of every epoch."""
    return [
        {name: mean(row[name] for row in rows) for name in rows[0] if all(name in row for row in rows)}
        for rows in zip(*runs, strict=False)
    ]

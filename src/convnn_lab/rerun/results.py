"""What came of rows: the thesis, the author's logs and our own runs beside each other."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table as Drawn

from convnn_lab.recipes import Recipe
from convnn_lab.rerun.plan import Job, homes, plain, recipe_of, trained
from convnn_lab.tables import Row, Table
from convnn_lab.tables.flops import count
from convnn_lab.train import store
from convnn_lab.train.build import build
from convnn_lab.train.run import Row as Epoch
from convnn_lab.train.run import Run

LATE = 10  # epochs at the end of a run, of which the mean moves less than the last one does


@dataclass(frozen=True)
class Result:
    """Runs of a row that differ in their seed alone; numbers are those of the last epoch, or the one the row is of.

    Args:
        lasts: the accuracies of the last ten epochs of each run, where it has twenty; one epoch is not like the next.
        seconds: of the epochs of a run, in the mean.
        gflops: two for every multiplication with addition of the published architecture.
        curves: the mean over seeds of every number of every epoch.
    """

    row: Row
    job: Job
    accuracies: tuple[float, ...]
    losses: tuple[float, ...]
    bests: tuple[float, ...]
    lasts: tuple[tuple[float, ...], ...]
    seeds: tuple[int, ...]
    epochs: int
    seconds: float
    device: str
    parameters: int
    gflops: float
    curves: tuple[Epoch, ...]

    @property
    def spread(self) -> float | None:
        """The standard deviation over seeds, where there are several."""
        return stdev(self.accuracies) if len(self.accuracies) > 1 else None

    @property
    def accuracy(self) -> str:
        """The mean over seeds with its spread, in percent."""
        return _with_spread(self.accuracies)

    @property
    def late(self) -> list[float | None]:
        """Of the last ten epochs: the mean, its deviation over seeds, and that of an epoch within a run."""
        if not self.lasts:
            return [None] * 3
        means = [mean(each) for each in self.lasts]
        return [mean(means), stdev(means) if len(means) > 1 else None, mean(stdev(each) for each in self.lasts)]


def _with_spread(values: Sequence[float]) -> str:
    spread = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
    return f"{mean(values):.2f}{spread}"


def collect(table: Table, output: Path) -> list[Result]:
    """The finished runs of every row, whichever call or table trained them."""
    there = homes(output)
    found = []
    for row in table.rows:
        if trained(row):
            found += _of_row(row, there[recipe_of(row)[1]])
    return found


def _of_row(row: Row, home: Path) -> list[Result]:
    groups: dict[Any, list[Run]] = {}
    for folder in sorted(home.glob("seed-*"), key=lambda path: (len(path.name), path.name)):
        run = Run(folder)
        try:
            if run.exists and run.finished:
                groups.setdefault((replace(_recipe(row, run), seed=0), run.counts()), []).append(run)
        except (ValueError, OSError) as error:  # one that is damaged hides no others
            sys.stderr.write(f"convnn: note: left out: {error}\n")
    return [_result(row, runs) for runs in groups.values()]


def _recipe(row: Row, run: Run) -> Recipe:
    """What a finished run was run by, once all that is quoted of it is known to be there."""
    recipe = plain(run.recipe()[1])
    if _freed(recipe) != _freed(recipe_of(row)[1]):
        raise ValueError(f"{run.folder} holds a run of another recipe than {row.label} on {row.dataset}")
    if [int(epoch["epoch"]) for epoch in run.rows()] != list(range(recipe.epochs)):
        raise ValueError(f"{run.folder / 'metrics.csv'} does not have the {recipe.epochs} epochs of the run")
    if not (run.folder / "environment.json").exists() or not (run.folder / "data.json").exists():
        raise ValueError(f"{run.folder} lacks environment.json or data.json")
    return recipe


def _freed(recipe: Recipe) -> Recipe:
    """A recipe without what a call may choose."""
    told: dict[str, Any] = {"precision": "float32", "deterministic": False, "compile": False}
    return replace(plain(recipe), seed=0, epochs=1, warmup=0.0, **told)


def _result(row: Row, runs: Sequence[Run]) -> Result:
    name, recipe = runs[0].recipe()
    curves = [run.rows() for run in runs]
    at = min(int(row.configuration.get("epochs", recipe.epochs)), recipe.epochs)
    ends = [rows[at - 1] for rows in curves]
    summaries: list[Any] = [run.summary() for run in runs]
    started = store.read_json(runs[0].folder / "environment.json")[-1]
    return Result(
        row,
        Job(name, recipe, runs[0].folder),
        tuple(100 * end["val_acc"] for end in ends),
        tuple(end["val_loss"] for end in ends),
        tuple(100 * max(epoch["val_acc"] for epoch in rows[:at]) for rows in curves),
        tuple(tuple(100 * epoch["val_acc"] for epoch in rows[at - LATE : at]) for rows in curves if at >= 2 * LATE),
        tuple(run.recipe()[1].seed for run in runs),
        at,
        mean(sum(epoch["seconds"] for epoch in rows) for rows in curves),
        started["gpus"][0] if started["gpus"] and recipe.accelerator != "cpu" else "cpu",
        summaries[0]["parameters"],
        _flops(replace(plain(recipe), seed=0), runs[0].folder / "data.json") / 1e9,
        tuple(averaged(curves)),
    )


@cache
def _flops(recipe: Recipe, about: Path) -> int:
    said = store.read_json(about)
    model = build(recipe, said["channels"], said["size"], len(said["classes"]), device="meta").eval()
    return count(model, said["size"], published=recipe.published).true


def averaged(runs: Sequence[Sequence[Epoch]]) -> list[Epoch]:
    """The mean over runs of every number of every epoch."""
    return [
        {name: mean(row[name] for row in rows) for name in rows[0] if all(name in row for row in rows)}
        for rows in zip(*runs, strict=False)
    ]


COLUMNS = (
    *("table", "row", "dataset", "thesis_accuracy", "thesis_loss", "logged_accuracy", "logged_loss"),
    *("accuracy", "accuracy_std", "loss", "loss_std", "best_accuracy", "late_accuracy", "late_std", "epoch_std"),
    *("seeds", "epochs", "precision"),
    *("seconds", "device", "parameters", "true_gflops", "accuracies", "command"),
)


def write(path: Path, table: Table, results: Sequence[Result]) -> None:
    """Write the results of a table."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for each in results:
        row, logged = each.row, each.row.logged
        known = [row.printed.accuracy, row.printed.loss, logged and logged.accuracy, logged and logged.loss]
        losses = stdev(each.losses) if len(each.losses) > 1 else None
        ours = [mean(each.accuracies), each.spread, mean(each.losses), losses, mean(each.bests), *each.late]
        how = [" ".join(map(str, each.seeds)), each.epochs, each.job.recipe.precision, f"{each.seconds:.1f}"]
        cost = [each.device, each.parameters, f"{each.gflops:.6f}", " ".join(f"{one:.2f}" for one in each.accuracies)]
        numbers = ["" if one is None else one if isinstance(one, str) else f"{one:.6g}" for one in [*known, *ours]]
        writer.writerow([table.name, row.label, row.dataset, *numbers, *how, *cost, each.job.again])
    with store.storing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    store.write(path, text.getvalue())


def show(table: Table, rows: Sequence[Row], results: Sequence[Result], said: Mapping[tuple[str, str], str]) -> None:
    """Print the rows with what repeats each; those without a result say how far they are or why there is none."""
    console = _console()
    caption = "accuracies in %, mean over seeds ± standard deviation: ours of the last epoch, late of the last ten"
    drawn = Drawn(title=f"{table.name}: {table.title}", box=SIMPLE, caption=caption)
    for name in ("row", "data"):
        drawn.add_column(name)
    for name in ("thesis", "logs", "ours", "late", "loss", "seeds", "epochs", "precision", "time"):
        drawn.add_column(name, justify="right", no_wrap=True)
    drawn.add_column("to repeat it", overflow="fold", ratio=1)
    there: dict[tuple[str, str], list[Result]] = {}
    for each in results:
        there.setdefault((each.row.label, each.row.dataset), []).append(each)
    for row in rows:
        key = (row.label, row.dataset)
        known = [row.printed.accuracy or "-", "-" if row.logged is None else f"{row.logged.accuracy:.2f}"]
        for each in there.get(key, []):
            how = [str(len(each.seeds)), str(each.epochs), each.job.recipe.precision, _time(each.seconds)]
            late = _with_spread([mean(one) for one in each.lasts]) if each.lasts else "-"
            drawn.add_row(*key, *known, each.accuracy, late, f"{mean(each.losses):.4f}", *how, escape(each.job.again))
        if key in said:
            drawn.add_row(*key, *known, "-", *[""] * 6, escape(said[key]))
    console.print(drawn)


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.1f} min"


def _console() -> Console:
    """As wide as the terminal, and wide enough for a command beside the numbers."""
    console = Console()
    return Console(width=max(console.width if console.is_terminal else 200, 150))

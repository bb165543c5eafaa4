"""The thesis, the author's logs and our own runs beside each other, printed and as files."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table as Drawn

from convnn_lab.rerun.records import EPOCH, Going, Result, with_spread
from convnn_lab.tables import Row, Table
from convnn_lab.train import store

COLUMNS = (
    *("table", "row", "dataset", "thesis_accuracy", "thesis_loss", "logged_accuracy", "logged_loss"),
    *("accuracy", "accuracy_std", "loss", "loss_std", "best_accuracy", "late_accuracy", "late_std", "epoch_std"),
    *("seeds", "epochs", "precision"),
    *("seconds", "device", "parameters", "true_gflops", "accuracies", "command"),
)


# Of an epoch, beside whose it is: of which run, how and where computed, and how many epochs that was given.
EPOCHS = ("table", "row", "dataset", "seed", "precision", "compiled", "device", "of", *EPOCH)


def write(folder: Path, table: Table, results: Sequence[Result], going: Sequence[Going] = ()) -> list[Path]:
    """Write the results of a table, and every epoch behind them and of runs on their way; the files."""
    paths = [folder / "results.csv", folder / "epochs.csv"]
    _store(paths[0], COLUMNS, [_line(table, each) for each in results])
    runs: list[Result | Going] = [*results, *going]
    _store(paths[1], EPOCHS, [line for each in runs for line in _epochs(table, each)])
    return paths


def _line(table: Table, each: Result) -> list[Any]:
    row, logged = each.row, each.row.logged
    known = [row.printed.accuracy, row.printed.loss, logged and logged.accuracy, logged and logged.loss]
    losses = stdev(each.losses) if len(each.losses) > 1 else None
    ours = [mean(each.accuracies), each.spread, mean(each.losses), losses, mean(each.bests), *each.late]
    how = [" ".join(map(str, each.seeds)), each.epochs, each.job.recipe.precision, f"{each.seconds:.1f}"]
    cost = [each.device, each.parameters, f"{each.gflops:.6f}", " ".join(f"{one:.2f}" for one in each.accuracies)]
    numbers = ["" if one is None else one if isinstance(one, str) else f"{one:.6g}" for one in [*known, *ours]]
    return [table.name, row.label, row.dataset, *numbers, *how, *cost, each.job.again]


def _epochs(table: Table, each: Result | Going) -> Iterator[list[Any]]:
    recipe = each.job.recipe
    for seed, device, run in zip(each.seeds, each.devices, each.runs, strict=True):
        whose = [table.name, each.row.label, each.row.dataset, seed]
        how = [recipe.precision, recipe.compile, device, recipe.epochs]
        for epoch in run:
            yield [*whose, *how, int(epoch["epoch"]), *(f"{epoch[name]:.6g}" for name in EPOCH[1:])]


def _store(path: Path, names: Sequence[str], lines: Iterable[Sequence[Any]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([names, *lines])
    with store.storing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    store.write(path, text.getvalue())


def show(table: Table, rows: Sequence[Row], results: Sequence[Result], said: Mapping[tuple[str, str], str]) -> None:
    """Print the rows with what repeats each; those without a result say how far they are or why there is none."""
    console = _console()
    caption = (
        "accuracies in %, mean over seeds ± standard deviation: ours of the last epoch, late of the last ten, or third"
    )
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
            how = [str(len(each.seeds)), str(each.epochs), ", ".join(each.how[1:]), _time(each.seconds)]
            late = with_spread([mean(one) for one in each.lasts]) if each.lasts else "-"
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

"""The thesis's tables at the lengths under docs/results: one queue of runs for one GPU, the most telling first.

    python benchmarks/thesis.py --data-dir DATA [--parts full vit vgg] [--jobs 5] [--max-time 9m] [--output runs/thesis]
                                [--published docs/results]

Every run is one that `convnn reproduce --output runs/thesis` would train; here those of all tables wait in one queue,
so that a table's last run does not have the GPU for itself. Rates are constant, and a run of 10 epochs is the beginning
of one of 150: a row that several parts ask for is trained once, as long as the longest does. The results and figures of
a part are of its own number of epochs, in OUTPUT/PART/TABLE. What has finished is not run again and what was stopped is
resumed: the same command goes on after anything. It ends with 3 if the time was up before. With --published, runs that
the files *-epochs.csv of a folder hold, as long as they are asked for, are taken from there. Weights are not kept
unless asked for: those of a VGG-11 are half a gigabyte.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convnn_lab.recipes.limits import seconds
from convnn_lab.rerun import commands, figures, jobs, plan, published, report, results
from convnn_lab.tables import Row
from convnn_lab.train.run import Run

LAMBDAS = ("Conv2D", "Branching, 0.5", "ConvNN")


@dataclass(frozen=True)
class Rows:
    """Rows of a table by their labels; all on one data set."""

    table: str
    labels: tuple[str, ...]
    dataset: str = "cifar10"

    def chosen(self) -> list[Row]:
        """The rows themselves."""
        return plan.chosen(commands.named(self.table), self.labels, [self.dataset])


@dataclass(frozen=True)
class Part:
    """Rows that are compared after so many epochs."""

    rows: tuple[Rows, ...]
    epochs: int
    seeds: tuple[int, ...] = (42,)

    def tables(self) -> dict[str, list[Row]]:
        """The rows of each table."""
        found: dict[str, list[Row]] = {}
        for each in self.rows:
            found.setdefault(each.table, []).extend(each.chosen())
        return found


def _each(before: str, *values: Any, after: str = "") -> tuple[str, ...]:
    return tuple(f"{before}{value}{after}" for value in values)


def _vary(*labels: str, positions: str = "without") -> Rows:
    return Rows("vary-lambda", _each("", *labels, after=f", {positions} positions"))


def _shares(*ratios: float) -> tuple[str, ...]:
    return _each("Branching, ", *ratios)


METHODS = ("Self-Attention", *_each("ConvNN, ", "random", "all", "spatial"), "KVT-Attention, k = 9")
PARTS: dict[str, Part] = {
    "full": Part((_vary(*LAMBDAS[:2]),), 150, (42, 43)),
    "search": Part((_vary("ConvNN"),), 150),
    "lambda": Part((_vary(*LAMBDAS, *_shares(0.25, 0.75)), _vary(*LAMBDAS[1:], positions="with")), 30),
    "vit": Part((Rows("vit-cifar", METHODS),), 30),
    "fashion": Part((Rows("fashion-lambda", ("Conv2D", *_shares(0.25, 0.5, 0.75), "ConvNN"), "fashion-mnist"),), 10),
    "vgg": Part(
        (
            Rows("vgg-candidates", ("Branching, 0.5", *_each("Branching, 0.5, random, r = ", "4²", "8²", "16²"))),
            Rows("vgg-k", _each("Branching, 0.5, k = ", 1, 3, 5, 9, 12, after=", 3x3 kernel")),
            Rows("vgg-lr", _each("", *LAMBDAS, after=", learning rate 1e-3")),
            Rows("vgg-patch", _each("", *LAMBDAS[1:], after=", patch 2")),
            Rows("vgg-lr", _each("", *LAMBDAS, after=", learning rate 1e-4")),
            Rows("vgg-patch", _each("", *LAMBDAS, after=", patch 1")),
        ),
        10,
    ),
    "vit-short": Part(
        (
            Rows("vit-candidates", ("Self-Attention", "ConvNN, all", *_each("ConvNN, random, r = ", 16, 32, 64, 128))),
            Rows("vit-k", _each("ConvNN, all, k = ", 1, 3, 9, 25)),
            Rows("vit-kernels", ("Attention", *_each("ConvNN, ", "depthwise", "depthwise separable", "standard"))),
            Rows("vit-candidates", _each("ConvNN, spatial, r = ", 32, 64)),
        ),
        9,
    ),
    "vgg-more": Part(
        (
            Rows("vgg-lr", _each("", *LAMBDAS, after=", learning rate 1e-5")),
            Rows("vgg-candidates", ("Branching, 0.5, spatial, r = 8²", "ConvNN", "ConvNN, random, r = 8²")),
        ),
        10,
    ),
    "third": Part((_vary(*LAMBDAS[:2]),), 150, (44,)),
    "vit-full": Part((Rows("vit-cifar", METHODS[:2]),), 150, (43,)),
}


def queue(parts: Iterable[Part], output: Path, data_dir: Path | None) -> list[plan.Job]:
    """The runs of some parts in their order, each as long as the longest of them has it."""
    longest: dict[Path, plan.Job] = {}
    for part in parts:
        for rows in part.rows:
            # As the thesis's recipes, but for the matrix units of a GPU; a ViT's small kernels are compiled into few.
            vit = rows.table.startswith("vit")
            told = plan.Told(part.epochs, "bf16" if vit else "tf32", compile=vit, data_dir=data_dir)
            for job in (one for row in plan.jobs(rows.chosen(), part.seeds, output, told) for one in row):
                known = longest.get(job.folder, job)
                longest[job.folder] = max(known, job, key=lambda each: each.recipe.epochs)
    return list(longest.values())


def main(arguments: Sequence[str] | None = None, known: Mapping[str, Part] = PARTS) -> int:
    """Run what is missing; write what is there."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--data-dir", type=Path)
    asked.add_argument("--parts", nargs="+", choices=list(known), default=list(known))
    asked.add_argument("--jobs", type=int, default=5)
    asked.add_argument("--max-time")
    asked.add_argument("--output", type=Path, default=Path("runs/thesis"))
    asked.add_argument("--published", type=Path, help="a folder of files of epochs whose runs need not be run again")
    asked.add_argument("--keep", choices=["weights", "all", "nothing"], default="nothing")
    asked.add_argument("--plan", action="store_true", help="print the command of every run; nothing is trained")
    given = asked.parse_args(arguments)
    if given.jobs < 1:
        asked.error(f"--jobs must be at least 1, got {given.jobs}")
    began = time.monotonic()
    # What one part asks for may be longer in another, also if that is not run now.
    whole = {job.folder: job for job in queue(known.values(), given.output, given.data_dir)}
    waiting = [whole[job.folder] for job in queue((known[name] for name in given.parts), given.output, None)]
    if given.plan:
        print(*(job.command for job in waiting), sep="\n")
        return commands.HOLDS
    try:
        deadline = None if given.max_time is None else began + seconds("--max-time", given.max_time)
        if given.published is not None:
            print(f"{len(adopt(waiting, given.published))} of {len(waiting)} runs are published")
        outcome = jobs.run_all(waiting, given.jobs, deadline, given.keep)
    except (ValueError, OSError) as error:
        asked.error(str(error))
    for name in given.parts:
        write(known[name], given.output, given.output / name)
    for why in dict.fromkeys(outcome.wrong.values()):
        print(f"{sum(why == each for each in outcome.wrong.values())} runs: {why}", file=sys.stderr)
    left = [job for job in waiting if job.folder not in outcome.wrong and not Run(job.folder).finished]
    print(f"{len(waiting) - len(left) - len(outcome.wrong)} of {len(waiting)} runs have finished")
    if outcome.interrupted:
        return commands.INTERRUPTED
    return commands.UNFINISHED if left else commands.FAILS if outcome.wrong else commands.HOLDS


def adopt(waiting: Sequence[plan.Job], folder: Path) -> list[plan.Job]:
    """Take what a folder has files of for finished."""
    files = sorted(folder.glob("*-epochs.csv"))
    if not files:
        raise ValueError(f"--published must name a folder with files *-epochs.csv, got {folder}")
    return published.adopt(waiting, files)


def write(part: Part, output: Path, folder: Path) -> None:
    """Write and print what the tables of a part have after its epochs."""
    for name, rows in part.tables().items():
        table = commands.named(name)
        found = [each for each in results.collect(table, output, part.epochs) if each.row in rows]
        if not found:
            continue
        report.show(table, rows, found, {})
        report.write(folder / name, table, found)
        figures.draw(folder / name, table, found)


if __name__ == "__main__":
    sys.exit(main())

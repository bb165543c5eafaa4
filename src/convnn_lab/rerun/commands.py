"""The command that repeats tables of the thesis. Torch is imported when there is work to do."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from convnn_lab.parsing import require_writable
from convnn_lab.recipes.limits import seconds
from convnn_lab.recipes.recipe import Precision
from convnn_lab.rerun import plan
from convnn_lab.tables import TABLES, Row, Table

if TYPE_CHECKING:
    from convnn_lab.rerun.jobs import Outcome
    from convnn_lab.rerun.records import Going, Result

# Beside what every command ends with: the time was up, and the same command goes on.
HOLDS, FAILS, UNFINISHED, INTERRUPTED = 0, 1, 3, 130


@dataclass(frozen=True)
class Reproduce:
    """Train a table of the thesis again, or count it; convnn reproduce --list names them.

    What has finished is not run again, and what was stopped is resumed: the same command goes on after anything. It
    ends with 0 if all rows asked for have finished, 3 if the time was up before, 1 if one cannot run or has failed.
    """

    table: str
    """its name"""
    rows: tuple[str, ...] = ()
    """only rows of these labels, or whose labels contain one of these words"""
    datasets: tuple[str, ...] = ()
    """only rows on these data sets"""
    static: bool = False
    """count parameters and operations; nothing is trained"""
    plan: bool = False
    """print the command of every run; nothing is trained"""
    figures: bool = False
    """write results and figures of what is there; nothing is trained"""
    at: int | None = None
    """with --figures: of the first N epochs of all runs that have them, which at a constant rate are runs too"""
    data_dir: Path | None = None
    """where the data are: a folder of folders named as data sets are, or that of one data set"""
    seeds: tuple[int, ...] = (42,)
    """a run for each"""
    epochs: int | None = None
    """the recipe's, 150 on CIFAR, unless told"""
    precision: Precision | None = None
    """the recipe's, float32 on CIFAR, unless told"""
    deterministic: bool = False
    """the same numbers on every run on a GPU too, where that costs speed"""
    compile: bool = False
    """compile models, as convnn train --compile does"""
    max_time: str | None = None
    """stop after so much time, ready to go on"""
    jobs: int = 1
    """how many runs train side by side, each in a process of its own"""
    save_every: str = "5m"
    """time between two checkpoints of a run"""
    keep: Literal["weights", "all", "nothing"] = "weights"
    """which checkpoints of a finished run are kept: the last weights, all, or none"""
    output: Path = Path("runs/reproduce")
    """where tables are: OUTPUT/TABLE/ROW/seed-N"""
    json: Path | None = None
    """with --static: also write it to this file"""

    def run_it(self) -> int:
        """Do what was asked for."""
        began = time.monotonic()
        self._check()
        table = named(self.table)
        rows = plan.chosen(table, self.rows, self.datasets)
        if self.static:
            return self._count(table, rows)
        if not any(plan.trained(row) for row in rows):
            return self._measure(table)
        return self._train(table, rows, None if self.max_time is None else began + seconds("--max-time", self.max_time))

    def _check(self) -> None:
        """Refuse what says nothing or two things."""
        if self.json is not None:
            if not self.static:
                raise ValueError("--json goes with --static; trained tables are written to results.csv in --output")
            require_writable(self.json)
        if sum((self.static, self.plan, self.figures)) > 1:
            raise ValueError("--static, --plan and --figures are three things to do; give one")
        if self.at is not None and not self.figures:
            raise ValueError("--at goes with --figures; --epochs says how long runs are trained")
        if self.at is not None and self.at < 1:
            raise ValueError(f"--at must be at least 1, got {self.at}")
        if self.jobs < 1:
            raise ValueError(f"--jobs must be at least 1, got {self.jobs}")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"--seeds must be different numbers, got {' '.join(map(str, self.seeds)) or 'none'}")

    def _count(self, table: Table, rows: Sequence[Row]) -> int:
        """Print counts; 1 if a number without an explanation differs."""
        from convnn_lab import reproduce

        counted = reproduce.static(rows)
        if not counted:
            raise ValueError(f"the rows of {self.table} are single layers, which have no parameters to count")
        reproduce.show(table, counted)
        if self.json is not None:
            self.json.write_text(reproduce.as_json(table, counted))
        return HOLDS if all(each.explained for each in counted) else FAILS

    def _measure(self, table: Table) -> int:
        """Measure a table of single layers."""
        if self.plan or self.figures:
            raise ValueError(f"the rows of {table.name} are single layers: there is nothing to plan or to draw")
        from convnn_lab.rerun import layers

        found = layers.measured(table)
        layers.show(table, found)
        layers.write(self.output / table.name / "results.csv", table, found)
        sys.stdout.write(f"{self.output / table.name / 'results.csv'}\n")
        return HOLDS

    def _train(self, table: Table, rows: Sequence[Row], deadline: float | None) -> int:
        told = plan.Told(self.epochs, self.precision, self.deterministic, self.compile, self.data_dir, self.save_every)
        asked = plan.jobs(rows, self.seeds, self.output, told)
        if self.plan:
            for job in dict.fromkeys(job for several in asked for job in several):
                sys.stdout.write(f"{job.command}\n")
            return HOLDS
        from convnn_lab.rerun import jobs, results

        outcome = jobs.Outcome()
        if not self.figures:
            every = [job for several in asked for job in several]
            outcome = jobs.run_all(every, self.jobs, deadline, self.keep)
            if all(job.folder in outcome.wrong for job in every) and not any(job.folder.exists() for job in every):
                raise ValueError("; ".join(dict.fromkeys(outcome.wrong.values())))
        found = results.collect(table, self.output, self.at)
        going = results.going(table, self.output) if self.at is None else []
        if not self.figures:
            return self._report(table, rows, found, going, _said(rows, asked, outcome), outcome)
        if not any(row in rows for row in (*(each.row for each in found), *(each.row for each in going))):
            enough = "finished, or as much as an epoch" if self.at is None else f"{self.at} epochs at a constant rate"
            raise ValueError(f"no run of {table.name} in {self.output} has {enough}")
        said: dict[tuple[str, str], tuple[int, str]] = {}
        for each in (each for each in going if each.row in rows):
            said[each.row.label, each.row.dataset] = HOLDS, ", ".join(each.how)
        return self._report(table, rows, found, going, said, outcome)

    def _report(
        self,
        table: Table,
        rows: Sequence[Row],
        found: Sequence[Result],
        going: Sequence[Going],
        said: Mapping[tuple[str, str], tuple[int, str]],
        outcome: Outcome,
    ) -> int:
        """Print and write what is there; the exit status says what is not."""
        from convnn_lab.rerun import figures, report

        folder = self.output / table.name / ("" if self.at is None else f"at-{self.at}")
        report.show(table, rows, found, {key: words for key, (_, words) in said.items()})
        files = report.write(folder, table, found, going)
        if self.figures:  # of the rows that were asked for; the file holds all
            found, going = [each for each in found if each.row in rows], [each for each in going if each.row in rows]
        drawn = figures.draw(folder, table, found, going)
        sys.stdout.write(f"{', '.join(map(str, [*files, *drawn]))}\n")
        codes = {code for code, _ in said.values()} - {HOLDS}
        if outcome.interrupted:
            sys.stdout.write("interrupted; the same command goes on\n")
            return INTERRUPTED
        if UNFINISHED in codes:
            sys.stdout.write("the time was up; the same command goes on\n")
            return UNFINISHED
        return FAILS if codes else HOLDS


def named(name: str) -> Table:
    """The table of a name."""
    if name not in TABLES:
        raise ValueError(f"unknown table {name!r}; known are {', '.join(TABLES)}")
    return TABLES[name]


def _said(
    rows: Sequence[Row], asked: Sequence[Sequence[plan.Job]], outcome: Outcome
) -> dict[tuple[str, str], tuple[int, str]]:
    """Of rows of which a run has not finished: whether more time would help, and what is to say."""
    from convnn_lab.train.run import Run

    found: dict[tuple[str, str], tuple[int, str]] = {}
    for row, jobs in zip(rows, asked, strict=True):
        words, code = [], FAILS
        for job in jobs:
            run = Run(job.folder)
            if job.folder in outcome.wrong:
                words.append(f"seed {job.recipe.seed}: {outcome.wrong[job.folder]}")
            elif not run.finished:
                code = UNFINISHED
                words.append(f"seed {job.recipe.seed}: {len(run.rows())} of {job.recipe.epochs} epochs")
        if words:
            found[row.label, row.dataset] = code, "; ".join(words)
    return found

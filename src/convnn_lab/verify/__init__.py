"""The central claim as a table: the operator, configured as X, against torch's own X."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from math import isfinite
from platform import python_version

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import convnn
from convnn_lab.verify.comparisons import COMPARISONS
from convnn_lab.verify.rows import TOLERANCE, Comparison, Row, outcomes, row

__all__ = ["COMPARISONS", "TOLERANCE", "Comparison", "Row", "as_json", "compare", "count", "show"]


def count(cases: int) -> int:
    """How many cases there are with so many random ones in each row, every backend counted."""
    return cases * sum(len(comparison.backends) for comparison in COMPARISONS)


def compare(cases: int, seed: int) -> list[Row]:
    """Compare on ``cases`` random problems for each row, on every backend."""
    rows = []
    with _settled(), _progress() as progress:
        task = progress.add_task("", total=count(cases))
        for comparison in COMPARISONS:
            progress.update(task, description=comparison.peer)
            came = []
            for number in range(cases):
                for outcome in outcomes(comparison, (seed + number) % 2**63):
                    came.append(outcome)
                    progress.advance(task)
            rows.append(row(comparison, came))
    return rows


@contextmanager
def _settled() -> Iterator[None]:
    """Compute in float64 and on one thread, and leave torch as it was."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    # The problems are small: a second thread only waits, and does so busily where somebody else needs the processor.
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            # Torch remarks that its own padding='same' of even kernels copies the map.
            warnings.filterwarnings("ignore", "Using padding='same' with even kernel")
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)


def _progress() -> Progress:
    """A bar on a terminal, which goes when it is full; nothing elsewhere."""
    console = Console()
    columns = (TextColumn("{task.description:28}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def show(rows: list[Row]) -> None:
    """Print the table, and how to repeat what failed."""
    table = Table(title=f"convnn {convnn.__version__} against torch {torch.__version__}, float64", box=SIMPLE)
    table.add_column("the operator with")
    table.add_column("equals")
    table.add_column("cases", justify="right")
    table.add_column("differs by", justify="right")
    table.add_column("verdict")
    for each in rows:
        style = None if each.holds else "bold red"
        table.add_row(each.operator, each.peer, str(each.cases), _written(each), each.verdict, style=style)
    console = Console()
    console.print(table)
    failed = [each for each in rows if not each.holds]
    for each in failed:
        what = f"differs by {_written(each)}" if each.error is None else "fails"
        why = "" if each.error is None else f"\n  {each.error}"
        said = f"{each.peer} {what} at {each.worst}\n  {each.arguments}{why}"
        # As it is: arguments are there to be copied, and their brackets are no markup.
        console.print(said, soft_wrap=True, markup=False, highlight=False)
    verdict = f"{len(failed)} of {len(rows)} rows fail" if failed else f"all equal within {TOLERANCE:g}"
    console.print(f"{sum(each.cases for each in rows)} random cases, {verdict}", highlight=False)


def _written(row: Row) -> str:
    return "-" if row.error is not None else f"{row.largest_difference:.1e}"


def as_json(rows: list[Row], cases: int, seed: int) -> str:
    """Write the table for machines; null stands for a difference that is no number."""
    versions = {"convnn": convnn.__version__, "torch": torch.__version__, "python": python_version()}
    whole = {"holds": all(each.holds for each in rows), "tolerance": TOLERANCE, "cases": cases, "seed": seed}
    table = []
    for each in rows:
        finite = each.largest_difference if isfinite(each.largest_difference) else None
        table.append({**asdict(each), "largest_difference": finite, "holds": each.holds})
    return json.dumps({**whole, "versions": versions, "rows": table}, indent=2, allow_nan=False) + "\n"

"""A table whose rows take a second, on pictures made up in the form of CIFAR."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convnn_lab import cli, tables
from convnn_lab.rerun.plan import Job, Told, jobs
from convnn_lab.tables import Logged, Printed, Row, Table
from tests.rerun.calls import Call

QUICK = {"recipe": "digits", "model": "resnet8", "layer": "hybrid", "batch": 20, "width": 8, "accelerator": "cpu"}
QUICK |= {"stem": "imagenet"}  # a search on maps of 8 by 8


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """The folder of a set of 60 and 30 pictures, brighter from class to class."""
    random = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for part, count in (("train", 60), ("test", 30)):
        labels = np.arange(count) % 10
        noise = random.integers(0, 60, (count, 3, 32, 32))
        arrays |= {f"x_{part}": (noise + 18 * labels[:, None, None, None]).astype(np.uint8), f"y_{part}": labels}
    (tmp_path / "data" / "cifar10").mkdir(parents=True)
    np.savez(tmp_path / "data" / "cifar10" / "cifar10.npz", **arrays)
    return tmp_path / "data"


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Table:
    logged = Logged("a/b-CIFAR10/c", 1.25, 43.75, 0.1, 0.1)
    rows = (
        Row("Conv2D", "cifar10", QUICK | {"ratio": 0.0}, Printed("1.200", "44.00")),
        Row("Branching, 0.5", "cifar10", QUICK | {"ratio": 0.5}, logged=logged),
        Row("Conv2D", "cifar100", QUICK | {"ratio": 0.0}),
    )
    table = Table("tiny", "a table of a second", rows)
    monkeypatch.setitem(tables.TABLES, "tiny", table)
    return table


@pytest.fixture
def steady(tiny: Table, monkeypatch: pytest.MonkeyPatch) -> Table:
    """The table at a constant rate."""
    rows = tuple(replace(row, configuration={**row.configuration, "schedule": "constant"}) for row in tiny.rows)
    table = replace(tiny, rows=rows)
    monkeypatch.setitem(tables.TABLES, tiny.name, table)
    return table


@pytest.fixture
def call(tiny: Table, data_dir: Path) -> Call:
    """The command on the made-up data, on CIFAR-10 unless told."""

    def run(output: Path, *more: str, datasets: tuple[str, ...] = ("cifar10",)) -> int:
        given = ["--data-dir", str(data_dir), "--output", str(output), "--epochs", "2", "--datasets", *datasets]
        return cli.main(["reproduce", tiny.name, *given, *more])

    return run


@pytest.fixture
def two(tiny: Table, data_dir: Path, tmp_path: Path) -> list[Job]:
    """The runs of two rows."""
    asked = jobs(tiny.rows[:2], [42], tmp_path / "out", Told(epochs=2, data_dir=data_dir))
    return [job for several in asked for job in several]

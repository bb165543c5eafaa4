"""Long runs hold the short ones: results after so many epochs, and the queue that trains no row twice."""

from __future__ import annotations

import csv
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from convnn_lab import cli
from convnn_lab.rerun import commands, results
from convnn_lab.rerun.plan import Told, jobs
from convnn_lab.tables import Table
from convnn_lab.train import store
from convnn_lab.train.run import Run


@pytest.fixture
def thesis(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script of all tables."""
    spec = spec_from_file_location("benchmark_thesis", Path(__file__).parents[2] / "benchmarks" / "thesis.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, spec.name, module)  # where its records look for their types
    spec.loader.exec_module(module)
    return module


def written(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def numbers(run: Run) -> list[tuple[float, ...]]:
    return [(row["train_loss"], row["val_loss"], row["val_acc"]) for row in run.rows()]


def test_the_beginning_of_a_run_is_the_run_of_so_many_epochs(
    steady: Table, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(output: str, *more: str) -> int:
        given = ["--data-dir", str(data_dir), "--output", str(tmp_path / output), "--datasets", "cifar10"]
        return cli.main(["reproduce", steady.name, *given, "--rows", "Conv2D", *more])

    assert call("long", "--epochs", "3") == call("short", "--epochs", "2") == commands.HOLDS
    long, short = (Run(tmp_path / each / "tiny" / "cifar10-conv2d" / "seed-42") for each in ("long", "short"))
    assert numbers(long)[:2] == numbers(short)

    # Whether the run has ended since does not matter.
    store.write_json(long.folder / "summary.json", {"status": "stopped"})
    assert call("long", "--figures", "--at", "2") == commands.HOLDS
    (told,) = written(tmp_path / "long" / "tiny" / "at-2" / "results.csv")
    (whole,) = written(tmp_path / "short" / "tiny" / "results.csv")
    measured = {"seconds"}
    assert {name: value for name, value in told.items() if name not in measured} == {
        name: value for name, value in whole.items() if name not in measured
    }
    assert (tmp_path / "long" / "tiny" / "at-2" / "loss.png").stat().st_size > 5000

    capsys.readouterr()
    assert call("long", "--figures", "--at", "4") == cli.MISUSED
    assert "no run of tiny in" in capsys.readouterr().err
    assert call("long", "--at", "2") == cli.MISUSED
    assert "--at goes with --figures" in capsys.readouterr().err


def test_where_the_rate_falls_the_beginning_is_no_run(
    tiny: Table, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["reproduce", "tiny", "--data-dir", str(data_dir), "--output", str(tmp_path), "--datasets", "cifar10"]
    assert cli.main([*given, "--rows", "Conv2D", "--epochs", "2"]) == commands.HOLDS
    assert [each.epochs for each in results.collect(tiny, tmp_path)] == [2]
    capsys.readouterr()
    assert results.collect(tiny, tmp_path, at=1) == []
    assert "its beginning is no run of its own" in capsys.readouterr().err


@pytest.mark.usefixtures("steady")
def test_a_row_of_several_parts_is_trained_once_and_as_long_as_the_longest(
    thesis: Any, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = thesis.Rows("tiny", ("Conv2D", "Branching, 0.5"))
    known = {
        "long": thesis.Part((thesis.Rows("tiny", ("Conv2D",)),), 3, (1, 2)),
        "short": thesis.Part((rows,), 1, (1,)),
    }
    given = ["--data-dir", str(data_dir), "--output", str(tmp_path), "--jobs", "1"]
    assert thesis.main([*given, "--parts", "short", "--plan"], known) == commands.HOLDS
    plain, hybrid = capsys.readouterr().out.splitlines()
    assert ("--epochs 3" in plain, "--epochs 1" in hybrid) == (True, True)

    assert thesis.main([*given, "--parts", "short", "--max-time", "0.01s"], known) == commands.UNFINISHED
    assert "0 of 2 runs have finished" in capsys.readouterr().out
    assert thesis.main(given, known) == commands.HOLDS
    assert "3 of 3 runs have finished" in capsys.readouterr().out
    (long,), short = (written(tmp_path / part / "tiny" / "results.csv") for part in known)
    assert (long["row"], long["seeds"], long["epochs"]) == ("Conv2D", "1 2", "3")
    assert [(row["row"], row["seeds"], row["epochs"]) for row in short] == [
        ("Conv2D", "1 2", "1"),
        ("Branching, 0.5", "1", "1"),
    ]
    once = [len(Run(job.folder).rows()) for (job,) in jobs(rows.chosen(), [1], tmp_path, Told())]
    assert once == [3, 1]

    # What is written beside the table spares another folder the same runs.
    epochs, elsewhere = tmp_path / "long" / "tiny" / "epochs.csv", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "tiny-epochs.csv").write_bytes(epochs.read_bytes())
    others = ["--data-dir", str(data_dir), "--output", str(elsewhere / "runs"), "--published", str(elsewhere)]
    assert thesis.main([*others, "--max-time", "0.01s"], known) == commands.UNFINISHED
    said = capsys.readouterr().out
    assert "2 of 3 runs are published" in said
    assert "2 of 3 runs have finished" in said
    for more, message in (
        (("--published", str(tmp_path / "long")), "--published must name a folder with files *-epochs.csv"),
        (("--jobs", "0"), "--jobs must be at least 1, got 0"),
        (("--max-time", "soon"), "--max-time"),
        (("--parts", "long"), "holds a run of another recipe; choose another --output"),
    ):
        other = known if more[0] != "--parts" else {"long": thesis.Part((thesis.Rows("tiny", ("Conv2D",)),), 4, (1,))}
        with pytest.raises(SystemExit):
            thesis.main([*given, *more], other)
        assert message in capsys.readouterr().err


def test_every_part_names_rows_of_the_thesis(thesis: Any, tmp_path: Path) -> None:
    waiting = thesis.queue(thesis.PARTS.values(), tmp_path, None)
    assert len({job.folder for job in waiting}) == len(waiting)
    known = {part.epochs for part in thesis.PARTS.values()}
    for job in waiting:
        assert job.recipe.epochs in known
        assert (job.recipe.schedule, job.recipe.warmup) == ("constant", 0.0)
        vit = job.recipe.model.startswith("vit")
        assert (job.recipe.precision, job.recipe.compile) == (("bf16", True) if vit else ("tf32", False))
    for part in thesis.PARTS.values():
        for rows in part.rows:
            assert {row.label for row in rows.chosen()} == set(rows.labels)
    assert {job.recipe.seed for job in waiting if job.recipe.epochs == 150} == {42, 43, 44}

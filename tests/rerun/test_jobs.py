"""A table is run, stopped, gone on with and written, row by row."""

from __future__ import annotations

import csv
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from convnn_lab import cli
from convnn_lab.rerun import commands, figures, jobs, plan, results
from convnn_lab.rerun.plan import Job, Told
from convnn_lab.rerun.plan import jobs as planned
from convnn_lab.tables import TABLES, Row, Table
from convnn_lab.train.callbacks import Keeper
from convnn_lab.train.evaluate import evaluate
from convnn_lab.train.run import Run

Call = Callable[..., int]


@pytest.fixture
def call(tiny: Table, data_dir: Path) -> Call:
    """The command on the made-up data, on CIFAR-10 unless told."""

    def run(output: Path, *more: str, datasets: tuple[str, ...] = ("cifar10",)) -> int:
        given = ["--data-dir", str(data_dir), "--output", str(output), "--epochs", "2", "--datasets", *datasets]
        return cli.main(["reproduce", tiny.name, *given, *more])

    return run


def written(output: Path) -> list[dict[str, str]]:
    with (output / "tiny" / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def epochs(run: Run) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in run.rows()]


def stop_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Let a run believe, after so many steps, that its time is up."""
    seen = []

    def must_stop(keeper: Keeper) -> bool:
        seen.append(keeper)
        keeper.asked = "--max-time" if len(seen) >= steps else ""
        return bool(keeper.asked)

    monkeypatch.setattr(Keeper, "_must_stop", must_stop)


def test_a_row_stopped_twice_ends_as_one_that_was_not(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, whole = ("--rows", "Branching"), tmp_path / "whole"
    assert call(whole, *one) == commands.HOLDS
    stopped = tmp_path / "stopped"
    for steps, said in ((2, "0 of 2 epochs"), (3, "1 of 2 epochs")):
        with monkeypatch.context() as patch:
            stop_after(patch, steps)
            capsys.readouterr()
            assert call(stopped, *one) == commands.UNFINISHED
            assert said in capsys.readouterr().out
            assert written(stopped) == []
    assert call(stopped, *one) == commands.HOLDS
    ours, theirs = (Run(each / "tiny" / "cifar10-branching-0.5" / "seed-42") for each in (stopped, whole))
    assert len(ours.rows()) == 2
    assert epochs(ours) == epochs(theirs)
    weights = "last/weights.safetensors"
    assert (ours.checkpoints / weights).read_bytes() == (theirs.checkpoints / weights).read_bytes()
    (row,), (other,) = written(stopped), written(whole)
    for name in ("accuracy", "loss", "best_accuracy", "epochs", "seeds", "parameters"):
        assert row[name] == other[name] != ""


def test_results_stand_beside_what_is_known_and_finished_runs_are_left_alone(
    call: Call, tiny: Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(tmp_path, "--seeds", "1", "2", datasets=("cifar10", "cifar100")) == commands.FAILS
    assert "seed 2: cifar100: looked for its files in" in " ".join(capsys.readouterr().out.split())
    plain, hybrid = written(tmp_path)
    assert (plain["row"], plain["thesis_accuracy"], plain["logged_accuracy"]) == ("Conv2D", "44.00", "")
    assert (hybrid["thesis_accuracy"], hybrid["logged_accuracy"], hybrid["logged_loss"]) == ("", "43.75", "1.25")
    runs = [Run(tmp_path / "tiny" / "cifar10-branching-0.5" / f"seed-{seed}") for seed in (1, 2)]
    accuracies = [100 * run.rows()[-1]["val_acc"] for run in runs]
    assert float(hybrid["accuracy"]) == pytest.approx(mean(accuracies), rel=1e-5)
    assert float(hybrid["accuracy_std"]) == pytest.approx(stdev(accuracies), rel=1e-5)
    assert (hybrid["seeds"], hybrid["epochs"], hybrid["precision"]) == ("1 2", "2", "float32")
    assert hybrid["device"] == "cpu"
    assert hybrid["command"].startswith("convnn train digits --dataset cifar10 ")
    assert hybrid["command"].endswith("--seed 1 --accelerator cpu")

    before = [(run.folder / "metrics.csv").stat().st_mtime_ns for run in runs]
    assert call(tmp_path, "--seeds", "1", "2", "--data-dir", str(tmp_path / "none")) == commands.HOLDS
    assert [(run.folder / "metrics.csv").stat().st_mtime_ns for run in runs] == before
    assert call(tmp_path, "--seeds", "1", "--precision", "bf16") == cli.MISUSED
    assert "holds a run of another recipe; choose another --output" in capsys.readouterr().err

    found = results.collect(tiny, tmp_path)
    axes: Any = Figure().subplots()
    figures._against(axes, [each for each in found if each.row.dataset == "cifar10"], "ratio", "λ")
    drawn = {tuple(line.get_xdata()): list(line.get_ydata()) for line in axes.get_lines() if line.get_marker() == "o"}
    assert drawn[0.0, 0.5] == pytest.approx([float(plain["accuracy"]), float(hybrid["accuracy"])], rel=1e-5)
    assert set(axes.get_legend_handles_labels()[1]) == {"ours", "author's logs, 10 epochs"}
    for name in ("gflops.png", "loss.png"):
        assert (tmp_path / "tiny" / name).stat().st_size > 5000
        (tmp_path / "tiny" / name).unlink()
    assert call(tmp_path, "--figures") == commands.HOLDS
    assert (tmp_path / "tiny" / "loss.png").stat().st_size > 5000


def test_a_process_of_its_own_gives_the_numbers_of_this_one(
    call: Call, tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    beside, turn = tmp_path / "beside", tmp_path / "turn"
    assert call(beside, "--jobs", "2", "--rows", "Conv2D") == commands.HOLDS
    assert call(turn, "--rows", "Conv2D") == commands.HOLDS
    for name in ("accuracy", "loss", "row"):
        assert [row[name] for row in written(beside)] == [row[name] for row in written(turn)]
    run = Run(beside / "tiny" / "cifar10-conv2d" / "seed-42")
    assert {path.name for path in run.checkpoints.iterdir()} == {"last"}
    assert evaluate(run.folder, data_dir=data_dir / "cifar10")["top1"] == pytest.approx(run.rows()[-1]["val_acc"])


def test_time_that_is_up_before_the_first_step_is_said(
    call: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(tmp_path, "--max-time", "0.001s") == commands.UNFINISHED
    assert "0 of 2 epochs" in capsys.readouterr().out
    assert not (tmp_path / "tiny" / "cifar10-conv2d").exists()


@pytest.fixture
def two(tiny: Table, data_dir: Path, tmp_path: Path) -> list[Job]:
    asked = planned(tiny.rows[:2], [42], tmp_path / "out", Told(epochs=2, data_dir=data_dir))
    return [job for several in asked for job in several]


def instead(monkeypatch: pytest.MonkeyPatch, script: str) -> tuple[list[subprocess.Popen[bytes]], list[list[str]]]:
    """Run a script in place of training; the processes, and what they were asked for."""
    started: list[subprocess.Popen[bytes]] = []
    asked: list[list[str]] = []
    popen = subprocess.Popen

    def start(words: list[str], **options: Any) -> subprocess.Popen[bytes]:
        asked.append(words)
        started.append(popen([sys.executable, "-c", script], **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    return started, asked


def test_processes_are_asked_to_save_when_the_time_is_up(two: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(130)); time.sleep(60)"
    started, asked = instead(monkeypatch, script)
    began = time.monotonic()
    outcome = jobs.run_all(two, 2, began + 2, "weights")
    assert (outcome.wrong, outcome.interrupted) == ({}, False)
    assert len(started) == 2
    assert all(0 < float(words[words.index("--max-time") + 1].removesuffix("s")) <= 2 for words in asked)
    assert all(process.returncode in (130, -signal.SIGTERM) for process in started)


def test_a_process_that_fails_says_why_and_the_others_run(two: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    started, _ = instead(monkeypatch, "import sys; print('more'); sys.exit('out of memory')")
    outcome = jobs.run_all([*two, two[0]], 2, None, "weights")
    assert len(started) == 2
    assert [reason.split(" (see")[0] for reason in outcome.wrong.values()] == ["out of memory"] * 2
    assert list(outcome.wrong) == [job.folder for job in two]


def test_what_says_two_things_is_refused(call: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--figures", "--static"], "--static, --plan and --figures are three things to do; give one"),
        (["--jobs", "0"], "--jobs must be at least 1, got 0"),
        (["--seeds", "3", "3"], "--seeds must be different numbers, got 3 3"),
        (["--max-time", "soon"], "--max-time must be a time such as 9m"),
        (["--json", str(tmp_path / "a.json")], "--json goes with --static"),
        (["--epochs", "0"], "--epochs must be at least 1, got 0"),
    ):
        assert call(tmp_path, *arguments) == cli.MISUSED
        assert message in capsys.readouterr().err


def test_lines_of_a_figure_are_called_what_they_differ_in(tmp_path: Path) -> None:
    def names(table: str, field: str, *words: str) -> set[str]:
        rows = plan.chosen(TABLES[table], words, ["cifar10"])
        asked = planned(rows, [42], tmp_path, Told())
        found = [result(row, job) for row, (job,) in zip(rows, asked, strict=True) if field in row.configuration]
        return {figures._series(each, found, field) for each in found}

    assert names("vary-lambda", "ratio") == {"with positions", "without positions"}
    assert names("vary-lambda", "ratio", "without") == {""}
    assert names("vgg-k", "k") == {"1x1 kernel", "2x2 kernel", "3x3 kernel"}
    assert names("vgg-lr", "lr") == {"λ = 0.0", "λ = 0.5", "λ = 1.0"}
    assert names("vit-k", "k") == {"convnn, all", "convnn, random", "kvt"}
    assert "spatial, λ = 0.5" in names("vgg-candidates", "r")


def test_a_figure_says_how_its_rows_were_run(tmp_path: Path) -> None:
    rows = plan.chosen(TABLES["vgg-k"], ["3x3", "2x2"], ["cifar10"])[:12]
    short, long = (planned(rows, [42], tmp_path, Told(epochs=each, precision="tf32")) for each in (5, 150))
    found = [replace(result(row, job), epochs=5) for row, (job,) in zip(rows, short, strict=True)]
    assert figures.about(found) == "ours: 5 epochs, tf32, 1 seed"
    more = [replace(result(row, job), seeds=(42, 43)) for row, (job,) in zip(rows, long, strict=True)]
    both = figures.about([*found, *more])
    assert both == "ours: 5 to 150 epochs, tf32, 1 to 2 seeds; means over seeds, bars: their standard deviation"
    assert figures.about(more, bars=False) == "ours: 150 epochs, tf32, 2 seeds; means over seeds"
    axes: Any = Figure().subplots()
    figures._against_gflops(axes, [*found, *more], "k")
    labels = axes.get_legend_handles_labels()[1]
    assert "3x3 kernel, λ = 0.0, 5 epochs, tf32" in labels
    assert "3x3 kernel, λ = 0.0, 150 epochs, tf32" in labels
    looks = {tuple(figures._look(number).items()) for number in range(40)}
    assert len(looks) == 40


def result(row: Row, job: Job) -> results.Result:
    return results.Result(row, job, (50.0,), (1.0,), (50.0,), (), (42,), 150, 1.0, "cpu", 1, 1.0, ())


def test_a_run_on_its_way_is_a_curve_and_no_result(
    call: Call, tiny: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, 5)  # of three batches an epoch
        assert call(tmp_path, "--rows", "Branching", "--seeds", "3") == commands.UNFINISHED
    assert call(tmp_path, "--rows", "Conv2D") == commands.HOLDS
    found, (going,) = results.collect(tiny, tmp_path), results.going(tiny, tmp_path)
    assert [each.row.label for each in found] == ["Conv2D"]
    assert (going.row.label, going.how, going.epochs) == ("Branching, 0.5", ["1 of 2 epochs", "float32", "seed 3"], 1)
    places: Any = Figure().subplots(1, 3)
    figures._curves(places, [*found, going])
    names = ["Conv2D, 2 epochs, float32", "Branching, 0.5, 1 of 2 epochs, float32, seed 3"]
    assert [line.get_label() for line in places[0].get_lines()] == names
    assert list(places[0].get_lines()[1].get_ydata()) == [Run(going.job.folder).rows()[0]["train_loss"]]
    (tmp_path / "tiny" / "loss.png").unlink()
    capsys.readouterr()
    assert call(tmp_path, "--figures") == commands.HOLDS
    assert "1 of 2 epochs, float32, seed 3" in capsys.readouterr().out
    assert (tmp_path / "tiny" / "loss.png").exists()
    assert call(tmp_path, "--figures", "--rows", "Branching") == commands.HOLDS
    assert [row["row"] for row in written(tmp_path)] == ["Conv2D"]
    assert "Conv2D" not in capsys.readouterr().out
    assert figures.draw(tmp_path / "alone", tiny, [], [going]) == [tmp_path / "alone" / "loss.png"]
    # More than can be told apart: those that have finished.
    several = [replace(going, job=replace(going.job, folder=tmp_path / str(n))) for n in range(figures.MOST)]
    assert figures.draw(tmp_path / "many", tiny, found, several)[-1].name == "loss.png"
    assert figures.draw(tmp_path / "too-many", tiny, [], [*several, going]) == []
    compiled = replace(going.job.recipe, compile=True)
    assert replace(going, job=replace(going.job, recipe=compiled)).how[1:3] == ["float32", "compiled"]


def test_a_run_that_is_two_rows_is_drawn_once(call: Call, tiny: Table, tmp_path: Path) -> None:
    assert call(tmp_path) == commands.HOLDS
    found = results.collect(tiny, tmp_path)
    places: Any = Figure().subplots(1, 3)
    figures._curves(places, [*found, replace(found[0], row=replace(found[0].row, label="the same"))])
    for place, values in zip(places, ("train_loss", "val_loss", "val_acc"), strict=True):
        line, other = place.get_lines()
        assert (line.get_label(), other.get_label()) == ("Conv2D", "Branching, 0.5")
        factor = 100 if values == "val_acc" else 1
        assert line.get_ydata()[0] == pytest.approx(factor * found[0].curves[0][values])


def test_the_last_ten_epochs_are_told_where_there_are_twenty(call: Call, tmp_path: Path) -> None:
    one = ("--rows", "Branching", "--seeds", "1", "2")
    assert call(tmp_path, *one, "--epochs", "20") == commands.HOLDS
    (row,) = written(tmp_path)
    runs = [Run(tmp_path / "tiny" / "cifar10-branching-0.5" / f"seed-{seed}") for seed in (1, 2)]
    lasts = [[100 * epoch["val_acc"] for epoch in run.rows()[10:]] for run in runs]
    assert float(row["late_accuracy"]) == pytest.approx(mean(map(mean, lasts)), rel=1e-5)
    assert float(row["late_std"]) == pytest.approx(stdev(map(mean, lasts)), rel=1e-5)
    assert float(row["epoch_std"]) == pytest.approx(mean(map(stdev, lasts)), rel=1e-5)
    assert call(tmp_path / "short", *one) == commands.HOLDS
    (row,) = written(tmp_path / "short")
    assert row["late_accuracy"] == row["late_std"] == row["epoch_std"] == ""

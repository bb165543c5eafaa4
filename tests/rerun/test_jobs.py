"""A table is run, stopped, gone on with and written, row by row."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from convnn_lab import cli
from convnn_lab.rerun import commands, figures, jobs, results
from convnn_lab.rerun.plan import Job
from convnn_lab.tables import Table
from convnn_lab.train.evaluate import evaluate
from convnn_lab.train.run import Run
from tests.rerun.calls import Call, epochs, stop_after, written


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
    assert set(axes.get_legend_handles_labels()[1]) == {"ours", "author's logs, last of 10 epochs"}
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


def test_every_epoch_behind_a_table_is_written(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(tmp_path, "--rows", "Conv2D", "--seeds", "1", "2") == commands.HOLDS
    with monkeypatch.context() as patch:
        stop_after(patch, 5)  # of three batches an epoch
        assert call(tmp_path, "--rows", "Branching", "--seeds", "3") == commands.UNFINISHED
    lines = written(tmp_path, "epochs.csv")
    told = [(each["row"], each["seed"], each["epoch"], each["of"]) for each in lines]
    whole = [("Conv2D", seed, epoch, "2") for seed in "12" for epoch in "01"]
    assert told == [*whole, ("Branching, 0.5", "3", "0", "2")]
    rows = Run(tmp_path / "tiny" / "cifar10-conv2d" / "seed-2").rows()
    for name in ("train_loss", "train_acc", "val_loss", "val_acc"):
        assert [float(each[name]) for each in lines[2:4]] == pytest.approx([row[name] for row in rows], rel=1e-5)

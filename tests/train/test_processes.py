"""Real processes: killed, asked to stop, and several that train together."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from convnn_lab import cli
from convnn_lab.train.run import Run
from tests.train.test_runs import assert_same, rows

QUICK = ["digits", "--layer", "conv", "--batch", "256", "--accelerator", "cpu", "--save-steps", "1"]


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "convnn_lab.cli", "train", *arguments]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PL_")}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env=alone, start_new_session=True, **pipes)


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("reference") / "run"
    assert cli.main(["train", *QUICK, "--epochs", "15", "--output", str(folder)]) == 0
    return Run.open(folder)


def test_a_killed_process_loses_nothing_that_was_saved(
    tmp_path: Path, reference: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    process = start(*QUICK, "--epochs", "15", "--output", str(folder))
    wait_for(folder / "checkpoints" / "last", process)
    time.sleep(random.uniform(0, 2))
    process.kill()
    process.communicate()
    run = Run.open(folder)
    assert not run.finished
    done = len(run.rows())
    assert cli.main(["train", "--resume", str(folder)]) == 0
    assert_same(run, reference)
    assert [row["epoch"] for row in run.rows()] == list(range(15))
    assert done < 15
    capsys.readouterr()
    assert cli.main(["train", "--resume", str(folder)]) == 0
    assert "has finished already" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_is_asked_to_stop_saves_first(number: signal.Signals, tmp_path: Path, reference: Run) -> None:
    folder = tmp_path / "run"
    process = start(*QUICK[:-2], "--epochs", "15", "--output", str(folder))
    wait_for(folder / "metrics.csv", process)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, (out, err)
    assert f"stopped by {number.name}; convnn train --resume {folder} goes on" in out
    assert err == ""
    run = Run.open(folder)
    summary: Any = run.summary()
    assert summary["status"] == "stopped"
    assert 0 < summary["epochs"] < 15
    assert cli.main(["train", "--resume", str(folder)]) == 0
    assert_same(run, reference)


def pictures(folder: Path) -> Path:
    draw = np.random.default_rng(0)
    for part, count in (("train", 24), ("val", 4)):
        for name in ("bird", "cat"):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(0, 256, (20, 24, 3), np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{number}.png")
    return folder


def test_a_signal_to_all_processes_of_a_folder_saves_too(tmp_path: Path) -> None:
    given = ["digits", "--dataset", "folder", "--data-dir", str(pictures(tmp_path / "data")), "--image-size", "16"]
    given += ["--batch", "8", "--layer", "conv", "--workers", "2", "--mixup", "0.5", "--erase", "0.5", "--flip", "0.5"]
    given += ["--epochs", "40", "--accelerator", "cpu"]
    process = start(*given, "--output", str(tmp_path / "run"))
    wait_for(tmp_path / "run" / "metrics.csv", process)
    os.killpg(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, ""), (out, err)
    run = Run.open(tmp_path / "run")
    summary: Any = run.summary()
    assert (summary["status"], summary["epochs"] >= 1) == ("stopped", True)
    config = run.folder / "config.json"
    config.write_text(config.read_text().replace('"epochs": 40', f'"epochs": {summary["epochs"] + 1}'))
    assert cli.main(["train", "--resume", str(run.folder)]) == 0
    assert [row["epoch"] for row in run.rows()] == list(range(summary["epochs"] + 1))


def test_two_processes_learn_what_one_learns(tmp_path: Path) -> None:
    given = ["digits", "--model", "vit_tiny", "--layer", "attention", "--image-size", "16", "--patch", "8"]
    given += ["--epochs", "2", "--batch", "300", "--optimizer", "sgd", "--lr", "0.05", "--accelerator", "cpu"]
    given += ["--ema", "0.5"]
    both = start(*given, "--devices", "2", "--output", str(tmp_path / "two"))
    assert cli.main(["train", *given, "--output", str(tmp_path / "one")]) == 0
    out, err = both.communicate(timeout=180)
    assert both.returncode == 0, (out, err)
    one, two = rows(Run.open(tmp_path / "one")), rows(Run.open(tmp_path / "two"))
    assert [row["epoch"] for row in two] == [0, 1]
    for mine, theirs in zip(one, two, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    # The two saw every image once: 1,437 is odd, and so is the last batch.
    assert round(two[0]["train_acc"] * 1437, 6) == round(one[0]["train_acc"] * 1437, 6) % 1437
    assert out.count("% after 2 epochs") == 1

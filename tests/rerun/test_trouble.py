"""Runs that are killed, damaged, in each other's way, or on a disk that is full."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from convnn_lab import cli
from convnn_lab.rerun import commands, jobs, results
from convnn_lab.tables import Table
from convnn_lab.train import fit
from convnn_lab.train.run import Run
from tests.rerun.calls import Call, epochs, stop_after, written


def test_who_waits_for_another_process_goes_on_from_where_that_one_ended(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call(tmp_path / "whole", "--rows", "Conv2D") == commands.HOLDS
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        assert call(tmp_path / "out", "--rows", "Conv2D") == commands.UNFINISHED
    alone = Run.alone

    @contextmanager
    def waiting(run: Run) -> Iterator[None]:
        monkeypatch.setattr(Run, "alone", alone)
        with monkeypatch.context() as patch:
            stop_after(patch, 3)
            fit.resume(run.folder)  # what the other one does meanwhile
        with alone(run):
            yield

    run = Run(tmp_path / "out" / "tiny" / "cifar10-conv2d" / "seed-42")
    monkeypatch.setattr(Run, "alone", waiting)
    fit.resume(run.folder)
    assert run.finished
    assert epochs(run) == epochs(Run(tmp_path / "whole" / "tiny" / "cifar10-conv2d" / "seed-42"))


def test_a_folder_of_the_first_moment_is_begun_anew(call: Call, tmp_path: Path) -> None:
    folder = tmp_path / "tiny" / "cifar10-conv2d" / "seed-42"
    folder.mkdir(parents=True)
    (folder / "data.json").write_text("{}")
    assert call(tmp_path, "--rows", "Conv2D") == commands.HOLDS
    assert Run(folder).finished


def test_one_damaged_run_hides_no_others(
    call: Call, tiny: Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(tmp_path, "--seeds", "1", "2", "--rows", "Conv2D") == commands.HOLDS
    folders = [tmp_path / "tiny" / "cifar10-conv2d" / f"seed-{seed}" for seed in (1, 2)]
    lines = (folders[0] / "metrics.csv").read_text().splitlines()
    (folders[0] / "metrics.csv").write_text("\n".join(lines[:-1]) + "\n")
    (found,) = results.collect(tiny, tmp_path)
    assert found.seeds == (2,)
    assert "seed-1/metrics.csv does not have the 2 epochs of the run" in capsys.readouterr().err
    environment = (folders[1] / "environment.json").read_text()
    for file, said, why in (
        ("environment.json", "[]", "environment.json must hold a list of starts with their gpus, got []"),
        ("environment.json", "{}", "environment.json must hold a list of starts with their gpus, got {}"),
        ("environment.json", "", "environment.json is damaged"),
        ("metrics.csv", "epoch,val_acc,val_loss\n0,1,1\n1,1,1\n", "metrics.csv lacks train_loss, train_acc, seconds"),
    ):
        (folders[1] / file).write_text(said)
        assert results.collect(tiny, tmp_path) == []
        assert f"left out: {folders[1]}/{why}" in capsys.readouterr().err
        summary = (folders[1] / "summary.json").read_text()
        (folders[1] / "summary.json").write_text("")  # one on its way is left out alike
        assert [going.seeds for going in results.going(tiny, tmp_path)] == []
        assert why in capsys.readouterr().err
        (folders[1] / "summary.json").write_text(summary)
        (folders[1] / "environment.json").write_text(environment)
    (folders[1] / "summary.json").write_text("")
    assert results.collect(tiny, tmp_path) == []
    assert call(tmp_path, "--seeds", "2", "--rows", "Conv2D") == commands.FAILS
    assert "kept the weights alone" in " ".join(capsys.readouterr().out.split())


def test_a_run_without_a_summary_goes_on_from_its_last_step(call: Call, tmp_path: Path) -> None:
    assert call(tmp_path, "--rows", "Conv2D", "--keep", "all") == commands.HOLDS
    run = Run(tmp_path / "tiny" / "cifar10-conv2d" / "seed-42")
    before = epochs(run)
    (run.folder / "summary.json").write_text("")
    assert call(tmp_path, "--rows", "Conv2D") == commands.HOLDS
    assert epochs(run) == before
    assert [row["seeds"] for row in written(tmp_path)] == ["42"]


def test_other_data_are_refused_and_never_pooled(
    call: Call, tiny: Table, tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call(tmp_path, "--seeds", "1", "2", "--rows", "Conv2D") == commands.HOLDS
    about = tmp_path / "tiny" / "cifar10-conv2d" / "seed-2" / "data.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"train_count": 280}))
    assert sorted(found.seeds for found in results.collect(tiny, tmp_path)) == [(1,), (2,)]
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        assert call(tmp_path, "--seeds", "3", "--rows", "Conv2D") == commands.UNFINISHED
    stopped = tmp_path / "tiny" / "cifar10-conv2d" / "seed-3"
    about = stopped / "data.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"test_count": 7}))
    with pytest.raises(ValueError, match="tested on 60 and 7 samples, got 60 and 30"):
        fit.resume(stopped, data_dir=data_dir / "cifar10")


@pytest.mark.parametrize(
    ("code", "last", "said"),
    [
        (-signal.SIGKILL, "epoch 2/8", "killed by SIGKILL"),
        (2, "convnn: another trains here\nepoch 2/8 of whoever writes into it too", "another trains here"),
        (1, "Traceback\ntorch.OutOfMemoryError: CUDA", "torch.OutOfMemoryError: CUDA"),
    ],
)
def test_why_a_process_ended_is_its_own_word(code: int, last: str, said: str, two: Any, tmp_path: Path) -> None:
    log = tmp_path / "seed-42.log"
    log.write_text("convnn: an error of an earlier call\n")
    process = SimpleNamespace(poll=lambda: code, returncode=code)
    with log.open("a") as file:
        beside = jobs.Beside(two[0], process, file, file.tell())  # type: ignore[arg-type]
        file.write(f"convnn: note: by the way\nconvnn: warning: of this\n{last}\n")
        file.flush()
        outcome = jobs.Outcome()
        assert beside.ended(outcome, "all")
    assert outcome.wrong == {two[0].folder: f"{said} (see {log})"}


def test_a_full_disk_ends_a_row_and_not_the_table(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(tmp_path, "--rows", "Conv2D") == commands.HOLDS

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fit, "train", full)
    assert call(tmp_path) == commands.FAILS
    assert "No space left on device" in " ".join(capsys.readouterr().out.split())
    assert [row["row"] for row in written(tmp_path)] == ["Conv2D"]


def test_figures_of_nothing_are_refused(call: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(tmp_path / "typo", "--figures") == cli.MISUSED
    assert "no run of tiny in" in capsys.readouterr().err
    assert not (tmp_path / "typo").exists()


def test_a_command_is_printed_with_its_brackets(
    call: Call, tmp_path: Path, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = tmp_path / "[old]"
    shutil.copytree(data_dir, odd)
    assert call(tmp_path / "out", "--rows", "Conv2D", "--data-dir", str(odd)) == commands.HOLDS
    assert "[old]" in "".join(capsys.readouterr().out.split("to repeat it")[1].split())

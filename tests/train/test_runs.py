"""Runs: what a folder holds, resuming after every step, damage, disks that are full, losses that are no numbers."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from convnn_lab import cli
from convnn_lab.recipes import RECIPES, Recipe
from convnn_lab.train import callbacks, fit, module, store
from convnn_lab.train.run import Run
from convnn_lab.train.source import load


class DeathError(BaseException):
    """The end of a process that nothing can answer."""


def rows(run: Run) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in run.rows()]


def weights(run: Run, name: str = "last/weights.safetensors") -> dict[str, Tensor]:
    return load_file(run.checkpoints / name)


def assert_same(one: Run, other: Run, *names: str) -> None:
    assert rows(one) == rows(other)
    for name in ("last/weights.safetensors", *names):
        mine, theirs = weights(one, name), weights(other, name)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine), name


def dead(given: Recipe, folder: Path, saves: int) -> Run:
    """A run whose process died after so many checkpoints."""
    save, counted = callbacks.Keeper.save, iter(range(1, 1000))

    def saved(self: Any, *arguments: Any) -> None:
        save(self, *arguments)
        if next(counted) == saves:
            raise DeathError

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(callbacks.Keeper, "save", saved)
        with pytest.raises(DeathError):
            fit.train("digits", given, folder, quiet=True)
    return Run.open(folder)


@pytest.fixture(scope="module")
def hard() -> Recipe:
    """Everything that draws random numbers or keeps a state."""
    return replace(
        RECIPES["digits"], epochs=2, batch=512, layer="hybrid", ratio=0.25, candidates="random:16", ema=0.9, mixup=0.2,
        cutmix=0.5, erase=0.5, accumulate=2, warmup=0.5, save_steps=1, accelerator="cpu",
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(hard: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return fit.train("digits", hard, tmp_path_factory.mktemp("runs") / "whole", quiet=True)


@pytest.mark.parametrize("saves", [1, 2, 3, 4, 5])
def test_a_run_that_died_after_any_step_ends_as_one_that_did_not(
    saves: int, hard: Recipe, whole: Run, tmp_path: Path
) -> None:
    run = dead(hard, tmp_path / "run", saves)
    torch.rand(3)  # whatever happened in between
    resumed = fit.resume(run.folder, quiet=True)
    assert_same(resumed, whole, "last/average.safetensors", "best/weights.safetensors")
    assert resumed.summary()["best"] == whole.summary()["best"]  # type: ignore[index]


def test_one_seed_gives_one_run_and_another_gives_another(hard: Recipe, whole: Run, tmp_path: Path) -> None:
    again = fit.train("digits", hard, tmp_path / "again", quiet=True)
    assert_same(again, whole, "last/average.safetensors")
    other = fit.train("digits", replace(hard, seed=1), tmp_path / "other", quiet=True)
    assert not torch.equal(weights(other)["conv1.weight"], weights(whole)["conv1.weight"])


def test_a_folder_holds_all_there_is_to_know(whole: Run, hard: Recipe) -> None:
    assert whole.recipe() == ("digits", hard)
    assert [row["epoch"] for row in whole.rows()] == [0, 1]
    header = (whole.folder / "metrics.csv").read_text().splitlines()[0]
    assert header.startswith("epoch,train_loss,train_acc,val_loss,val_acc,val_top5")
    assert {"lr", "seconds", "ema_val_acc"} <= set(header.split(","))
    summary: Any = whole.summary()
    assert summary["status"] == "finished"
    assert summary["final"] == whole.rows()[-1]
    assert summary["best"]["val_acc"] == max(row["val_acc"] for row in whole.rows())
    started = store.read_json(whole.folder / "environment.json")
    assert started[0]["packages"]["torch"] == torch.__version__.split("+")[0] or started[0]["packages"]["torch"]
    assert (whole.folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert store.read_json(whole.folder / "data.json")["classes"] == list("0123456789")
    state = torch.load(whole.checkpoints / "last" / "state.pt", weights_only=True)
    assert state["run"]["step"] == summary["steps"]


def test_training_from_a_run_repeats_it(quick: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = fit.train("digits", quick, tmp_path / "first", quiet=True)
    assert cli.main(["train", "--from", str(first.folder), "--output", str(tmp_path / "second")]) == 0
    assert_same(Run.open(tmp_path / "second"), first)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("epoch 1/2  train ")
    assert printed[-1].endswith("% after 2 epochs")
    assert cli.main(["train", "--resume", str(first.folder)]) == 0
    assert "has finished already" in capsys.readouterr().out
    for arguments, message in (
        (["--from", str(first.folder), "--output", str(first.folder)], "holds a run already; convnn train --resume"),
        (["--resume", str(first.folder), "--lr", "1"], "a resumed run keeps its recipe"),
        (["--resume", str(tmp_path)], "holds no run: there is no config.json in it"),
        (["digits", "--layer", "conv", "--ratio", "0.5"], "--ratio means nothing to resnet8 with layer conv"),
        (["digits", "--flip", "0.5"], "--flip is for folders of images"),
        (["digits", "--mixup", "1", "--batch", "63"], "mixing needs an even number of images at once, got 63"),
        (["digits", "--fsdp", "--accelerator", "cpu"], "--fsdp needs GPUs"),
        (["digits", "--output", str(tmp_path)], "--output must name a new or empty folder"),
        (["cifar10"], "unknown recipe 'cifar10'"),
        (["vgg11-cifar10"], "cifar10: say where its files are with --data-dir"),
        (["--lr", "1"], "a recipe comes first"),
    ):
        extra = [] if "--output" in arguments or "--resume" in arguments else ["--output", str(tmp_path / "none")]
        assert cli.main(["train", *arguments, *extra]) == cli.MISUSED, arguments
        assert message in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_epochs_have_one_row_however_often_they_were_begun(
    quick: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = replace(quick, epochs=3)
    reference = fit.train("digits", given, tmp_path / "reference", quiet=True)
    write = Run.write_rows

    def written(self: Run, found: list[Any]) -> None:
        write(self, found)
        if len(found) == 2:
            raise DeathError

    with monkeypatch.context() as patched:
        patched.setattr(Run, "write_rows", written)
        with pytest.raises(DeathError):
            fit.train("digits", given, tmp_path / "run", quiet=True)
    assert len(Run(tmp_path / "run").rows()) == 2  # written, but not yet saved
    assert_same(fit.resume(tmp_path / "run", quiet=True), reference)


def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    hard: Recipe, whole: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = dead(hard, tmp_path / "run", 3)
    path = run.checkpoints / "last" / "state.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert_same(fit.resume(run.folder, quiet=True), whole)
    assert "state.pt does not have the checksum it was written with" in capsys.readouterr().err
    for name in ("last", "previous"):
        (run.checkpoints / name / "weights.safetensors").write_bytes(b"")
    (run.folder / "summary.json").unlink()
    assert_same(fit.resume(run.folder, quiet=True), whole)
    said = capsys.readouterr().err
    assert said.count("weights.safetensors has 0 bytes") == 2
    assert "no checkpoint is whole; the run starts again" in said


def test_nobody_else_trains_in_the_same_folder(quick: Recipe, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.create("digits", quick, load(quick))
    with run.alone():
        code = f"from convnn_lab.train.run import Run\nwith Run.open({str(run.folder)!r}).alone(): pass"
        code = code.replace("Run.open(", "Run(__import__('pathlib').Path(")
        code = code.replace(").alone", ")).alone")
        answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert "another process is training in" in answer.stderr


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_loss_that_is_no_number_stops_the_run_or_is_skipped(
    policy: Any, quick: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = replace(quick, epochs=3, non_finite=policy, save_steps=1)
    calls: list[int] = []

    def lost(_: Any, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return (images * float("nan") if len(calls) == 4 else images), labels

    monkeypatch.setattr(module.Classifier, "_augmented", lost)
    if policy == "stop":
        with pytest.raises(module.NonFiniteError, match=r"the loss of step 4 \(epoch 1\) is not a finite number"):
            fit.train("digits", given, tmp_path / "run", quiet=True)
        run = Run(tmp_path / "run")
        assert (run.summary() or {})["status"] == "failed"
        assert all(bool(value.isfinite().all()) for value in weights(run).values())
        return
    run = fit.train("digits", given, tmp_path / "run", quiet=True)
    summary: Any = run.summary()
    assert (summary["skipped_steps"], summary["status"]) == (1, "finished")
    assert all(value == value for row in run.rows() for value in row.values())  # noqa: PLR0124
    assert all(bool(value.isfinite().all()) for value in weights(run).values())
    assert capsys.readouterr().err == ""


def test_time_that_is_up_leaves_a_run_to_be_resumed(quick: Recipe, tmp_path: Path) -> None:
    reference = fit.train("digits", quick, tmp_path / "reference", quiet=True)
    stopped = fit.train("digits", replace(quick, max_time="0.001s"), tmp_path / "run", quiet=True)
    summary: Any = stopped.summary()
    assert (summary["status"], summary["steps"], stopped.interrupted) == ("stopped", 1, False)
    assert_same(fit.resume(stopped.folder, quiet=True), reference)


def test_a_signal_in_the_first_step_of_a_process_does_not_wait_for_its_end(
    quick: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, augmented = fit.train("digits", quick, tmp_path / "reference", quiet=True), module.Classifier._augmented
    calls: list[int] = []
    undisturbed: list[int] = []

    def interrupted(learner: Any, *batch: Tensor) -> Any:
        calls.append(1)
        if len(calls) in (1, 3, 4):  # the first, then the second of a process, then the first again
            with suppress(Exception):  # as compilers do
                try:
                    signal.raise_signal(signal.SIGTERM)
                finally:
                    signal.raise_signal(signal.SIGTERM)  # as from the parent, after the one to its whole group
                    undisturbed.append(len(calls))
        return augmented(learner, *batch)

    monkeypatch.setattr(module.Classifier, "_augmented", interrupted)
    run = fit.train("digits", quick, tmp_path / "run", quiet=True)
    for calls_made, steps in ((1, 0), (3, 2), (4, 2)):
        summary: Any = run.summary()
        assert (len(calls), summary["steps"], summary["status"]) == (calls_made, steps, "stopped")
        assert run.interrupted
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        run = fit.resume(run.folder, quiet=True)
    assert undisturbed == [1, 3, 4]  # what ends the run goes on when it is told again
    assert not run.interrupted
    assert_same(run, reference)


def test_a_signal_to_one_of_several_processes_waits_for_the_others(tmp_path: Path) -> None:
    keeper = callbacks.Keeper(Run(tmp_path), [], None)
    alone, several = (cast("Any", SimpleNamespace(world_size=count)) for count in (1, 2))
    learner = cast("Any", None)  # is not looked at
    try:
        keeper.on_train_start(several, learner)
        signal.raise_signal(signal.SIGTERM)
        assert keeper.asked == "SIGTERM"
        keeper.asked = ""
        keeper.on_train_start(alone, learner)
        with pytest.raises(callbacks.Stopped, match="SIGTERM"):
            signal.raise_signal(signal.SIGTERM)
    finally:
        keeper.leave()


def mounted(folder: Path, size: str) -> bool:
    """Mount a small disk, where that is allowed."""
    folder.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    return mount is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0


@contextmanager
def full(disk: Path) -> Iterator[None]:
    """Leave less room than a checkpoint needs."""
    left = os.statvfs(disk)
    (disk / "filler").write_bytes(bytes(left.f_bavail * left.f_frsize - 300_000))
    yield
    (disk / "filler").unlink()


@contextmanager
def limited(size: int) -> Iterator[None]:
    """The nearest thing to a full disk that needs no rights: files that may not grow."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_stops_with_one_line_and_earlier_files_intact(
    quick: Recipe, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    disk, given = tmp_path / "disk", replace(quick, epochs=4, save_steps=1)
    small = mounted(disk, "4m")
    if small:
        request.addfinalizer(lambda: subprocess.run(["umount", "-l", str(disk)], check=True))
    run = dead(given, disk / "run", 2)
    with full(disk) if small else limited(200_000), pytest.raises(store.StorageError, match=r"cannot write .* intact"):
        fit.resume(run.folder, quiet=True)
    assert store.damage(run.checkpoints / "last") is None
    assert not list(run.folder.rglob(".*.new"))
    assert_same(fit.resume(run.folder, quiet=True), fit.train("digits", given, tmp_path / "reference", quiet=True))


def test_files_are_whole_or_not_there(tmp_path: Path) -> None:
    store.write_json(tmp_path / "a.json", {"a": 1})

    def broken(path: Path) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(store.StorageError, match="No space left on device; what was written before is intact"):
        store.write_folder(tmp_path / "folder", {"file": broken}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json"]
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": 1}
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ValueError, match=r"a\.json is damaged"):
        store.read_json(tmp_path / "a.json")

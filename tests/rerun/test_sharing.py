"""Processes that train side by side share a GPU through a service, where there is one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from convnn_lab.rerun import jobs
from convnn_lab.rerun.sharing import CONTROL, LOGS, PIPES, sharing

# Notes what it was called with and where; like the real one it leaves a process that keeps its output open.
SERVICE = """#!/bin/sh
read given
echo "$* $given $CUDA_MPS_PIPE_DIRECTORY" >> "$0.calls"
if [ "$1" = -d ]; then
    {starts}
    sleep 60 &
    echo $! >> "$0.left"
fi
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, starts: str = "") -> Path:
    control = folder / CONTROL
    control.write_text(SERVICE.format(starts=starts))
    control.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.delenv(PIPES, raising=False)
    return control


def calls(control: Path) -> list[str]:
    return control.with_name(f"{CONTROL}.calls").read_text().splitlines()


def end(control: Path) -> None:
    os.kill(int(control.with_name(f"{CONTROL}.left").read_text()), 9)


def test_a_service_runs_as_long_as_processes_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control = install(tmp_path, monkeypatch)
    with sharing() as variables:
        folder = variables[PIPES]
        assert variables[LOGS] == folder
        assert Path(folder).is_dir()
        assert calls(control) == [f"-d  {folder}"]
    assert calls(control)[1:] == [f" quit {folder}"]
    assert not Path(folder).exists()
    assert PIPES not in os.environ
    end(control)


def test_a_service_ends_with_an_interrupted_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control = install(tmp_path, monkeypatch)
    with pytest.raises(KeyboardInterrupt), sharing():
        raise KeyboardInterrupt
    assert [call.split()[0] for call in calls(control)] == ["-d", "quit"]
    end(control)


def test_processes_are_told_of_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []

    def start(job: SimpleNamespace, around: Mapping[str, str], seconds: float | None) -> SimpleNamespace:
        told.append((job, around[PIPES], around["PATH"], seconds))
        return SimpleNamespace(ended=lambda *_: True)

    control = install(tmp_path, monkeypatch)
    monkeypatch.setattr(jobs.Beside, "start", start)
    waiting = [SimpleNamespace(command="first"), SimpleNamespace(command="second")]
    jobs._side_by_side(waiting, 2, None, jobs.Outcome(), "all")  # type: ignore[arg-type]
    folder = calls(control)[0].split()[-1]
    assert told == [(job, folder, os.environ["PATH"], None) for job in waiting]
    assert [call.split()[0] for call in calls(control)] == ["-d", "quit"]
    end(control)


def test_a_service_that_does_not_start_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    control = install(tmp_path, monkeypatch, starts="echo no permission >&2; exit 1")
    with sharing() as variables:
        assert variables == {}
    assert len(calls(control)) == 1
    assert "take turns on the GPU: no permission" in capsys.readouterr().out


def test_a_service_the_caller_names_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control = install(tmp_path, monkeypatch)
    monkeypatch.setenv(PIPES, "/somewhere")
    with sharing() as variables:
        assert variables == {}
    assert not control.with_name(f"{CONTROL}.calls").exists()


def test_without_a_service_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with sharing() as variables:
        assert variables == {}

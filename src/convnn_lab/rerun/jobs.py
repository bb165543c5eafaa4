"""Runs what rows ask for: one after the other in this process, or several side by side in processes of their own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TextIO

from convnn_lab.rerun.plan import Job, plain
from convnn_lab.rerun.sharing import sharing
from convnn_lab.train import checkpoints, fit, store
from convnn_lab.train.run import Run
from convnn_lab.train.source import load

Keep = Literal["weights", "all", "nothing"]
LOOK_EVERY = 0.2  # seconds between two looks at processes


@dataclass
class Outcome:
    """What became of runs in this call: which could not be run or failed and why, and whether a signal ended it."""

    wrong: dict[Path, str] = field(default_factory=dict)
    interrupted: bool = False


def run_all(asked: Sequence[Job], at_once: int, deadline: float | None, keep: Keep) -> Outcome:
    """Run what is missing until the deadline; what was stopped is ready to be resumed."""
    different = list(dict.fromkeys(asked))
    for job in different:
        _require_same(job)
    outcome = Outcome(_unready(different))
    waiting = [job for job in different if job.folder not in outcome.wrong and not Run(job.folder).finished]
    try:
        if at_once == 1:
            _in_turn(waiting, deadline, outcome, keep)
        else:
            _side_by_side(waiting, at_once, deadline, outcome, keep)
    except KeyboardInterrupt:
        outcome.interrupted = True
    for job in different:
        tidy(Run(job.folder), keep)
    return outcome


def _require_same(job: Job) -> None:
    run = Run(job.folder)
    if run.exists and plain(run.recipe()[1]) != plain(job.recipe):
        raise ValueError(f"{run.folder} holds a run of another recipe; choose another --output")


def _unready(asked: Sequence[Job]) -> dict[Path, str]:
    """Why runs cannot be: their data are not there, or an earlier call saw them fail."""
    wrong, sets = {}, dict[Any, str]()
    for job in asked:
        run, recipe = Run(job.folder), job.recipe
        if run.finished:
            continue
        if (run.summary() or {}).get("status") == "failed":
            wrong[job.folder] = f"its loss was not finite; remove {job.folder} to run it again"
            continue
        key = (recipe.dataset, recipe.data_dir)
        if key not in sets:
            try:
                load(recipe)
                sets[key] = ""
            except (ValueError, OSError) as error:
                sets[key] = str(error)
        if sets[key]:
            wrong[job.folder] = sets[key]
    return wrong


def _in_turn(waiting: Sequence[Job], deadline: float | None, outcome: Outcome, keep: Keep) -> None:
    for number, job in enumerate(waiting):
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            return
        _say(f"[{number + 1}/{len(waiting)}] {job.command}")
        limit = None if left is None else f"{left:.3f}s"
        try:
            if Run(job.folder).exists:
                run = fit.resume(job.folder, max_time=limit, data_dir=job.recipe.data_dir)
            else:
                run = fit.train(job.recipe_name, replace(job.recipe, max_time=limit), job.folder)
        except (ValueError, RuntimeError, OSError) as error:  # no finite loss, a full device or disk
            outcome.wrong[job.folder] = _first_line(error)
            _say(f"failed: {outcome.wrong[job.folder]}")
            continue
        tidy(run, keep)
        if run.interrupted:
            raise KeyboardInterrupt


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@dataclass
class Beside:
    """A process that trains one run, and the file it talks to."""

    job: Job
    process: subprocess.Popen[bytes]
    file: TextIO
    began: int = 0  # where in the file

    @classmethod
    def start(cls, job: Job, around: Mapping[str, str], seconds: float | None) -> Beside:
        """Start or resume it, in a session of its own: this process stops it, or the clock if this one is gone."""
        words = job.words
        if Run(job.folder).exists:
            moved = [] if job.recipe.data_dir is None else ["--data-dir", str(job.recipe.data_dir)]
            words = ["train", "--resume", str(job.folder), *moved]
        words += [] if seconds is None else ["--max-time", f"{seconds:.3f}s"]
        log = job.folder.with_name(f"{job.folder.name}.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        file = log.open("a")
        began = file.tell()
        call = [sys.executable, "-m", "convnn_lab.cli", *words]
        process = subprocess.Popen(call, stdout=file, stderr=file, start_new_session=True, env=around)
        return cls(job, process, file, began)

    def ended(self, outcome: Outcome, keep: Keep) -> bool:
        """Whether it has ended; what became of it is noted."""
        if self.process.poll() is None:
            return False
        self.file.close()
        run, code = Run(self.job.folder), self.process.returncode
        if run.finished:
            tidy(run, keep)
            _say(f"finished: {self.job.folder}")
        elif code not in (0, 130, -signal.SIGTERM):
            outcome.wrong[self.job.folder] = f"{self._reason(code)} (see {self.file.name})"
            _say(f"failed: {self.job.folder}: {outcome.wrong[self.job.folder]}")
        return True

    def _reason(self, code: int) -> str:
        """What it said last, or the signal that ended it; another process may have written into the file too."""
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        lines = Path(self.file.name).read_bytes()[self.began :].decode(errors="replace").strip().splitlines()
        own = [line.removeprefix("convnn: ") for line in lines if line.startswith("convnn: ")]
        said = [line for line in own if not line.startswith(("note: ", "warning: "))]
        return (said or lines or [f"ended with {code}"])[-1]


def _side_by_side(waiting: Sequence[Job], at_once: int, deadline: float | None, outcome: Outcome, keep: Keep) -> None:
    threads = max(1, (os.cpu_count() or 1) // at_once)
    left, running = list(waiting), list[Beside]()
    with _leaving(), sharing() as variables:
        around = {"OMP_NUM_THREADS": str(threads), **os.environ, **variables}
        try:
            while left or running:
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    return
                while left and len(running) < at_once:
                    job = left.pop(0)
                    _say(f"[{len(waiting) - len(left)}/{len(waiting)}] {job.command}")
                    running.append(Beside.start(job, around, remaining))
                time.sleep(LOOK_EVERY)
                running = [each for each in running if not each.ended(outcome, keep)]
        finally:
            for each in running:
                each.process.terminate()  # it finishes its step and saves
            for each in running:
                each.process.wait()
                each.ended(outcome, keep)


@contextmanager
def _leaving() -> Iterator[None]:
    """Take a request to end for Ctrl-C, so that processes are told before this one goes."""

    def asked(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, asked)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def tidy(run: Run, keep: Keep) -> None:
    """Remove what a finished run needs no more: of VGG-11 that is 3 GB."""
    if keep == "all" or not run.finished or not run.checkpoints.is_dir():
        return
    if keep == "nothing":
        shutil.rmtree(run.checkpoints)
        return
    for name in ("previous", "best", "damaged"):
        shutil.rmtree(run.checkpoints / name, ignore_errors=True)
    last = run.checkpoints / "last"
    if (last / checkpoints.STATE).exists():
        about = store.read_json(last / store.MANIFEST)
        del about["files"][checkpoints.STATE]
        store.write_json(last / store.MANIFEST, about)
        (last / checkpoints.STATE).unlink()


def _say(said: str) -> None:
    sys.stdout.write(f"{said}\n")
    sys.stdout.flush()

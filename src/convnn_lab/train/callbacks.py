"""What happens beside learning: rows for every epoch, checkpoints, and leaving in good order."""

from __future__ import annotations

import signal
import sys
import time
from math import log
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from convnn_lab.data.loader import ANSWERED
from convnn_lab.train import checkpoints
from convnn_lab.train.measure import ACCURACY, Measure
from convnn_lab.train.module import Classifier, NonFiniteError
from convnn_lab.train.run import Row, Run

ASK_EVERY = 10  # steps after which several processes agree on whether to stop


class Stopped(BaseException):
    """The run was asked to stop, and can be resumed. Compilers, which catch every Exception, let it through."""


class Keeper(Callback):
    """Writes a row for every epoch, and checkpoints by time, by steps, at the end and when it is told to stop."""

    def __init__(self, run: Run, rows: list[Row], deadline: float | None) -> None:
        self.run, self.rows, self.deadline = run, rows, deadline
        self.saved_at = self.began = time.monotonic()
        self.saved_step, self.asked = -1, ""
        self.at_once = False  # whether a signal ends the run where it is
        self.best: dict[str, Any] | None = None
        self.best_weights: dict[str, Tensor] | None = None
        self.shown: list[Lines] = []
        self._handlers = {number: signal.getsignal(number) for number in ANSWERED}  # before Lightning adds its own

    def state_dict(self) -> dict[str, Any]:
        """The best epoch so far."""
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with it."""
        self.best = state_dict["best"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Answer signals between two steps; in the first, which may compile for minutes, there is nothing to save."""
        self.at_once = trainer.world_size == 1  # several processes leave together
        for number in ANSWERED:
            signal.signal(number, self._noted)

    def leave(self) -> None:
        """Leave signals and the screen as they were, however it ended."""
        for each in self.shown:
            each.leave()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _noted(self, number: int, _: Any) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = signal.Signals(number).name
        if self.at_once:
            self.at_once = False  # another signal waits for what is written now
            raise Stopped(self.asked)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Look at the clock."""
        self.began = time.monotonic()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Save if it is time to; stop if it was asked for. The end of an epoch is left to the end of the epoch."""
        learner = _learner(pl_module)
        learner.count()  # here, since Lightning asks callbacks before it asks the module
        self.at_once = False
        if not learner.between_steps or learner.position >= learner.length:
            return
        steps = learner.recipe.save_steps
        due = self._agreed(trainer, learner, self._since() >= learner.recipe.save_seconds)
        due = due or (steps is not None and learner.step % steps == 0)
        stop = self._agreed(trainer, learner, self._must_stop())
        if due or stop:
            self.save(trainer, learner)
        if stop:
            raise Stopped(self.asked)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the row of the epoch; save if it is the last, or time to; stop if it was asked for."""
        learner = _learner(pl_module)
        learner.look()
        if int(learner.train_tally.count) == 0:
            raise NonFiniteError(f"no loss of epoch {learner.epoch} was a finite number; a smaller --lr may help")
        seconds = learner.seconds + time.monotonic() - self.began
        row = {"epoch": learner.epoch, **learner.measured(), "lr": trainer.optimizers[0].param_groups[0]["lr"]}
        row |= {"seconds": seconds}
        self.rows.append(row)
        judged = f"val_{learner.measure.name}"
        if self.best is None or learner.measure.better(row[judged], self.best[judged]):
            self.best = {"epoch": learner.epoch, judged: row[judged]}
            named = trainer.strategy.lightning_module_state_dict()
            start = checkpoints.PARTS[checkpoints.WEIGHTS]
            weights = {name: value for name, value in named.items() if name.startswith(start)}
            self.best_weights = {name.removeprefix(start): value.detach().clone() for name, value in weights.items()}
        if trainer.is_global_zero:
            self.run.write_rows(self.rows)
            for each in self.shown:
                each.write(line(row, learner.recipe.epochs, learner.measure))
            for logger in trainer.loggers:
                logger.log_metrics({name: value for name, value in row.items() if name != "epoch"}, step=learner.epoch)
        learner.epoch, learner.position, learner.seconds = learner.epoch + 1, 0, 0.0
        self.began = time.monotonic()
        last = learner.epoch >= learner.recipe.epochs
        steps = learner.recipe.save_steps
        due = self._since() >= learner.recipe.save_seconds or steps is not None or last
        stop = _any(trainer, self._must_stop()) and not last
        if _any(trainer, due) or stop:
            self.save(trainer, learner)
        if stop:
            raise Stopped(self.asked)

    def save(self, trainer: pl.Trainer, learner: Classifier) -> None:
        """Write a checkpoint, and the best weights if there are better ones."""
        if learner.step == self.saved_step and learner.position:
            return
        learner.look()
        before = learner.seconds
        if learner.position:
            learner.seconds += time.monotonic() - self.began
        if trainer.is_global_zero and self.best_weights is not None and self.best is not None:
            checkpoints.save_best(self.run.checkpoints / "best", self.best_weights, self.best)
            self.best_weights = None
        trainer.save_checkpoint(self.run.checkpoints / "last" / checkpoints.STATE)
        learner.seconds = before
        self.saved_at, self.saved_step = time.monotonic(), learner.step

    def _since(self) -> float:
        return time.monotonic() - self.saved_at

    def _must_stop(self) -> bool:
        if not self.asked and self.deadline is not None and time.monotonic() >= self.deadline:
            self.asked = "--max-time"
        return bool(self.asked)

    def _agreed(self, trainer: pl.Trainer, learner: Classifier, said: bool) -> bool:
        """Whether any process says so; several of them are asked now and then only."""
        if trainer.world_size == 1:
            return said
        return learner.step % ASK_EVERY == 0 and _any(trainer, said)


def _any(trainer: pl.Trainer, said: bool) -> bool:
    return said if trainer.world_size == 1 else trainer.strategy.reduce_boolean_decision(said, all=False)


class Lines(Callback):
    """One line for each epoch."""

    def write(self, said: str) -> None:
        """Print a line at once."""
        sys.stdout.write(f"{said}\n")
        sys.stdout.flush()

    def leave(self) -> None:
        """Nothing to take away."""


def line(row: Row, epochs: int, by: Measure = ACCURACY) -> str:
    """An epoch in one line."""
    said = f"epoch {row['epoch'] + 1:.0f}/{epochs}  train {row['train_loss']:.4f} {by.said(row[f'train_{by.name}'])}"
    said += f"  test {row['val_loss']:.4f} {by.said(row[f'val_{by.name}'])}"
    said += f"  average {by.said(row[f'ema_val_{by.name}'])}" if f"ema_val_{by.name}" in row else ""
    return f"{said}  {row['seconds']:.1f} s"


class Bar(Lines):
    """A bar with rate, loss, accuracy and time left, on a terminal; the lines of past epochs stay above it."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Draw it."""
        learner = _learner(pl_module)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[said]}"),
        )
        self.progress = Progress(*columns, TimeRemainingColumn(elapsed_when_finished=True))
        self.task = self.progress.add_task("", total=learner.recipe.epochs * learner.length, said="")
        self.shown = self.began = time.monotonic()
        self.first = learner.epoch * learner.length + learner.position
        self.progress.start()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:  # noqa: ARG002
        """Move it a few times a second; only then numbers are fetched from a GPU."""
        now = time.monotonic()
        if now - self.shown < 0.5:
            return
        learner, self.shown = _learner(pl_module), now
        done = learner.epoch * learner.length + learner.position
        sums = learner.train_tally
        count, by = max(1, int(sums.count)), learner.measure
        loss, first = float(sums.loss) / count, int(sums.first) / count
        rate = (done - self.first) * learner.per_device * learner.world / (now - self.began)
        said = f"{rate:,.0f} {by.seen}/s  loss {loss:.4f}  {by.said({'acc': first, 'bits': loss / log(2)}[by.name])}"
        epoch = f"epoch {learner.epoch + 1}/{learner.recipe.epochs}"
        self.progress.update(self.task, completed=done, said=said, description=epoch)

    def write(self, said: str) -> None:
        """Print a line above it."""
        self.progress.console.print(said, highlight=False)

    def leave(self) -> None:
        """Take it away."""
        if hasattr(self, "progress"):
            self.progress.stop()


def _learner(module: pl.LightningModule) -> Classifier:
    if not isinstance(module, Classifier):
        raise TypeError(f"these callbacks go with a Classifier, got {type(module).__name__}")
    return module

"""Runs a recipe from its first step or from the last one that was saved."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy, FSDPStrategy

from convnn_lab.recipes import Recipe
from convnn_lab.train import checkpoints, figures, graph, store, surroundings
from convnn_lab.train.build import build
from convnn_lab.train.callbacks import Bar, Keeper, Lines, Stopped
from convnn_lab.train.kernels import Kernels
from convnn_lab.train.module import Classifier, NonFiniteError
from convnn_lab.train.morphing import Morph
from convnn_lab.train.run import Run, default_folder
from convnn_lab.train.source import Source, load


def train(name: str, recipe: Recipe, output: Path | None = None, *, quiet: bool = False) -> Run:
    """Run a recipe in a new folder."""
    began = time.monotonic()
    recipe = surroundings.as_started(recipe)
    recipe = replace(recipe, data_dir=None if recipe.data_dir is None else recipe.data_dir.resolve())
    source = load(recipe, surroundings.device_of(recipe))
    run = Run(default_folder(name, recipe) if output is None else output)
    if surroundings.global_rank(recipe.devices) == 0:
        run.require_new()
    return Session(run, name, recipe, source, began, quiet).begin()


def resume(folder: Path, *, max_time: str | None = None, data_dir: Path | None = None, quiet: bool = False) -> Run:
    """Go on with a run; one that has finished is left as it is.

    Args:
        max_time: time for this process; what an earlier one was given is not the run's.
        data_dir: where the data set is now, if it moved.
    """
    began = time.monotonic()
    run = Run.open(folder)
    name, recipe = run.recipe()
    recipe = surroundings.as_started(replace(recipe, max_time=max_time))
    recipe = recipe if data_dir is None else replace(recipe, data_dir=data_dir.resolve())
    if run.finished:
        return run
    source = load(recipe, surroundings.device_of(recipe))
    return Session(run, name, recipe, source, began, quiet).go_on()


@dataclass
class Session:
    """A process that trains a run."""

    run: Run
    name: str
    recipe: Recipe
    source: Source
    began: float
    quiet: bool

    @property
    def first(self) -> bool:
        """Whether this is the process that writes."""
        return surroundings.global_rank(self.recipe.devices) == 0

    def begin(self) -> Run:
        """Train from the first step. Nothing is written before all is known to fit together."""
        self._prepare(None)
        new = self.first and not self.run.exists
        if new:
            self.run.create(self.name, self.recipe, self.source)
        with self.run.alone() if self.first else nullcontext():
            if self.first and self.run.checkpoints.exists():
                raise ValueError(f"another process has trained in {self.run.folder} meanwhile")
            return self._fit(None, new=new)

    def go_on(self) -> Run:
        """Train from the last checkpoint. Nothing is read before whoever else trains here is done."""
        with self.run.alone() if self.first else nullcontext():
            if self.run.finished:
                return self.run
            self.run.require_same(self.source)
            last = self.run.last(_warn)
            if last is not None and not (last / checkpoints.STATE).exists():
                folder = self.run.folder
                raise ValueError(f"{folder} kept the weights alone, as finished runs do; remove it to run it again")
            self._prepare(None if last is None else store.read_json(last / store.MANIFEST))
            return self._fit(last, new=False)

    def _fit(self, last: Path | None, *, new: bool) -> Run:
        run = self.run
        if self.first:
            run.started({**surroundings.environment(self.trainer), "steps": self.launched})
        path = None if last is None else str(last / checkpoints.STATE)
        try:
            self.trainer.fit(self.learner, ckpt_path=path, weights_only=True)
            self._conclude("finished")
        except Stopped:
            run.interrupted = self.keeper.asked.startswith("SIG")
            self._conclude("stopped")
        except NonFiniteError:
            self._conclude("failed")
            raise
        except Exception:
            if new and self.learner.step == 0:
                run.remove()  # not even a step came of it
            raise
        finally:
            self.keeper.leave()
        return run

    def _prepare(self, state: dict[str, Any] | None) -> None:
        recipe, source = self.recipe, self.source
        surroundings.set_up(recipe)
        pl.seed_everything(recipe.seed, workers=True, verbose=False)
        model = build(recipe, source.channels, source.size, len(source.classes))
        moving = Morph.of(recipe)
        if moving is not None:
            moving.try_out(model, recipe)
        self.learner = Classifier(recipe, model, source, recipe.devices * recipe.nodes)
        self._record_steps(moving)
        if source.length(self.learner.share_of(0)) == 0:
            most = f"{source.train_count} training {self.learner.measure.seen}"
            raise ValueError(f"--batch must be at most the {most}, got {recipe.batch}")
        # Epochs after the checkpoint are run again.
        self.rows = [] if state is None else [row for row in self.run.rows() if row["epoch"] < state["epoch"]]
        deadline = None if recipe.max_seconds is None else self.began + recipe.max_seconds
        self.keeper = Keeper(self.run, self.rows, deadline)
        shown = (
            []
            if self.quiet or surroundings.global_rank(recipe.devices)
            else [(Bar if sys.stdout.isatty() else Lines)()]
        )
        self.keeper.shown = shown
        kernels = Kernels(self.run, 0 if state is None else int(state["epoch"]))
        # Kernels first: the keeper counts the epoch, and may stop there.
        beside = [*([] if moving is None else [moving]), kernels, self.keeper, *shown]
        self.trainer = trainer_of(recipe, beside, _loggers(self.run, recipe))
        if state is not None:
            _start_at(self.trainer, int(state["epoch"]))

    def _record_steps(self, moving: Morph | None) -> None:
        """Let steps be launched as a whole, where that is asked for and possible."""
        recipe, learner = self.recipe, self.learner
        gpu = surroundings.on_gpu(recipe)
        why = graph.against(recipe, gpu=gpu, scaled=gpu and surroundings.half(recipe) is torch.float16)
        why = "--graph off" if recipe.graph == "off" else why
        self.launched = "as a recorded graph" if why is None else f"kernel by kernel: {why}"
        if why is None:
            learner.graph = graph.Graphed(
                learner.outcome,
                learner.model.parameters(),
                turns=learner.turns,
                words=lambda: None if moving is None else tuple(moving.at(learner.time).items()),
                declined=self._not_recorded,
            )
        elif recipe.graph != "off":
            self._not_recorded(why)

    def _not_recorded(self, why: str) -> None:
        if self.recipe.graph == "on":
            raise ValueError(f"--graph on: {why}; leave it out, or change that")
        if surroundings.on_gpu(self.recipe) and not self.quiet:
            sys.stderr.write(f"convnn: note: steps are launched kernel by kernel: {why}\n")

    def _conclude(self, ended: str) -> None:
        """Write how it ended; the last epoch is what counts, the best is named beside it."""
        if not self.trainer.is_global_zero:
            return
        learner, rows = self.learner, self.rows
        summary = {
            "recipe": self.name,
            "status": ended,
            "epochs": learner.epoch,
            "of": self.recipe.epochs,
            "steps": learner.step,
            "skipped_steps": learner.skipped,
            "final": rows[-1] if rows else None,
            "best": self.keeper.best,
            "parameters": sum(parameter.numel() for parameter in learner.model.parameters()),
            "seconds": sum(row["seconds"] for row in rows),
            "process_seconds": time.monotonic() - self.began,
        }
        store.write_json(self.run.folder / "summary.json", summary)
        if rows:
            figures.curves(self.run.folder / "curves.png", {self.run.folder.name: rows}, learner.measure)
        if ended == "stopped" and not self.quiet:
            sys.stdout.write(f"stopped by {self.keeper.asked}; convnn train --resume {self.run.folder} goes on\n")


def _start_at(trainer: pl.Trainer, epoch: int) -> None:
    """Let Lightning count from this epoch on."""
    progress: Any = trainer.fit_loop.epoch_progress
    for counts in (progress.current, progress.total):
        counts.ready = counts.started = counts.processed = counts.completed = epoch


def trainer_of(recipe: Recipe, callbacks: list[Any], loggers: list[Any]) -> pl.Trainer:
    """Lightning, told what the recipe says and nothing of its own."""
    precision = {None: "32-true", torch.bfloat16: "bf16-mixed", torch.float16: "16-mixed"}[surroundings.half(recipe)]
    several = recipe.devices * recipe.nodes > 1
    strategy: Any = "auto"
    if recipe.fsdp:
        if not surroundings.on_gpu(recipe):
            raise ValueError("--fsdp needs GPUs, and there is none")
        strategy = FSDPStrategy(state_dict_type="full")
    elif several:
        strategy = DDPStrategy()
    return pl.Trainer(
        accelerator="gpu" if surroundings.on_gpu(recipe) else "cpu",
        devices=recipe.devices,
        num_nodes=recipe.nodes,
        strategy=strategy,
        precision=precision,  # type: ignore[arg-type]
        max_epochs=recipe.epochs,
        accumulate_grad_batches=recipe.shares(recipe.devices * recipe.nodes)[1],
        gradient_clip_val=1.0,  # asks our own clipping, which knows how much
        deterministic=True if recipe.deterministic else None,
        benchmark=None if recipe.deterministic else True,
        reload_dataloaders_every_n_epochs=1,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=loggers or False,
        callbacks=callbacks,
        plugins=[checkpoints.Folders(whole=recipe.fsdp)],
    )


def _loggers(run: Run, recipe: Recipe) -> list[Any]:
    found: list[Any] = []
    try:
        if recipe.tensorboard:
            from pytorch_lightning.loggers import TensorBoardLogger  # noqa: PLC0415

            found.append(TensorBoardLogger(run.folder, name=None, version="tensorboard"))
        if recipe.wandb is not None:
            from pytorch_lightning.loggers import WandbLogger  # noqa: PLC0415

            found.append(WandbLogger(project=recipe.wandb, name=run.folder.name, save_dir=run.folder))
    except ModuleNotFoundError as error:
        said = str(error).splitlines()[0]
        raise ValueError(f"this logger needs a package that is not installed: {said}") from None
    return found


def _warn(said: str) -> None:
    sys.stderr.write(f"convnn: warning: {said}\n")

"""What happens in a step, and all that must be known to take a run up after any of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from timm.data.random_erasing import RandomErasing
from timm.loss.cross_entropy import SoftTargetCrossEntropy
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn
from torch.distributed import all_gather_object, is_available, is_initialized

from convnn import morph
from convnn_lab.data.augment import erasing, mixing
from convnn_lab.recipes import Recipe
from convnn_lab.train import randomness, surroundings
from convnn_lab.train.again import compute_again
from convnn_lab.train.compiled import compile_parts
from convnn_lab.train.graph import Graphed, Outcome
from convnn_lab.train.measure import measure
from convnn_lab.train.optimizer import optimizer, schedule
from convnn_lab.train.source import Batch, Prepare, Share, Source
from convnn_lab.train.tally import Tally, each
from convnn_lab.train.text import Codes

LOOK_EVERY = 50  # steps between two looks at numbers on a GPU


class NonFiniteError(ValueError):
    """The loss is not a number any more."""


class Classifier(pl.LightningModule):
    """A model that learns classes by a recipe.

    ``epoch``, ``position`` (batches done in it) and ``step`` (updates done in all) are its own: Lightning's counters
    restart with every process, and a run does not.
    """

    lost_at: Tensor

    def __init__(self, recipe: Recipe, model: nn.Module, source: Source, world: int) -> None:
        super().__init__()
        self.recipe, self.model, self.source, self.world = recipe, model, source, world
        self.per_device, self.turns = recipe.shares(world)
        if (recipe.mixup or recipe.cutmix) and self.per_device % 2:
            raise ValueError(f"mixing needs an even number of images at once, got {self.per_device}")
        layout = surroundings.layout(recipe)
        self.prepare = Prepare(source.mean, source.std, source.size, layout) if source.mean else Codes()
        self.measure = measure(recipe)
        self.average = None
        if recipe.ema is not None:
            self.average = ModelEmaV3(model, decay=recipe.ema, use_warmup=True).requires_grad_(False)
        self.train_tally, self.test_tally, self.average_tally = Tally(), Tally(), Tally()
        self.epoch, self.position, self.step, self.skipped, self.seconds = 0, 0, 0, 0, 0.0
        self.resumed: dict[str, Any] | None = None
        self.graph: Graphed | None = None
        self.kept: list[Tensor] = []
        self.mix = mixing(recipe, len(source.classes))
        self.erase: RandomErasing | None = None
        self.soft, self.smooth = SoftTargetCrossEntropy(), recipe.smoothing
        self.register_buffer("lost_at", torch.tensor(-1), persistent=False)
        if recipe.compile:
            torch.compiler.reset()  # torch compiles a function for so many models only
        if recipe.checkpoint_activations:
            compute_again(model, compiled=recipe.compile)
        elif recipe.compile:
            compile_parts(model)

    @property
    def share(self) -> Share:
        """What this process sees of a batch."""
        return self.share_of(self.global_rank)

    def share_of(self, rank: int) -> Share:
        """What a process sees of a batch."""
        return Share(self.per_device, rank, self.world)

    @property
    def length(self) -> int:
        """How many batches an epoch has."""
        return self.source.length(self.share)

    @property
    def steps(self) -> int:
        """How many updates an epoch has."""
        return -(-self.length // self.turns)

    def train_dataloader(self) -> Iterable[Batch]:
        """What is left of the epoch."""
        return self.source.train(self.epoch, self.position, self.share)

    def val_dataloader(self) -> Iterable[Batch]:
        """What is tested on."""
        return self.source.test(self.share)

    def configure_optimizers(self) -> Any:
        """The optimizer; its rate is set before every step."""
        made = optimizer(self.recipe, self.model)
        self.schedule = schedule(self.recipe, made, self.steps)
        return made

    def on_fit_start(self) -> None:
        """Make what lives on the device."""
        self.erase = erasing(self.recipe, self.device)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:  # noqa: ARG002
        """Set the rate; and after a resume, put everything back as it was."""
        if self.resumed is not None:
            own = self.resumed["processes"]
            if self.global_rank < len(own):
                self.train_tally.go_on(own[self.global_rank]["tally"])
                randomness.restore(own[self.global_rank]["random"])
            self.resumed = None
        if self.schedule is not None:
            self.schedule.step_update(self.step)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:  # noqa: ARG002
        """The loss of this process's part of a batch."""
        images, labels = batch
        count = len(labels)
        if self.recipe.non_finite == "skip" and self.position % self.turns == 0:
            self.kept = [buffer.clone() for buffer in self.model.buffers()]
        images, labels = self._augmented(self.prepare(images), labels)
        weight = count * self.world * self.turns / self._in_this_step()
        outcome = None
        if self.graph is not None and count == self.per_device and weight == 1:
            outcome = self.graph(images, labels)
        logits, labels, loss = self.outcome(images, labels) if outcome is None else outcome
        lost = ~loss.detach().isfinite() & (self.lost_at < 0)
        self.lost_at.copy_(torch.where(lost, self.step + 1, self.lost_at))
        if self.recipe.non_finite == "stop" or bool(loss.isfinite()):
            self.train_tally.update(logits, labels, loss)
        return loss * weight

    def outcome(self, images: Tensor, labels: Tensor) -> Outcome:
        """Logits and labels, a row for each, and the loss."""
        logits, labels = each(self.model(images), labels)
        if labels.is_floating_point():
            return logits, labels, self.soft(logits, labels)
        return logits, labels, F.cross_entropy(logits, labels, label_smoothing=self.smooth)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Gradients of a loss; those of a recorded step are there already."""
        if self.graph is None or not self.graph.give():
            super().backward(loss, *args, **kwargs)

    @property
    def time(self) -> float:
        """Where the run is, in epochs."""
        return self.epoch + self.position / max(1, self.length)

    def _in_this_step(self) -> int:
        """How many images all processes see until the next update; Lightning averages turns and processes as equals."""
        first = self.position - self.position % self.turns
        turns = range(first, min(first + self.turns, self.length))
        return sum(self.source.together(turn, self.share) for turn in turns)

    def _augmented(self, images: Tensor, labels: Tensor) -> Batch:
        images = images if self.erase is None else self.erase(images)
        return (images, labels) if self.mix is None else self.mix(images, labels)

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        """Clip the gradient of all processes; leave out an update that is not a number, if asked to."""
        most = float("inf") if self.recipe.clip is None else self.recipe.clip
        skips = self.recipe.non_finite == "skip"
        if self.recipe.clip is None and not skips:
            return
        if self.recipe.fsdp:
            norm = self.trainer.model.clip_grad_norm_(most)  # type: ignore[union-attr,operator]
        else:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), most)
        if skips and not bool(norm.isfinite()):
            self.skipped += 1
            for parameter in self.model.parameters():
                parameter.grad = None
            for buffer, kept in zip(self.model.buffers(), self.kept, strict=True):
                buffer.copy_(kept)  # running statistics have seen it too

    def count(self) -> None:
        """A batch is done: count it, and stop at a loss that is not a number."""
        self.position += 1
        if self.position % self.turns == 0 or self.position == self.length:
            self.step += 1
            if self.average is not None:
                self.average.update(self.model, step=self.step)
        if self.device.type == "cpu" or self.step % LOOK_EVERY == 0:
            self.look()

    @property
    def between_steps(self) -> bool:
        """Whether no gradient is half gathered."""
        return self.position % self.turns == 0

    def look(self) -> None:
        """Stop at a loss that is not a number; on a GPU this waits for it."""
        if self.recipe.non_finite == "stop" and int(self.lost_at) >= 0:
            said = f"the loss of step {int(self.lost_at)} (epoch {self.epoch}) is not a finite number"
            raise NonFiniteError(f"{said}; a smaller --lr may help, or --non-finite skip")

    def validation_step(self, batch: Batch, batch_idx: int) -> None:  # noqa: ARG002
        """Add up one batch of what is tested on."""
        images, labels = self.prepare(batch[0]), batch[1]
        self.test_tally.update(self.model(images), labels)
        if self.average is not None:
            self.average_tally.update(self.average.module(images), labels)

    def measured(self) -> dict[str, float]:
        """The epoch that ended, over all processes; the sums start anew."""
        trained, tested = self.train_tally.compute(), self.test_tally.compute()
        name, beside = self.measure.name, self.measure.beside
        row = {"train_loss": trained["loss"], f"train_{name}": trained[name]}
        row |= {"val_loss": tested["loss"], f"val_{name}": tested[name], f"val_{beside}": tested[beside]}
        if self.average is not None:
            averaged = self.average_tally.compute()
            row |= {"ema_val_loss": averaged["loss"], f"ema_val_{name}": averaged[name]}
        if not self.recipe.fsdp:  # which cuts them up
            told = ((layer, shares) for layer, shares in morph.dial(self.model).items() if self.recipe.dial is not None)
            row |= {dialled(layer, head): share for layer, shares in told for head, share in enumerate(shares)}
        for tally in (self.train_tally, self.test_tally, self.average_tally):
            tally.reset()
        return row

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what Lightning does not know; leave out its counters, which are of this process only."""
        checkpoint.pop("loops", None)
        own = {"random": randomness.state(), "tally": self.train_tally.sums()}
        everybody: list[Any] = [own]
        if is_available() and is_initialized():
            everybody = [None] * self.world
            all_gather_object(everybody, own)
        counts = {name: getattr(self, name) for name in ("epoch", "position", "step", "skipped", "seconds")}
        checkpoint["run"] = {**counts, "time": self.time, "processes": everybody}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on from there, with the first batch."""
        self.resumed = checkpoint["run"]
        for name in ("epoch", "position", "step", "skipped", "seconds"):
            setattr(self, name, self.resumed[name])


def dialled(layer: str, head: int) -> str:
    """What the column of a learned share is called."""
    return f"share:{layer}:{head}"

"""A run that moves along the spectrum: what its recipe's schedules say at every place of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback
from torch import nn

from convnn import morph
from convnn_lab.recipes import Recipe
from convnn_lab.recipes.schedules import Words

JUST_BEFORE = 1e-9  # epochs: what holds at the end of an epoch, not what begins with the next


def schedule(words: Words) -> morph.Schedule[Any]:
    """What words of a recipe stand for."""
    if not words.line:
        return morph.stages(dict(zip(words.times, words.values, strict=True)))
    start, end = (float(value) for value in words.values)
    kind = morph.line if words.kind == "share" else morph.decay
    return kind(start, end, over=words.times[0])


class Morph(Callback):
    """Sets what schedules say before every step, and before every test what held last.

    The time is where the run is: its epoch, and the part of it that is done. Nothing is remembered, so that a run that
    is resumed anywhere goes on with what it would have had.

    Args:
        schedules: of what :func:`convnn.morph.apply` sets, by its names.
        pattern: of the names of the layers.
        models: those to set; None for the model that learns, and its average where there is one.
    """

    def __init__(
        self, schedules: dict[str, morph.Schedule[Any]], pattern: str = "*", models: Iterable[nn.Module] | None = None
    ) -> None:
        self.schedules, self.pattern = schedules, pattern
        self.models = None if models is None else list(models)

    @classmethod
    def of(cls, recipe: Recipe) -> Morph | None:
        """The schedules of a recipe, or None where it has none."""
        told: dict[str, morph.Schedule[Any]] = {words.kind: schedule(words) for words in recipe.morphs}
        return cls(told, recipe.morph_layers) if told else None

    def at(self, time: float) -> dict[str, Any]:
        """What holds at a time in epochs."""
        return {name: told(time) for name, told in self.schedules.items()}

    def set(self, model: nn.Module, time: float) -> None:
        """Let a model be as it is at a time."""
        morph.apply(model, self.pattern, **self.at(time))

    def settle(self, model: nn.Module, time: float) -> None:
        """Let a model be as it was just before a time."""
        self.set(model, max(0.0, time - JUST_BEFORE))

    def try_out(self, model: nn.Module, recipe: Recipe) -> None:
        """Refuse what a model cannot be made to do, before the first step and not after hours."""
        for words in recipe.morphs:
            times = (0.0, *words.times)
            for time in times:
                self.set(model, time)
        self.set(model, 0.0)

    def _models(self, module: Any) -> list[nn.Module]:
        if self.models is not None:
            return self.models
        average = getattr(module, "average", None)
        inner = getattr(module, "model", module)
        return [inner] if average is None else [inner, average.module]

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *batch: Any) -> None:
        """Set what the schedules say now."""
        for model in self._models(pl_module):
            self.set(model, _time(trainer, pl_module, batch[1]))

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Set what held at the end of the epoch."""
        for model in self._models(pl_module):
            self.settle(model, _time(trainer, pl_module, None))


def _time(trainer: pl.Trainer, module: Any, batch: int | None) -> float:
    """Where a run is, in epochs: by the module's own count, or by Lightning's."""
    if hasattr(module, "position") and hasattr(module, "length"):
        return float(module.epoch) + float(module.position) / max(1, int(module.length))
    if batch is None:
        return float(trainer.current_epoch + 1)
    return float(trainer.current_epoch) + batch / max(1.0, float(trainer.num_training_batches))

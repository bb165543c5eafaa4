"""Seconds an epoch of CIFAR's size takes in ``convnn train``: so many steps of it, by the trainer's own loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import nn

from convnn import ConvNNAttention, HybridConv2d
from convnn_lab.bench import layer, maps, plain
from convnn_lab.bench.measure import release
from convnn_lab.data.arrays import Arrays, Data
from convnn_lab.recipes import RECIPES, Recipe
from convnn_lab.train import fit, graph, surroundings
from convnn_lab.train.build import build
from convnn_lab.train.module import Classifier
from convnn_lab.train.source import ArraySource

IMAGES = 50_000
FIRST = graph.TRIES + 3  # steps that compile, choose algorithms and record
Make = Callable[[Recipe, str], nn.Module]


@dataclass(frozen=True)
class Variant:
    """A network, and the recipe it is trained by."""

    recipe: Recipe
    make: Make


def _published(name: str, size: int, *, as_plain: bool = False, **options: Any) -> Variant:
    """The network that is trained by a recipe."""
    recipe = replace(RECIPES[name], **options)
    change = _in_plain_torch if as_plain else nn.Module.to
    return Variant(recipe, lambda given, device: change(build(given, 3, size, 10), device))


def _in_plain_torch(model: nn.Module, device: str) -> nn.Module:
    """What searches, by operators of plain PyTorch with the same parameters."""
    for name, part in list(model.named_modules()):
        above, _, own = name.rpartition(".")
        if isinstance(part, ConvNNAttention):
            among_all: Any = partial(plain.convnn, k=part.k)  # type: ignore[arg-type] # a number in every recipe
            setattr(model.get_submodule(above), own, layer.Around(part, among_all))
        elif isinstance(part, HybridConv2d):
            by_cosine = partial(plain.mixed, k=9, weighting="uniform")
            setattr(model.get_submodule(above), own, maps.Around(part, by_cosine))
    return model.to(device)


_vgg, _vit = partial(_published, "vgg11-cifar10", 32), partial(_published, "vit-tiny-cifar10", 224)
VARIANTS: dict[str, dict[str, Variant]] = {
    "vgg11": {
        "ratio 0": _vgg(ratio=0.0),
        "ratio 0.5": _vgg(ratio=0.5),
        "ratio 1": _vgg(ratio=1.0),
        "ratio 0.5, plain": _vgg(ratio=0.5, as_plain=True),
    },
    "vit_tiny": {
        "attention": _vit(layer="attention", candidates=None, k=None),
        "convnn, random:32": _vit(layer="convnn"),
        "convnn, all": _vit(layer="convnn", candidates=None),
        "convnn, all, plain": _vit(layer="convnn", candidates=None, as_plain=True),
    },
}


class Clock(Callback):
    """Counts batches as a run does, and times those after the first few."""

    def __init__(self, first: int) -> None:
        self.first, self.began, self.seconds, self.counted = first, 0.0, 0.0, 0

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:  # noqa: ARG002
        """Look at the clock when all that was launched is done."""
        pl_module.count()
        if pl_module.position in (self.first, pl_module.length):
            if pl_module.device.type == "cuda":
                torch.cuda.synchronize()
            self.counted = pl_module.position - self.first
            self.seconds, self.began = time.perf_counter() - self.began, time.perf_counter()


def seconds(
    variant: Variant, precision: Any, *, recorded: bool, steps: int, images: int = IMAGES, compiled: bool = False
) -> float:
    """Seconds that so many images take, by the time of a few steps.

    Args:
        recorded: whether steps are launched as a whole.
        compiled: whether what stands between the layers' own kernels is compiled.
    """
    told: dict[str, Any] = {"graph": "on" if recorded else "off", "compile": compiled}
    recipe = replace(variant.recipe, precision=precision, epochs=1, **told)
    surroundings.set_up(recipe)
    device = surroundings.device_of(recipe)
    learner = Classifier(recipe, variant.make(recipe, str(device)), source(recipe, FIRST + steps, device), 1)
    if recorded:
        learner.graph = graph.Graphed(learner.outcome, learner.model.parameters(), declined=_refused)
    clock = Clock(FIRST)
    fit.trainer_of(recipe, [clock], []).fit(learner)
    del learner
    release()
    return clock.seconds / clock.counted * images / recipe.batch


def source(recipe: Recipe, batches: int, device: torch.device) -> ArraySource:
    """Random images of CIFAR's size, in so many batches, and one to test on."""

    def arrays(count: int) -> Arrays:
        images = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, device=device)
        return Arrays(images, torch.randint(10, (count,), device=device))

    held = Data(
        "random", arrays(batches * recipe.batch), arrays(recipe.batch), tuple("0123456789"), (0.5,) * 3, (0.25,) * 3
    )
    return ArraySource(held, recipe)


def _refused(why: str) -> None:
    raise ValueError(why)

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
from torch.profiler import profile, supported_activities

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
        "convnn, grid:32": _vit(layer="convnn", candidates="grid:32"),
        "kvt, k = 9": _vit(layer="kvt", candidates=None),
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
            self.looked(last=self.counted > 0)

    def looked(self, *, last: bool) -> None:
        """What else happens at a look at the clock."""


class Watch(Clock):
    """Notes which kernels are launched by the batches it times; on a CPU, which operators."""

    def __init__(self, first: int) -> None:
        super().__init__(first)
        self.profile = profile(activities=list(supported_activities()))

    def looked(self, *, last: bool) -> None:
        """Begin at the first look, and end at the last."""
        self.profile.stop() if last else self.profile.start()

    def kernels(self) -> list[Kernel]:
        """What was launched, the longest first."""
        # Spans that are named in the source lie on a GPU's line of time too, over the kernels they hold.
        events = [each for each in self.profile.key_averages() if not each.is_user_annotation]
        on_gpu = [(each, each.self_device_time_total) for each in events if each.device_type.name == "CUDA"]
        took = on_gpu or [(each, each.self_cpu_time_total) for each in events]
        found = [Kernel(each.key, each.count / self.counted, us / 1000 / self.counted) for each, us in took]
        return sorted(found, key=lambda each: -each.ms)


@dataclass(frozen=True)
class Kernel:
    """How often a step launches a kernel, and what all launches of it take."""

    name: str
    launches: float
    ms: float


@dataclass(frozen=True)
class Way:
    """How a network is trained.

    Args:
        recorded: whether steps are launched as a whole.
        compiled: whether what stands between the layers' own kernels is compiled.
    """

    precision: Any
    recorded: bool
    compiled: bool = False


def seconds(variant: Variant, way: Way, *, steps: int, images: int = IMAGES) -> float:
    """Seconds that so many images take, by the time of a few steps."""
    clock = Clock(FIRST)
    _run(variant, way, clock, steps)
    return clock.seconds / clock.counted * images / variant.recipe.batch


def kernels(variant: Variant, way: Way, *, steps: int) -> list[Kernel]:
    """What a step is made of, the longest first; watching takes time of its own."""
    watch = Watch(FIRST)
    _run(variant, way, watch, steps)
    return watch.kernels()


def _run(variant: Variant, way: Way, clock: Clock, steps: int) -> None:
    """Train the first batches, and those a clock looks at."""
    told: dict[str, Any] = {"graph": "on" if way.recorded else "off", "compile": way.compiled}
    recipe = replace(variant.recipe, precision=way.precision, epochs=1, **told)
    surroundings.set_up(recipe)
    device = surroundings.device_of(recipe)
    learner = Classifier(recipe, variant.make(recipe, str(device)), source(recipe, FIRST + steps, device), 1)
    if way.recorded:
        learner.graph = graph.Graphed(learner.outcome, learner.model.parameters(), declined=_refused)
    fit.trainer_of(recipe, [clock], []).fit(learner)
    del learner
    release()


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

"""A training step of whole networks: convolutions only, hybrid layers, and hybrid layers in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convnn import HybridConv2d, models
from convnn.candidates import random
from convnn_lab.bench import maps, plain
from convnn_lab.bench.maps import Around
from convnn_lab.bench.measure import release, require_device, training
from convnn_lab.bench.report import Contender, Row, timed

PRECISIONS = ("tf32", "float32", "bf16")


@dataclass(frozen=True)
class Case:
    """A network, how many images of which side, and how many classes."""

    model: str
    batch: int
    side: int
    classes: int = 1000

    def __str__(self) -> str:
        return f"{self.model}, {self.batch}, {self.side}x{self.side}"


CASES = {"vgg11": Case("vgg11", 256, 32, classes=10), "resnet50": Case("resnet50", 64, 224)}
FEW = 36
# What stands where 3x3 convolutions stood. A ratio of 0 is a convolution and a 1x1, from the same code.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "vgg11": {"ratio 0": {"ratio": 0}, "ratio 0.5": {}, "ratio 1": {"ratio": 1}, "ratio 0.5, plain": {"plain": True}},
    "resnet50": {"ratio 0": {"ratio": 0}, "ratio 0.5": {}, "ratio 0.5, r=32": {"candidates": random(32)}},
}


def networks(cases: Sequence[Case] = tuple(CASES.values()), precisions: Sequence[str] = PRECISIONS) -> Iterator[Row]:
    """A training step in each precision; hybrid layers are checked in float32 before anything of a case is timed."""
    require_device()
    for case in cases:
        for name, options in VARIANTS[case.model].items():
            checked(f"{case}, {name}", create(case, "cuda", **options), _images(case, "cuda", most=2)[0])
            release()
        for precision in precisions:
            for name in VARIANTS[case.model]:
                yield measured(case, name, precision)


def measured(case: Case, name: str, precision: str) -> Row:
    """Measure one network, which is made for it and gone after."""
    model = create(case, "cuda", **VARIANTS[case.model][name])
    loss = partial(loss_of, model, precision)
    peer = any(isinstance(part, Around) for part in model.modules())
    with multiplying(precision):
        contender = Contender(name, loss, _images(case, "cuda"), list(model.parameters()), peer=peer)
        return timed(f"{case}, {precision}", contender, training)


def create(case: Case, device: str, **options: Any) -> nn.Module:
    """A network of hybrid layers; ``plain=True`` for those in plain PyTorch."""
    given = {"num_classes": case.classes, "device": device}
    if options.pop("plain", False):
        return models.create(case.model, layer=partial(_plain, **options), **given)
    return models.create(case.model, layer="hybrid", **options, **given)


def _plain(inputs: int, outputs: int, /, *, stride: int = 1, bias: bool = True, **options: Any) -> nn.Module:
    flags: Any = {"conv_bias": bias, "convnn_bias": bias, "pointwise_bias": bias}
    layer = HybridConv2d(inputs, outputs, 3, stride=stride, **flags, **options)
    return Around(layer, partial(plain.mixed, k=9, weighting="uniform"))


def _images(case: Case, device: str, most: int | None = None) -> tuple[Tensor, Tensor]:
    count = case.batch if most is None else min(case.batch, most)
    images = torch.randn(count, 3, case.side, case.side, device=device)
    return images, torch.randint(case.classes, (count,), device=device)


def loss_of(model: nn.Module, precision: str, images: Tensor, labels: Tensor) -> Tensor:
    """The loss of a batch in this precision."""
    with torch.autocast(images.device.type, torch.bfloat16, enabled=precision == "bf16"):
        return F.cross_entropy(model(images), labels)


@contextmanager
def multiplying(precision: str) -> Iterator[None]:
    """Let torch multiply float32 as TF32, in matrix products and in convolutions, or not."""
    if precision not in PRECISIONS:
        raise ValueError(f"a precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "float32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def checked(case: str, model: nn.Module, images: Tensor) -> None:
    """Check the hybrid layers of a network of ours in float32 on what reaches them, and that there is a loss.

    Layers on maps of fewer cells than ``FEW`` are not looked at: many of their neighbours are as near as others.
    """
    seen: list[tuple[HybridConv2d, Tensor]] = []

    def watch(layer: nn.Module, given: tuple[Tensor, ...], _: Tensor) -> None:
        if isinstance(layer, HybridConv2d):
            seen.append((layer, given[0].detach()))

    hooks = [part.register_forward_hook(watch) for part in model.modules() if isinstance(part, HybridConv2d)]
    with multiplying("float32"), torch.no_grad():
        found = loss_of(model, "float32", images, torch.zeros(len(images)).long().to(images.device)).item()
        for hook in hooks:
            hook.remove()
        if not math.isfinite(found):
            raise ValueError(f"{case}: the loss is {found}; nothing is timed")
        for number, (layer, x) in enumerate(seen):
            if math.prod(x.shape[2:]) >= FEW:
                maps.check_map(f"{case}, hybrid layer {number}", layer, x)

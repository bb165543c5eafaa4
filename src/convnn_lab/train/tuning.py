"""Fine-tune a model while it moves along the spectrum: a plain loop over arrays, for experiments of minutes."""

from __future__ import annotations

import csv
import io
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convnn import morph
from convnn_lab.train import store

Schedules = Mapping[str, morph.Schedule[Any]]
Prepare = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Look:
    """What a model knew at a time: epochs so far, correct answers of all, and what its schedules said."""

    epoch: float
    accuracy: float
    said: Mapping[str, Any]


@torch.inference_mode()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor, prepare: Prepare, batch: int = 500) -> float:
    """The share of images a model knows."""
    was = model.training
    model.eval()
    right = sum(
        int((model(prepare(some)).argmax(-1) == known).sum())
        for some, known in zip(images.split(batch), labels.split(batch), strict=True)
    )
    model.train(was)
    return right / len(labels)


def tune(
    model: nn.Module,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    *,
    epochs: int,
    optimizer: torch.optim.Optimizer,
    schedules: Schedules,
    prepare: Prepare,
    augment: Prepare = lambda images: images,
    pattern: str = "*",
    batch: int = 100,
    looks: int = 2,
    seed: int = 0,
) -> Iterator[Look]:
    """Train, and tell so many times in an epoch what the model knows; the rate falls to 0 along a cosine.

    Args:
        schedules: of what :func:`convnn.morph.apply` sets, by its names; they are followed step by step.
        looks: how often in an epoch the model is tested.
    """
    images, labels = train
    draw = torch.Generator().manual_seed(seed)
    per_epoch = len(labels) // batch
    rates = [group["lr"] for group in optimizer.param_groups]
    at = {round(per_epoch * (number + 1) / looks) for number in range(looks)}
    for epoch in range(epochs):
        places = torch.randperm(len(labels), generator=draw).to(labels.device)
        for number in range(per_epoch):
            now = epoch + number / per_epoch
            said = {name: schedule(now) for name, schedule in schedules.items()}
            if said:
                morph.apply(model, pattern, **said)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * (1 + math.cos(math.pi * now / epochs)) / 2
            mine = places[number * batch : (number + 1) * batch]
            model.train()
            loss = F.cross_entropy(model(augment(prepare(images[mine]))), labels[mine])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if number + 1 in at:
                yield Look(epoch + (number + 1) / per_epoch, accuracy(model, *test, prepare), said)


def tell(name: str, looks: Iterator[Look]) -> list[Look]:
    """Print every look as it comes, and how long they took."""
    began, seen = time.perf_counter(), []
    for look in looks:
        seen.append(look)
        said = "  ".join(f"{word} {value}" for word, value in look.said.items())
        sys.stdout.write(f"{name:24} epoch {look.epoch:.2f}  {said}  {100 * look.accuracy:.2f} %\n")
        sys.stdout.flush()
    sys.stdout.write(f"{name}: {time.perf_counter() - began:.1f} s\n")
    return seen


def write(path: Path, runs: Mapping[str, Sequence[Look]]) -> None:
    """Write all looks as a table."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["run", "epoch", "said", "accuracy"])
    for name, looks in runs.items():
        for look in looks:
            said = " ".join(f"{word}={value}" for word, value in look.said.items())
            writer.writerow([name, f"{look.epoch:.4f}", said, f"{look.accuracy:.4f}"])
    store.write(path, text.getvalue())


def draw(path: Path, runs: Mapping[str, Sequence[Look]], *, level: float, said: str) -> None:
    """Draw the accuracy of several runs over their epochs, with a line where they started, as an SVG."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG  # noqa: PLC0415 - slow to import
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    axes.axhline(100 * level, color="0.5", linestyle=":", label=said)
    for name, looks in runs.items():
        axes.plot([look.epoch for look in looks], [100 * look.accuracy for look in looks], marker="o", label=name)
    axes.set_xlabel("epoch")
    axes.set_ylabel("test accuracy in %")
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize="small")
    drawn = io.BytesIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    store.write(path, drawn.getvalue())

"""Compile the kernels of a table for a GPU that is not there: ``python -m tests.triton.rows 90 TABLE PRECISION``.

Prints what ``ahead`` prints, of a training step and a test of every published model on CIFAR-10 that searches in a way
of its own. Products of matrices are not computed, so that a step takes seconds.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from convnn.backends.triton import few_launch, gates
from convnn_lab.recipes import Recipe
from convnn_lab.recipes.recipe import Precision
from convnn_lab.rerun.plan import recipe_of, trained
from convnn_lab.tables import TABLES, Row, presets
from convnn_lab.train import surroundings
from convnn_lab.train.build import build
from convnn_lab.train.source import AT_A_TEST
from tests.triton import ahead

EMPTY = torch.empty
aten = torch.ops.aten
PRODUCTS = {
    *(aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default),
    *(aten.convolution.default, aten.convolution_backward.default),
}
# What decides which kernels a model takes.
DECIDE = ("model", "layer", "k", "candidates", "position", "patch", "kernel")


class Unmultiplied(TorchDispatchMode):
    """Products have their shapes, and zeros in them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in PRODUCTS:
            return func(*args, **(kwargs or {}))
        with patch.object(torch, "empty", EMPTY):  # what torch makes its own shapes of
            shapes = tree_map_only(Tensor, lambda of: of.to("meta"), (args, kwargs or {}))
            made = func(*shapes[0], **shapes[1])
        return tree_map_only(
            Tensor, lambda of: torch.empty_strided(of.shape, of.stride(), dtype=of.dtype).zero_(), made
        )


def different(rows: tuple[Row, ...]) -> list[Recipe]:
    """The recipes of rows that search, one for each way to."""
    found: dict[Any, Recipe] = {}
    for row in rows:
        if trained(row) and row.dataset == "cifar10":
            recipe = recipe_of(row)[1]
            if recipe.layer in ("hybrid", "convnn", "kvt") and recipe.ratio != 0:
                found.setdefault(tuple(getattr(recipe, name) for name in DECIDE), recipe)
    return list(found.values())


def step(recipe: Recipe) -> None:
    """Train a batch, the smaller one at the end of an epoch, and test."""
    surroundings.set_up(recipe)
    side = presets.image_size({"model": recipe.model})
    model: Any = build(recipe, 3, side, presets.CLASSES[recipe.dataset])
    if hasattr(model, "blocks"):
        model.blocks = nn.Sequential(model.blocks[0])  # they are all alike
    layout = torch.contiguous_format if recipe.precision == "float32" else torch.channels_last

    def logits(batch: int) -> Tensor:
        images = torch.zeros(batch, 3, side, side).to(memory_format=layout)
        with torch.autocast("cpu", torch.bfloat16, enabled=recipe.precision == "bf16"):
            return model(images)

    with Unmultiplied():
        for batch in (recipe.batch, 50_000 % recipe.batch):
            logits(batch).float().sum().backward()
        model.eval()
        with torch.no_grad():
            logits(AT_A_TEST * recipe.batch)


def table(name: str, precision: Precision) -> None:
    """All that a table asks for."""
    # The tensors are the CPU's; the backend is to take them for a device's.
    gates._device = lambda *_: torch.device("cuda", 0)
    gates.broken = lambda index: None  # noqa: ARG005
    few_launch.is_fast = lambda value: value.dtype != torch.float32
    for recipe in different(TABLES[name].rows):
        step(replace(recipe, precision=precision))


if __name__ == "__main__":
    asked: Any = sys.argv[1:]
    for line in ahead.compiled(int(asked[0]), lambda: table(*asked[1:])):
        sys.stdout.write(json.dumps(line) + "\n")

"""From the configuration of a row to the model that was published for it, to the last parameter.

The library's own defaults are what a user expects today; these are what was run: BatchNorm and a 1x1 with bias after
every layer of VGG, 13 of the 16 convolutions of ResNet-50 replaced, a LayerNorm after the patches and none at the end
of the ViT, sinusoidal positions, projections without bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from convnn import ConvNN2d, HybridConv2d, models
from convnn.candidates import Cells, Grid, grid, random
from convnn.descriptor import scaled_concat

CLASSES = {"cifar10": 10, "cifar100": 100, "imagenet": 1000, "fashion-mnist": 10}
CHANNELS = {"fashion-mnist": 1}  # where they are not 3


def build(configuration: Mapping[str, Any], dataset: str, *, device: str | None = None) -> nn.Module:
    """Make the published model of a row."""
    makers = {"vgg11": _vgg, "resnet50": _resnet, "vit_tiny": _vit, "vit_base": _vit}
    name = configuration.get("model")
    if name not in makers or dataset not in CLASSES:
        raise ValueError(f"no published model for {name!r} on {dataset!r}; there are {', '.join(makers)}")
    given = {"num_classes": CLASSES[dataset], "in_channels": CHANNELS.get(dataset, 3), "device": device}
    return makers[name](dict(configuration), given)


def image_size(configuration: Mapping[str, Any]) -> int:
    """The side of the images a row was run on: VGG takes 32, CIFAR's own, and the others 224."""
    return 32 if configuration["model"] == "vgg11" else 224


def _vgg(row: dict[str, Any], given: dict[str, Any]) -> nn.Module:
    options = {"k": row.get("k", 9), "patch": row.get("patch", 1), "candidates": _candidates(row)}
    options |= {"position": scaled_concat(0.5)} if row.get("position") else {}
    size = row.get("kernel_size", 3)

    def layer(inputs: int, outputs: int, /, *, stride: int = 1, bias: bool = True) -> nn.Module:  # noqa: ARG001
        made = HybridConv2d(inputs, outputs, size, ratio=row["ratio"], **options)
        if isinstance(made.convnn, ConvNN2d):
            # Whatever the size of the convolution, the map that was searched had a padding of 1; none for up to four.
            side, k = (3, options["k"]) if options["k"] > 4 else (1, options["k"])
            found, choices = made.convnn.out_channels, {**options, "similarity": "cosine", "k": k}
            choices["candidates"] = _candidates(row, padding=side // 2)
            made.convnn = ConvNN2d(inputs, found, side, padding=side // 2, **choices)
        return made

    return models.create("vgg11", layer=layer, batch_norm=True, init="torch", **given)


def _resnet(row: dict[str, Any], given: dict[str, Any]) -> nn.Module:
    options: dict[str, Any] = {"k": row.get("k", 9), "candidates": _candidates(row, padding=1)}
    if row["layer"] == "conv":
        return models.create("resnet50", bias=True, **given)
    if row["layer"] == "convnn":
        return models.create("resnet50", layer="convnn", **options, **given)
    biases = {"convnn_bias": False, "conv_bias": True, "pointwise_bias": True}
    return models.create("resnet50", layer="hybrid", ratio=row.get("ratio", 0.5), **options, **biases, **given)


def _vit(row: dict[str, Any], given: dict[str, Any]) -> nn.Module:
    layer, heads = row["layer"], row.get("heads", 1)
    options: dict[str, Any] = {
        "heads": heads,
        "positions": "sinusoidal",
        "norm": "patch",
        "eps": 1e-5,
        "dropout": 0.1,
        "init": "torch",
    }
    options |= {"layer": layer, "qkv_bias": False, "proj_bias": False, "init": "torch"}
    if layer == "convnn":
        options |= {"k": row["k"], "kernel": row.get("kernel", "depthwise"), "kernel_drop": 0.1}
        if row.get("candidates", "all") != "all":
            # With one head the candidates were taken before the projection, with twelve after it.
            subset = "before" if heads == 1 else "after"
            options |= {"candidates": _candidates(row), "self_score": "one", "subset": subset}
    elif layer == "kvt":
        options |= {"k": row["k"], "attn_drop": 0.1}
    elif layer == "sparse":
        options |= {"pattern": "band", "stride": 24, "attn_drop": 0.1}
    elif layer in ("attention", "local"):
        options |= {"attn_drop": 0.1}
    return models.create(row["model"], **options, **given)


def _candidates(row: dict[str, Any], padding: int = 0) -> Any:
    """As it was run: random ones drawn again in evaluation too, and from the padded map."""
    kind = row.get("candidates", "all")
    if kind == "all":
        return None
    if kind == "random":
        return random(row["r"], eval="redraw")
    return Misplaced(row["r"], padding) if padding else grid(row["r"])


class Misplaced(Grid):
    """The grid on maps as it was run: cells numbered as without the padding, and taken from the map that has it.

    So they do not stand on a grid, and some are padding: 7 of 16 on a map of 8x8. Where the sides of a map are shorter
    than those of the grid, cells are named several times.
    """

    def __init__(self, count: int, around: int) -> None:
        super().__init__(count)
        self.around = around

    def __repr__(self) -> str:
        return f"Misplaced({self.count}, {self.around})"

    def __call__(self, lead: torch.Size, cells: Cells, device: torch.device) -> Tensor | None:  # noqa: ARG002
        """Choose the candidates, ``(r,)``, or None for all."""
        if self.count >= prod(cells.size):
            return None
        sides = [side - 2 * self.around for side in cells.size]
        steps = round(self.count ** (1 / len(sides)))
        places = [torch.linspace(0, side - 1, steps, device=device).long() for side in sides]
        return Cells(tuple(sides)).numbers(places)

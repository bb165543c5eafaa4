"""Layers on maps against torch's convolutions, in every argument."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convnn
from convnn.backends import Backend
from convnn_lab.verify.drawing import Case, Problem, between, call, coin, each, numbers, one_of

LAYERS: tuple[Any, ...] = (convnn.ConvNN1d, convnn.ConvNN2d, convnn.ConvNN3d)
PEERS: tuple[Any, ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def convolution(axes: int | None = None, *, depthwise: bool = False, **fixed: Any) -> Case:
    """Make a case of a convolution on so many axes, or on any number, with ``fixed`` arguments and others drawn."""

    def case() -> Problem:
        number = axes or between(1, 3)
        options, shape = window(number, depthwise=depthwise, **fixed)
        conv, cells, copies = PEERS[number - 1](**options), torch.randn(shape), coin()

        def ours(backend: str | Backend) -> Tensor:
            if copies:
                return convnn.recipes.from_conv(conv, backend=backend)(cells)
            layer = LAYERS[number - 1](**options, backend=backend)
            layer.load_state_dict(conv.state_dict())
            return layer(cells)

        said = call(f"Conv{number}d", **options)
        said = f"from_conv({said})" if copies else said.replace("Conv", "ConvNN", 1)
        return Problem(ours, lambda: conv(cells), f"{said} on {shape}")

    return case


def separable() -> Problem:
    """A kernel for each channel, then a 1x1 convolution."""
    axes, outputs = between(1, 3), between(1, 5)
    options, shape = window(axes, depthwise=True)
    inputs, size, bias = options["in_channels"], options["kernel_size"], options["bias"]
    given = {name: options[name] for name in ("stride", "padding", "dilation", "padding_mode")}
    peer = PEERS[axes - 1]
    convs = nn.Sequential(
        peer(inputs, inputs, size, groups=inputs, bias=False, **given), peer(inputs, outputs, 1, bias=bias)
    )
    cells = torch.randn(shape)

    def ours(backend: str | Backend) -> Tensor:
        layers = convnn.recipes.depthwise_separable(
            inputs, outputs, size, axes=axes, bias=bias, backend=backend, **given
        )
        layers.load_state_dict(convs.state_dict())
        return layers(cells)

    said = call("depthwise_separable", inputs, outputs, size, axes=axes, bias=bias, **given)
    return Problem(ours, lambda: convs(cells), f"{said} on {shape}")


def patches() -> Problem:
    """Cells moved into the channels, a convolution of patches, and the cells moved back."""
    patch = between(2, 3)
    options, (*lead, height, width) = window(2)
    shape = (*lead, height * patch, width * patch)
    inside = {name: options[name] * patch**2 for name in ("in_channels", "out_channels")}
    conv, cells = nn.Conv2d(**{**options, **inside}), torch.randn(shape)

    def ours(backend: str | Backend) -> Tensor:
        layer = convnn.ConvNN2d(**options, patch=patch, backend=backend)
        layer.load_state_dict(conv.state_dict())
        return layer(cells)

    def theirs() -> Tensor:
        return F.pixel_shuffle(conv(F.pixel_unshuffle(cells, patch)), patch)

    return Problem(ours, theirs, f"{call('ConvNN2d', **options, patch=patch)} on {shape}")


def window(axes: int, *, depthwise: bool = False, **fixed: Any) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Draw the arguments of a convolution and the shape of a map it fits on."""
    wide = axes == 2 and coin(1 / 8)
    options: dict[str, Any] = {
        "kernel_size": (7, 7) if wide else numbers(axes, 1, (7, 5, 3)[axes - 1]),
        "stride": numbers(axes, 1, 3),
        "padding": one_of("same", "valid", *(numbers(axes, 0, (5, 3, 1)[axes - 1]) for _ in range(3))),
        "dilation": numbers(axes, 1, (4, 3, 2)[axes - 1]),
        "groups": between(2, 4) if depthwise else one_of(1, 1, 2, 3),
        "bias": coin(),
        "padding_mode": one_of("zeros", "reflect", "replicate", "circular"),
    } | fixed
    if options["padding"] == "same":
        options["stride"] = 1
    inputs, outputs = (options["groups"] * between(1, 3) for _ in range(2))
    inputs = options["groups"] if depthwise else inputs
    size = fitting(axes, options)
    batch = () if coin(0.2) else (between(1, 2),)
    return {"in_channels": inputs, "out_channels": outputs, **options}, (*batch, inputs, *size)


def fitting(axes: int, options: dict[str, Any]) -> list[int]:
    """Draw the sides of a map on which the windows fit, no two of them equal."""
    reaches = [
        d * (r - 1) for d, r in zip(each(options["dilation"], axes), each(options["kernel_size"], axes), strict=True)
    ]
    known: dict[Any, Any] = {"same": tuple((reach + 1) // 2 for reach in reaches), "valid": 0}
    amounts = each(known.get(options["padding"], options["padding"]), axes)
    size: list[int] = []
    for reach, amount in zip(reaches, amounts, strict=True):
        # A window must fit, and what is reflected or repeated must be there.
        fits = max(2, reach + 1 - (reach if options["padding"] == "same" else 2 * amount))
        least = fits if options["padding_mode"] == "zeros" else max(fits, amount + 1)
        size.append(next(side for side in range(least + between(0, (5, 4, 2)[axes - 1]), 99) if side not in size))
    return size

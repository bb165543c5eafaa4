"""Pictures of learned kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from convnn.layers.kernel import Kernel
from convnn.layers.maps import ConvNNNd
from convnn_lab.explorer.figures import COLOURS, sheet


def kernels(model: nn.Module) -> Any:
    """The first kernels as pictures, and how much each neighbour of every layer counts: the size of its weights."""
    shown = ranks(model)
    figure = sheet(9.6 if shown else 3.8, 3.2)
    panels = list(figure.subplots(1, 2, width_ratios=(1, 1.6)) if shown else [figure.subplots()])
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    panels[0].axis("off")
    if first is not None:
        panels[0].imshow(tiled(first.weight.detach().float().cpu()), cmap="gray", interpolation="nearest")
        panels[0].set_title("first kernels", fontsize=9)
    if shown:
        _by_rank(panels[1], shown)
    return figure


def _by_rank(panel: Any, shown: dict[str, list[float]]) -> None:
    for number, (name, sizes) in enumerate(shown.items()):
        shade = 0.35 + 0.65 * number / max(len(shown) - 1, 1)
        panel.plot(range(1, len(sizes) + 1), sizes, marker=".", alpha=shade, color=COLOURS[2], label=name)
    panel.set_title("mean size of a weight by neighbour, later layers darker", fontsize=9)
    panel.set_xlabel("neighbour")
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.3)


def ranks(model: nn.Module) -> dict[str, list[float]]:
    """For every layer, the mean size of the weights its kernel has for the first, second, ... neighbour."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, (ConvNNNd, Kernel)):
            weight = module.weight.detach().float().cpu()
            taps = weight.flatten(2) if isinstance(module, ConvNNNd) else weight.flatten(0, -2)
            found[name] = taps.abs().flatten(0, -2).mean(0).tolist()
    return found


def tiled(weight: Tensor) -> Any:
    """Kernels ``(O, C, R, S)`` side by side; colours where there are three channels, else their first one."""
    kept = weight[:64, :3] if weight.shape[1] >= 3 else weight[:64, :1]
    low, high = kept.amin((1, 2, 3), keepdim=True), kept.amax((1, 2, 3), keepdim=True)
    kept = (kept - low) / (high - low).clamp(min=1e-12)
    columns = int(len(kept) ** 0.5 + 0.999)
    empty = torch.ones(columns * -(-len(kept) // columns) - len(kept), *kept.shape[1:])
    padded = nn.functional.pad(torch.cat([kept, empty]), (0, 1, 0, 1), value=1.0)
    rows = padded.unflatten(0, (-1, columns)).permute(0, 3, 1, 4, 2)  # (rows, R, columns, S, C)
    whole = rows.flatten(2, 3).flatten(0, 1)
    return (whole if whole.shape[-1] == 3 else whole[..., 0]).numpy()

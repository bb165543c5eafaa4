"""Figures of neighbours, for papers: drawn once, as PNG, SVG or PDF."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from math import ceil
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from convnn_lab.explorer.layer import Choices, Layer, found
from convnn_lab.explorer.measures import SEARCH, Reach, dial

COLOURS = ("#311262", "#831872", "#d33543", "#f98e25", "#fef08a")
WIDEST = 8
"""panels in a row"""


def sheet(width: float, height: float) -> Any:
    """An empty figure of so many inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - slow to import
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def saved(figure: Any, kind: str = "png", dots: int = 150) -> bytes:
    """A figure as the bytes of a file; the same figure gives the same bytes."""
    import matplotlib as mpl  # noqa: PLC0415

    file = BytesIO()
    with mpl.rc_context({"svg.hashsalt": "convnn"}):
        figure.savefig(
            file, format=kind, dpi=dots, metadata={"png": None, "svg": {"Date": None}}.get(kind, {"CreationDate": None})
        )
    return file.getvalue()


def _panels(count: int, proportion: float, side: float = 1.7) -> tuple[Any, list[Any]]:
    columns = min(count, WIDEST)
    rows = ceil(count / columns)
    figure = sheet(side * columns, (side * proportion + 0.28) * rows)
    panels = list(np.atleast_1d(figure.subplots(rows, columns)).flat)
    for panel in panels:
        panel.axis("off")
    return figure, panels


def neighbours(panel: Any, image: Image.Image, layer: Layer, query: int, head: int, choices: Choices) -> None:
    """Draw the neighbours of a query over the picture; colours are by the square root of weights."""
    from matplotlib.colors import LinearSegmentedColormap  # noqa: PLC0415
    from matplotlib.patches import Rectangle  # noqa: PLC0415

    near, weights = found(layer, choices, SEARCH, only=query)
    index, weight = near.index[head, 0], weights[head, 0].float()
    top, left, rows, columns = layer.map.inner
    whole = torch.zeros(layer.map.keys).scatter_add(0, index.clamp(min=0), torch.where(index >= 0, weight, 0))
    cells = whole[layer.map.before :].reshape(layer.map.cells)[top : top + rows, left : left + columns]
    strength = (cells / cells.max().clamp(min=1e-30)).sqrt()
    hot = LinearSegmentedColormap.from_list("neighbours", COLOURS)(strength.numpy())
    hot[..., 3] = np.where(strength > 0, 0.45 + 0.3 * strength, 0.55)
    hot[strength.numpy() == 0, :3] = (0.035, 0.04, 0.065)
    width, height = image.size
    panel.imshow(np.asarray(image), extent=(0, width, height, 0))
    panel.imshow(hot, extent=(0, width, height, 0), interpolation="nearest")
    if query >= layer.map.before:
        row, column = divmod(int(layer.map.own_keys()[query]) - layer.map.before, layer.map.cells[1])
        down, across = height / rows, width / columns
        for line, ink in ((2.4, "black"), (1.2, "white")):
            corner = ((column - left) * across, (row - top) * down)
            panel.add_patch(Rectangle(corner, across, down, fill=False, edgecolor=ink, linewidth=line))
    panel.set_xlim(0, width)
    panel.set_ylim(height, 0)


def at(layer: Layer, x: float, y: float) -> int:
    """The query nearest to a point of the picture, whose sides run from 0 to 1."""
    top, left, rows, columns = layer.map.inner
    down = (torch.tensor(layer.map.own_rows) - (y * rows + top - 0.5)).abs().argmin()
    across = (torch.tensor(layer.map.own_columns) - (x * columns + left - 0.5)).abs().argmin()
    return layer.map.before + int(down) * len(layer.map.own_columns) + int(across)


def maps(image: Image.Image, layers: Sequence[Layer], place: tuple[float, float], head: int | None = None) -> Any:
    """The neighbours of one query in every layer; of every head, or of one."""
    shown = [
        (each, number)
        for each in layers
        for number in (range(each.heads) if head is None else [min(head, each.heads - 1)])
    ]
    figure, panels = _panels(len(shown), image.height / image.width)
    for panel, (layer, number) in zip(panels, shown, strict=False):
        neighbours(panel, image, layer, at(layer, *place), number, layer.own)
        title = layer.name if layer.heads == 1 else f"{layer.name}, head {number}"
        panel.set_title(title, fontsize=7, parse_math=False)
    return figure


def dialled(
    image: Image.Image, layer: Layer, place: tuple[float, float], turns: Sequence[float], temperature: float
) -> Any:
    """The same query on the way from a convolution to attention."""
    figure, panels = _panels(len(turns), image.height / image.width, side=2.4)
    for panel, turn in zip(panels, turns, strict=False):
        choices = dial(layer, turn, temperature)
        neighbours(panel, image, layer, at(layer, *place), 0, choices)
        ends = {0.0: "convolution: 3x3 in space", 1.0: "attention: all by likeness"}
        panel.set_title(ends.get(turn, f"share {turn:g}, k = {choices.k}"), fontsize=8)
    return figure


def distances(layers: Sequence[str], reaches: Sequence[Sequence[Reach]]) -> Any:
    """How far each layer looks, in pixels: a point for every head, a line for their mean, over all pictures."""
    figure = sheet(1.8 + 0.42 * len(layers), 3.2)
    axes = figure.subplots()
    heads = [[mean(each.distance[h] for each in seen) for h in range(len(seen[0].distance))] for seen in reaches]
    axes.plot(range(len(layers)), [mean(row) for row in heads], color=COLOURS[2], zorder=1)
    for number, row in enumerate(heads):
        axes.scatter([number] * len(row), row, color=COLOURS[3], s=16, zorder=2)
    _named(axes, layers)
    axes.set_ylabel("mean distance in pixels")
    axes.set_ylim(bottom=0)
    return figure


def localities(layers: Sequence[str], reaches: Sequence[Sequence[Reach]]) -> Any:
    """The share of neighbours inside windows of 3 x 3 and 5 x 5 cells, by layer, over all pictures."""
    figure = sheet(1.8 + 0.5 * len(layers), 3.2)
    axes = figure.subplots()
    for shift, (name, part) in enumerate((("3x3", "inside3"), ("5x5", "inside5"))):
        rows = [[mean(getattr(each, part)) for each in seen] for seen in reaches]
        spread = [stdev(row) if len(row) > 1 else 0.0 for row in rows]
        places = [number + 0.4 * shift - 0.2 for number in range(len(layers))]
        axes.bar(
            places, [mean(row) for row in rows], 0.38, yerr=spread, label=f"inside {name}", color=COLOURS[1 + 2 * shift]
        )
    _named(axes, layers)
    axes.set_ylim(0, 1.05)
    axes.set_ylabel("share of neighbours")
    axes.legend(fontsize="small")
    return figure


def _named(axes: Any, layers: Sequence[str]) -> None:
    axes.set_xticks(range(len(layers)), layers, rotation=60, ha="right", fontsize=7, parse_math=False)
    axes.grid(alpha=0.3, axis="y")


def overlaps(layers: Sequence[str], matrices: Sequence[Tensor]) -> Any:
    """How much every two heads of each layer share."""
    figure, panels = _panels(len(layers), 1.0)
    drawn = None
    for panel, name, matrix in zip(panels, layers, matrices, strict=False):
        drawn = panel.imshow(matrix.numpy(), vmin=0, vmax=1, cmap="magma")
        panel.set_title(name, fontsize=7, parse_math=False)
    figure.colorbar(drawn, ax=panels, label="shared weight", shrink=0.8)
    return figure


def rolled(image: Image.Image, reached: Tensor) -> Any:
    """What reaches the class token, over the picture."""
    figure = sheet(6.4, 3.2 * image.height / image.width + 0.3)
    plain, hot = figure.subplots(1, 2)
    for panel in (plain, hot):
        panel.imshow(np.asarray(image), extent=(0, image.width, image.height, 0))
        panel.axis("off")
    extent = (0, image.width, image.height, 0)
    drawn = hot.imshow(reached.numpy(), extent=extent, cmap="inferno", alpha=0.7, interpolation="nearest")
    figure.colorbar(drawn, ax=hot, label="share in the class token", shrink=0.8)
    return figure

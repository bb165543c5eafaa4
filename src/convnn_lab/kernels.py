"""What a run's kernels have learned, as a table, a file of numbers and a figure."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from convnn_lab.train import store
from convnn_lab.train.kernels import Moved


def show(title: str, moved: Sequence[Moved]) -> None:
    """Print how far every layer's kernel has moved by a quarter, half and all of the run, and what it is by rank."""
    epochs = moved[0].epochs
    shown = sorted({len(epochs) // 4, len(epochs) // 2, len(epochs) - 1} - {0}) or [0]
    whence = "1" if all(layer.from_one() is not None for layer in moved) else "the start"
    console = Console()
    # A table that is piped is as wide as it is.
    console = console if console.is_terminal else Console(width=1000)
    distances = Table("layer", "kernel", title=f"{title}: distance from {whence}", box=None, pad_edge=False)
    for place in shown:
        distances.add_column(f"after {epochs[place]}", justify="right")
    for layer in moved:
        total = layer.from_start().square().mean(1).sqrt()  # over ranks too
        _, channels, ranks = layer.values.shape
        sizes = f"{layer.kind}, {channels} x {ranks}"
        distances.add_row(layer.layer or "(model)", sizes, *(f"{total[place]:.4f}" for place in shown))
    console.print(distances)
    by_rank = Table("layer", title="mean and deviation by rank, nearest first", box=None, pad_edge=False)
    for rank in range(max(layer.values.shape[-1] for layer in moved)):
        by_rank.add_column(str(rank + 1), justify="right")
    for layer in moved:
        pairs = zip(layer.mean()[-1].tolist(), layer.deviation()[-1].tolist(), strict=True)
        by_rank.add_row(layer.layer or "(model)", *(f"{mean:.3f} {deviation:.3f}" for mean, deviation in pairs))
    console.print(by_rank)


COLUMNS = ("layer", "kind", "epochs", "rank", "mean", "deviation", "from_start", "from_one")


def write_csv(path: Path, moved: Sequence[Moved]) -> None:
    """Write a row for every layer, epoch and rank."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for layer in moved:
        one = layer.from_one()
        several = [layer.mean(), layer.deviation(), layer.from_start(), *([] if one is None else [one])]
        for place, epoch in enumerate(layer.epochs):
            for rank in range(layer.values.shape[-1]):
                numbers = [repr(float(each[place, rank])) for each in several]
                writer.writerow([layer.layer, layer.kind, epoch, rank + 1, *numbers, *([""] if one is None else [])])
    store.write(path, text.getvalue())


def draw(path: Path, moved: Sequence[Moved], layer: str | None = None) -> None:
    """Write :func:`drawn` to a file."""
    content = BytesIO()
    drawn(moved, layer).savefig(content, dpi=120, format="png")
    store.write(path, content.getvalue())


def drawn(moved: Sequence[Moved], layer: str | None = None) -> Any:
    """A figure of distance by epoch, the mean by layer and rank, and one layer's kernel by channel and rank.

    Args:
        layer: which one; None for the one that has moved most.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - slow to import
    from matplotlib.figure import Figure  # noqa: PLC0415

    chosen = _chosen(moved, layer)
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)
    _distances(left, moved)
    _by_rank(figure, middle, moved)
    image = right.imshow(chosen.values[-1].tolist(), aspect="auto", interpolation="nearest", cmap="viridis")
    right.set_title(f"{chosen.layer or 'the model'}, after {chosen.epochs[-1]} epochs", fontsize="medium")
    right.set_xlabel("rank, nearest first")
    right.set_ylabel("channel")
    right.set_xticks(range(chosen.values.shape[-1]), [str(1 + rank) for rank in range(chosen.values.shape[-1])])
    figure.colorbar(image, ax=right)
    return figure


def _chosen(moved: Sequence[Moved], layer: str | None) -> Moved:
    if layer is None:
        return max(moved, key=lambda each: float(each.from_start()[-1].square().mean()))
    for each in moved:
        if each.layer == layer:
            return each
    raise ValueError(f"--layer must be one of {', '.join(each.layer for each in moved)}, got {layer!r}")


def _distances(axes: Any, moved: Sequence[Moved]) -> None:
    """Every layer's distance from where it started, by epoch."""
    for number, layer in enumerate(moved):
        colour = number / max(1, len(moved) - 1)
        total = layer.from_start().square().mean(1).sqrt()
        axes.plot(layer.epochs, total.tolist(), color=(colour, 0.3, 1 - colour), label=layer.layer, linewidth=1)
    ones = all(layer.from_one() is not None for layer in moved)
    axes.set_ylabel("distance from 1" if ones else "distance from the start")
    axes.set_xlabel("epochs")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="xx-small", ncols=1 + len(moved) // 12)


def _by_rank(figure: Any, axes: Any, moved: Sequence[Moved]) -> None:
    """The mean over channels by layer and rank, at the end."""
    ranks = max(layer.values.shape[-1] for layer in moved)
    rows = [layer.mean()[-1].tolist() for layer in moved]
    image = axes.imshow([row + [float("nan")] * (ranks - len(row)) for row in rows], aspect="auto", cmap="viridis")
    axes.set_yticks(range(len(moved)), [layer.layer for layer in moved], fontsize="xx-small")
    axes.set_xticks(range(ranks), [str(1 + rank) for rank in range(ranks)])
    axes.set_xlabel("rank, nearest first")
    axes.set_title("mean over channels", fontsize="medium")
    figure.colorbar(image, ax=axes)

"""Curves of runs, drawn from their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path

from convnn_lab.train import store
from convnn_lab.train.measure import ACCURACY, Measure
from convnn_lab.train.run import Row


def curves(path: Path, runs: Mapping[str, Sequence[Row]], by: Measure = ACCURACY) -> None:
    """Draw the loss of one or several runs and what they are judged by, epoch by epoch."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - slow to import
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    loss, judged = figure.subplots(1, 2)
    for number, (name, rows) in enumerate(runs.items()):
        colour = f"C{number % 10}"
        epochs = [row["epoch"] + 1 for row in rows]
        marker = "o" if len(epochs) < 3 else None
        for axes, kind, scale in ((loss, "loss", 1), (judged, by.name, by.scale)):
            train, test = ([scale * row[f"{part}_{kind}"] for row in rows] for part in ("train", "val"))
            axes.plot(epochs, train, color=colour, linestyle=":", linewidth=1, marker=marker)
            axes.plot(epochs, test, color=colour, label=name, marker=marker)
    loss.set_ylabel("loss")
    judged.set_ylabel(by.title if by.scale == 1 else f"{by.title} in{by.unit}")
    for axes in (loss, judged):
        axes.set_xlabel("epoch (dotted: training, full: test)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    judged.legend(loc="lower right" if by.rises else "upper right", fontsize="small")
    drawn = BytesIO()
    figure.savefig(drawn, dpi=120, format="png")
    store.write(path, drawn.getvalue())

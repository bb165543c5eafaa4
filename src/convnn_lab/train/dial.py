"""Where the layers of a run settled between convolution and attention."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from convnn import morph
from convnn_lab.train import store
from convnn_lab.train.evaluate import Which, trained
from convnn_lab.train.module import dialled
from convnn_lab.train.run import Row, Run

WIDTH = 40  # characters between space and features


def read(folder: Path, which: Which = "last") -> dict[str, list[float]]:
    """The shares of every layer of a run: one, or one for each head."""
    run = Run.open(folder)
    shares = morph.dial(trained(run, run.recipe()[1], which, torch.device("cpu"))[0])
    if not shares:
        raise ValueError(f"no layer of {folder} stands between space and features; train with --dial 0.5 or --blend")
    return shares


def show(shares: Mapping[str, Sequence[float]]) -> None:
    """Print a line for every share."""
    named = [
        (name if len(told) == 1 else f"{name} head {head}", share)
        for name, told in shares.items()
        for head, share in enumerate(told)
    ]
    wide = max(len(name) for name, _ in named)
    sys.stdout.write(f"{'':{wide}}  space{'features':>{WIDTH - 4}}\n")
    for name, share in named:
        place = round(share * (WIDTH - 1))
        bar = "".join("●" if at == place else "─" for at in range(WIDTH))
        sys.stdout.write(f"{name:{wide}}  {bar}  {share:.3f}\n")


def draw(path: Path, shares: Mapping[str, Sequence[float]], rows: Sequence[Row]) -> None:
    """Write :func:`drawn` to a file."""
    content = BytesIO()
    drawn(shares, rows).savefig(content, dpi=100, format=path.suffix.lstrip(".") or "png")
    store.write(path, content.getvalue())


def drawn(shares: Mapping[str, Sequence[float]], rows: Sequence[Row]) -> Any:
    """A figure of where every share ended, and its way there if the rows of the run tell it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - slow to import
    from matplotlib.figure import Figure  # noqa: PLC0415

    count = sum(map(len, shares.values()))
    ways = [row for row in rows if any(name.startswith("share:") for name in row)]
    figure = Figure(figsize=(10 if ways else 5.5, max(3.0, 1 + 0.3 * count)), layout="constrained")
    FigureCanvasAgg(figure)
    panels: Any = figure.subplots(1, 2 if ways else 1, squeeze=False)[0]
    labels: list[str] = []
    for layer, (name, told) in enumerate(shares.items()):
        for head, share in enumerate(told):
            label = name if len(told) == 1 else f"{name}, head {head}"
            panels[-1].plot([share], [len(labels)], "o", color=f"C{layer % 10}")
            if ways:
                path_of = [row[dialled(name, head)] for row in ways]
                panels[0].plot([row["epoch"] + 1 for row in ways], path_of, color=f"C{layer % 10}", label=label)
            labels.append(label)
    panels[-1].set_yticks(range(len(labels)), labels, fontsize="small")
    panels[-1].invert_yaxis()
    panels[-1].set_xlim(-0.02, 1.02)
    panels[-1].set_xlabel("0 space (convolution) … 1 features (attention)")
    panels[-1].grid(alpha=0.3)
    if ways:
        panels[0].set_xlabel("epoch")
        panels[0].set_ylabel("share of features")
        panels[0].set_ylim(-0.02, 1.02)
        panels[0].grid(alpha=0.3)
    return figure


def rows_of(folder: Path) -> list[Row]:
    """The epochs of a run."""
    return Run.open(folder).rows()

"""The thesis's figures from our own runs: losses over the epochs, accuracy against what is varied and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from statistics import mean
from typing import Any

from convnn_lab.recipes import RECIPES
from convnn_lab.rerun.results import Going, Result
from convnn_lab.tables import Table
from convnn_lab.train import store

WINDOW = 10  # epochs of the moving average, as in the thesis
# What each table varies, with how the thesis writes it.
VARIED: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("vary-lambda", "fashion-lambda"), ("ratio", "λ")),
    **dict.fromkeys(("vgg-k", "vit-k", "resnet-k", "vit-imagenet-k"), ("k", "k")),
    **dict.fromkeys(("vgg-candidates", "vit-candidates", "resnet-r"), ("r", "r")),
    "vgg-lr": ("lr", "learning rate"),
    "vgg-patch": ("patch", "patch"),
    "vit-heads": ("heads", "heads"),
}
Curve = Result | Going
MOST = 12  # curves that can be told apart
# Numbers of an epoch that are drawn, with their names and what they are multiplied with.
CURVES = {"train_loss": ("training loss", 1), "val_loss": ("test loss", 1), "val_acc": ("test accuracy in %", 100)}


def draw(folder: Path, table: Table, results: Sequence[Result], going: Sequence[Going] = ()) -> list[Path]:
    """Draw what a table's results allow, and curves of runs that have not finished; the files that were written."""
    drawn: list[Path] = []
    curves = next((some for some in (_once([*results, *going]), _once(results)) if _can_be_told_apart(some)), [])
    if results:
        drawn.append(folder / "gflops.png")
        _panels(drawn[-1], results, _against_gflops, VARIED.get(table.name, ("", ""))[0])
    if results and table.name in VARIED:
        drawn.append(folder / f"accuracy-{VARIED[table.name][0]}.png")
        _panels(drawn[-1], results, _against, *VARIED[table.name])
    if curves:
        drawn.append(folder / "loss.png")
        _panels(drawn[-1], curves, _curves, sides=len(CURVES), parted=_by_rate, bars=False)
    return drawn


def _once(curves: Sequence[Curve]) -> list[Curve]:
    """Leave out a run that is another row's too."""
    found: dict[Any, Curve] = {}
    for each in curves:
        found.setdefault((each.job.folder, each.epochs), each)
    return list(found.values())


def _can_be_told_apart(curves: Sequence[Curve]) -> bool:
    return all(len(group) <= MOST for group in _by_rate(curves).values())


def moving(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """The mean of every value and up to ``window - 1`` before it.

    Example:
        >>> moving([1.0, 3.0, 5.0], window=2)
        [1.0, 2.0, 4.0]
    """
    return [mean(values[max(0, place + 1 - window) : place + 1]) for place in range(len(values))]


def _by_dataset(results: Sequence[Result]) -> dict[str, list[Result]]:
    parts: dict[str, list[Result]] = {}
    for each in results:
        parts.setdefault(each.row.dataset, []).append(each)
    return parts


def _by_rate(results: Sequence[Curve]) -> dict[str, list[Curve]]:
    """By data set and, where a table varies it, learning rate."""
    parts: dict[str, list[Curve]] = {}
    for each in results:
        rate = f", learning rate {each.row.configuration['lr']:g}" if "lr" in each.row.configuration else ""
        parts.setdefault(f"{each.row.dataset}{rate}", []).append(each)
    return parts


def _panels(
    path: Path,
    results: Sequence[Curve],
    fill: Any,
    *more: str,
    sides: int = 1,
    parted: Any = _by_dataset,
    bars: bool = True,
) -> None:
    """One row of axes for each part of the results."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - slow to import
    from matplotlib.figure import Figure  # noqa: PLC0415

    parts = parted(results)
    figure = Figure(figsize=(6 * sides, 4 * len(parts)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(parts), sides, squeeze=False)
    for axes, (dataset, group) in zip(grid, parts.items(), strict=True):
        fill(axes if sides > 1 else axes[0], group, *more)
        axes[0].set_title(dataset, loc="left", fontsize="medium")
        for each in axes:
            each.grid(alpha=0.3)
            many = len(each.get_legend_handles_labels()[0]) > 6
            aside = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)} if many else {}
            each.legend(fontsize="x-small", **aside)
    figure.supxlabel(about(results, bars=bars), fontsize="x-small")
    written = BytesIO()
    figure.savefig(written, dpi=120, format="png")
    with store.storing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    store.write(path, written.getvalue())


def about(results: Sequence[Curve], *, bars: bool = True) -> str:
    """What a figure is made of: how long, how precisely and how often rows were run, and what bars are, if any."""
    epochs = sorted({each.epochs for each in results})
    precisions = sorted({each.job.recipe.precision for each in results})
    seeds = sorted({len(each.seeds) for each in results})
    said = [f"{_span(epochs)} epochs", " and ".join(precisions), f"{_span(seeds)} seed{'s' * (seeds != [1])}"]
    pooled = f"; means over seeds{', bars: their standard deviation' * bars}" if seeds[-1] > 1 else ""
    return f"ours: {', '.join(said)}{pooled}"


def _span(numbers: Sequence[int]) -> str:
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def _look(number: int) -> dict[str, str]:
    """A colour, and after ten of them another mark."""
    return {"color": f"C{number % 10}", "marker": "osD^vP*X"[number // 10 % 8]}


def _curves(axes: Any, group: Sequence[Curve]) -> None:
    """Losses and test accuracy over the epochs; a run that is two rows' is drawn once."""
    for place, (field, (said, factor)) in zip(axes, CURVES.items(), strict=True):
        for number, each in enumerate(_once(group)):
            epochs = [epoch["epoch"] + 1 for epoch in each.curves]
            values = moving([factor * epoch[field] for epoch in each.curves])
            marker = "o" if len(epochs) < 3 else None
            place.plot(epochs, values, color=f"C{number % 10}", label=_named(each, group), marker=marker)
        place.set_ylabel(f"{said}, moving average of {WINDOW}")
        place.set_xlabel("epoch")


def _against(axes: Any, group: Sequence[Result], field: str, said: str) -> None:
    """Accuracy against a field, a line for all that agree in the rest; rows without the field lie across."""
    lines: dict[str, list[Result]] = {}
    across = [each for each in group if field not in each.row.configuration]
    along = [each for each in group if field in each.row.configuration]
    for each in along:
        lines.setdefault(_series(each, along, field), []).append(each)
    for number, each in enumerate(across):
        style = {"linestyle": ("--", "-.", ":")[number % 3], "color": f"{0.2 * (number % 4)}", "linewidth": 1}
        axes.axhline(mean(each.accuracies), **style, label=_named(each, group))
    for number, (name, points) in enumerate(lines.items()):
        points.sort(key=lambda each: each.row.configuration[field])
        places = [each.row.configuration[field] for each in points]
        spreads, look = [each.spread or 0.0 for each in points], _look(number)
        axes.errorbar(
            places,
            [mean(each.accuracies) for each in points],
            spreads,
            **look,
            capsize=2,
            label=name or "ours",
        )
        logged = [
            (place, each.row.logged.accuracy) for place, each in zip(places, points, strict=True) if each.row.logged
        ]
        if logged:
            axes.plot(
                *zip(*logged, strict=True),
                color=look["color"],
                linestyle=":",
                marker="x",
                label=f"{name}{name and ', '}author's logs, {RECIPES[points[0].job.recipe_name].epochs} epochs",
            )
    axes.set_xscale("log" if field == "lr" else "linear")
    axes.set_xlabel(said)
    axes.set_ylabel("test accuracy in %")


def _against_gflops(axes: Any, group: Sequence[Result], field: str) -> None:
    """Accuracy against cost; where a table varies a field, points have its value beside them."""
    kinds: dict[str, list[Result]] = {}
    for number, each in enumerate(group):
        kinds.setdefault((_series(each, group, field) or "ours") if field else _named(each, group), []).append(each)
        if field in each.row.configuration:
            place = (each.gflops, mean(each.accuracies))
            side = "right" if number % 2 else "left"  # rows that follow each other are often near each other
            axes.annotate(f"  {each.row.configuration[field]:g}  ", place, fontsize="xx-small", ha=side)
    for number, (name, several) in enumerate(kinds.items()):
        values, spreads = [mean(each.accuracies) for each in several], [each.spread or 0.0 for each in several]
        axes.errorbar(
            [each.gflops for each in several],
            values,
            spreads,
            **_look(number),
            linestyle="",
            capsize=2,
            label=name,
        )
    axes.set_xlabel("true GFLOPS of one image, forward")
    axes.set_ylabel("test accuracy in %")


# How lines are told apart, as far as the rows of a figure differ in it.
SAID = {
    "layer": "{}",
    "candidates": "{}",
    "kernel": "{}",
    "kernel_size": "{0}x{0} kernel",
    "ratio": "λ = {}",
    "patch": "patch {}",
    "k": "k = {}",
    "r": "r = {}",
}


def _series(each: Result, group: Sequence[Result], field: str) -> str:
    """What a line of points is called: what its rows have that others of the figure have not."""
    words = []
    for name, said in SAID.items():
        own = each.row.configuration.get(name)
        values = {other.row.configuration.get(name) for other in group} - {None}  # what searches nothing says nothing
        if name != field and own is not None and len(values) > 1:
            words.append(said.format(own))
    if len({"position" in other.row.configuration for other in group}) > 1:
        words.append("with positions" if "position" in each.row.configuration else "without positions")
    mixed = any(each.how != other.how for other in group)
    return ", ".join([*words, *(each.how if mixed else [])])


def _named(each: Curve, group: Sequence[Curve]) -> str:
    """A row's label, and how it was run where the others were run differently."""
    same = all(each.how == other.how for other in group)
    return ", ".join([each.row.label, *([] if same else each.how)])

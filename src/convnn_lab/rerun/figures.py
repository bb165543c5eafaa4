"""The thesis's figures from our own runs: losses over the epochs, accuracy against what is varied and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import BytesIO
from math import nan
from pathlib import Path
from statistics import mean, stdev
from typing import Any, TypeVar

from convnn_lab.recipes import RECIPES
from convnn_lab.rerun.labels import about, named, series
from convnn_lab.rerun.records import Going, Result
from convnn_lab.tables import Table
from convnn_lab.train import store

WINDOW = 10  # epochs of the moving average of long runs, as in the thesis
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
AnyCurve = TypeVar("AnyCurve", bound=Curve)
MOST = 12  # curves that can be told apart
# Numbers of an epoch that are drawn, with their names and what they are multiplied with.
CURVES = {"train_loss": ("training loss", 1), "val_loss": ("test loss", 1), "val_acc": ("test accuracy in %", 100)}


def draw(folder: Path, table: Table, results: Sequence[Result], going: Sequence[Going] = ()) -> list[Path]:
    """Draw what a table's results allow, and curves of runs that have not finished; the files that were written."""
    drawn: list[Path] = []
    both: list[Sequence[Curve]] = [_once([*results, *going]), _once(results)]
    curves = next((some for some in both if _can_be_told_apart(some)), [])
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


def _once(curves: Sequence[AnyCurve]) -> list[AnyCurve]:
    """Leave out a run that is another row's too."""
    found: dict[Any, AnyCurve] = {}
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
        many = len(axes[0].get_legend_handles_labels()[0]) > 3
        for each in axes:
            each.grid(alpha=0.3)
            if not many:
                each.legend(fontsize="x-small")
        if many:  # they would cover lines; all sides have the same
            figure.set_figwidth(6 * sides + 2)
            axes[-1].legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.supxlabel(about(results, bars=bars), fontsize="x-small")
    written = BytesIO()
    figure.savefig(written, dpi=120, format="png")
    with store.storing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    store.write(path, written.getvalue())


def _look(number: int) -> dict[str, str]:
    """A colour, and after ten of them another mark."""
    return {"color": f"C{number % 10}", "marker": "osD^vP*X"[number // 10 % 8]}


def _curves(axes: Any, group: Sequence[Curve]) -> None:
    """Losses and test accuracy over the epochs, of several seeds each faintly; a run that is two rows' is drawn once.

    Short curves are averaged over less than long ones; they begin where there is a whole window.
    """
    window = max(1, min(WINDOW, max(len(each.curves) for each in group) // 5))
    for place, (field, (said, factor)) in zip(axes, CURVES.items(), strict=True):
        for number, each in enumerate(_once(group)):
            first = window - 1 if len(each.curves) > window else 0
            look: Any = {"color": f"C{number % 10}", "marker": "o" if len(each.curves) < 3 else None}
            faint: Any = [(run, {"alpha": 0.35, "linewidth": 0.8}) for run in each.runs if len(each.runs) > 1]
            for run, more in [*faint, (each.curves, {"label": named(each, group)})]:
                epochs = [epoch["epoch"] + 1 for epoch in run]
                values = moving([factor * epoch[field] for epoch in run], window)
                place.plot(epochs[first:], values[first:], **look, **more)
        place.set_ylabel(f"{said}, moving average of {window}" if window > 1 else said)
        place.set_xlabel("epoch")
        place.xaxis.get_major_locator().set_params(integer=True)


def _heights(group: Sequence[Result]) -> tuple[str, Callable[[Result], list[float]]]:
    """What rows are compared by, and where from: as many last epochs of all, or else the last."""
    (late, *others) = {len(last) for each in group for last in each.lasts or [()]}
    if late and not others:
        return f"mean of the last {late} epochs", lambda each: [mean(last) for last in each.lasts]
    return "last epoch", lambda each: list(each.accuracies)


def _points(axes: Any, places: Sequence[float], values: Sequence[Sequence[float]], **look: Any) -> None:
    """The mean of the values of each place, with bars that show behind it where there are several."""
    bars = [stdev(each) if len(each) > 1 else nan for each in values]
    axes.errorbar(places, [mean(each) for each in values], bars, **look, capsize=4, markersize=4)


def _against(axes: Any, group: Sequence[Result], field: str, said: str) -> None:
    """Accuracy against a field, a line for all that agree in the rest; rows without the field lie across."""
    compared, height = _heights(group)
    lines: dict[str, list[Result]] = {}
    across = [each for each in group if field not in each.row.configuration]
    along = [each for each in group if field in each.row.configuration]
    for each in along:
        lines.setdefault(series(each, along, field), []).append(each)
    for number, each in enumerate(across):
        style = {"linestyle": ("--", "-.", ":")[number % 3], "color": f"{0.2 * (number % 4)}", "linewidth": 1}
        axes.axhline(mean(height(each)), **style, label=named(each, group))
    dotted, whose = {"linestyle": ":", "marker": "x"}, ""
    for number, (name, points) in enumerate(lines.items()):
        points.sort(key=lambda each: each.row.configuration[field])
        places = [each.row.configuration[field] for each in points]
        look = _look(number)
        _points(axes, places, [height(each) for each in points], **look, label=name or "ours")
        logged = [(place, of.row.logged.accuracy) for place, of in zip(places, points, strict=True) if of.row.logged]
        if logged:
            axes.plot(*zip(*logged, strict=True), **dotted, color=look["color"])
            whose = f"author's logs, last of {RECIPES[points[0].job.recipe_name].epochs} epochs"
    if whose:
        axes.plot([], [], **dotted, color="grey", label=whose)
    axes.set_xscale("log" if field == "lr" else "linear")
    if all(isinstance(each.row.configuration[field], int) for each in along):
        axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel(said)
    axes.set_ylabel(f"test accuracy in %, {compared}")


def _against_gflops(axes: Any, group: Sequence[Result], field: str) -> None:
    """Accuracy against cost; where a table varies a field, points have its value beside them. A run is drawn once."""
    compared, height = _heights(group)
    kinds: dict[str, list[Result]] = {}
    for number, each in enumerate(_once(group)):
        kinds.setdefault((series(each, group, field) or "ours") if field else named(each, group), []).append(each)
        if field in each.row.configuration:
            place = (each.gflops, mean(height(each)))
            side = "right" if number % 2 else "left"  # rows that follow each other are often near each other
            axes.annotate(f"  {each.row.configuration[field]:g}  ", place, fontsize="xx-small", ha=side)
    for number, (name, several) in enumerate(kinds.items()):
        places, values = [each.gflops for each in several], [height(each) for each in several]
        _points(axes, places, values, **_look(number), linestyle="", label=name)
    costs = [each.gflops for each in group]
    axes.set_xlim(0.8 * min(costs), 1.05 * max(costs))  # a few percent are not to fill a figure
    axes.set_xlabel("true GFLOPS of one image, forward")
    axes.set_ylabel(f"test accuracy in %, {compared}")

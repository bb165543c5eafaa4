"""Draw what benchmarks/scaling.py measured: scaling.svg, time against N, K, C and r, and roofline.svg.

    python benchmarks/plots.py FILE.csv [FILE.csv ...] -o docs/figures

The roofs are an NVIDIA H200's: 4.8 TB/s of memory and 989 TFLOP/s of dense bfloat16 matrix products, as its maker
states them, and one for choosing. Where there are more than 256 keys and K is at most 20, a score that streams through
the bins of its row takes 7 operations of the units for integers and comparisons: 5 minima and maxima and 2 logical
ones, counted in the loop compiled for sm_90. There are 132 multiprocessors of 64 such lanes, at the 1.83 GHz with which
4,096 operations a cycle make 989 TFLOP/s; so at most 2.2e12 scores a second, each with 2 C operations of matrix units
behind it.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator

MEMORY, MATRIX = 4.8e12, 989e12
PROCESSORS, LANES, PER_SCORE, PER_CYCLE = 132, 64, 7, 4096
SCORES = PROCESSORS * LANES * MATRIX / (PROCESSORS * PER_CYCLE) / PER_SCORE

BLUE, GREY, ORANGE, GREEN, PURPLE = "#0969da", "#6e7781", "#bc4c00", "#1a7f37", "#8250df"
STYLES = {"convnn": (BLUE, "o"), "sdpa": (GREY, "s"), "sdpa, candidates": (ORANGE, "^")}
PANELS = {
    "n": "tokens N (K = 9, C = 64)",
    "k": "neighbours K (N = 1024, C = 64)",
    "c": "channels of a head C (N = 1024, K = 9)",
    "r": "candidates r (N = 4096, K = 9, C = 64)",
}
# What the roofline shows, and where the ends of each series are named: points to the right of them and up.
SERIES: list[tuple[str, str, str, str, str, list[tuple[int, int]]]] = [
    ("n", "sdpa", GREY, "s", "attention (SDPA), by N", []),
    ("n", "convnn", BLUE, "o", "convnn, by N", [(-38, 2), (5, -10)]),
    ("r", "convnn", GREEN, "^", "convnn, by candidates r", [(5, -10), (1, 8)]),
    ("c", "convnn", PURPLE, "D", "convnn, by channels C", [(5, -10), (-38, 3)]),
    ("maps", "convnn", ORANGE, "v", "convnn on maps, kernels that mix C channels", [(5, -10), (-14, 6)]),
    ("maps", "conv2d", ORANGE, "1", "convolution 3x3 on maps of C channels", [(6, -3), (6, -3)]),
]
SETTINGS: Any = {
    "svg.hashsalt": "convnn",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "path.simplify": True,
}


@dataclass(frozen=True)
class Row:
    """One contender at one size: microseconds, and operations and bytes of a forward pass."""

    sweep: str
    contender: str
    n: int
    k: int
    c: int
    r: int | None
    forward: float
    both: float
    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes

    @property
    def attained(self) -> float:
        return self.flops / (self.forward * 1e-6)


def read(path: Path) -> list[Row]:
    """The rows of a table, without those that could not be measured."""
    with path.open(newline="") as file:
        table = csv.DictReader(file)
        wanted = {"sweep", "n", "k", "c", "r", "contender", "forward_us", "both_us", "flops", "bytes"}
        missing = sorted(wanted - set(table.fieldnames or ()))
        if missing:
            raise ValueError(f"{path} must be what benchmarks/scaling.py writes; it lacks {', '.join(missing)}")
        return [_row(cells) for cells in table if cells["forward_us"]]


def _row(cells: dict[str, str]) -> Row:
    n, k, c = (int(cells[name]) for name in ("n", "k", "c"))
    costs = (float(cells[name]) for name in ("forward_us", "both_us", "flops", "bytes"))
    return Row(cells["sweep"], cells["contender"], n, k, c, int(cells["r"]) if cells["r"] else None, *costs)


def of(rows: Sequence[Row], sweep: str, contender: str) -> list[Row]:
    return [row for row in rows if (row.sweep, row.contender) == (sweep, contender)]


def scaling(rows: Sequence[Row]) -> Figure:
    """Four panels: microseconds of forward and of a step."""
    figure = Figure(figsize=(9, 6.6), layout="constrained", facecolor="white")
    for axes, (sweep, label) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        for contender, (colour, marker) in STYLES.items():
            found = of(rows, sweep, contender)
            sizes = [getattr(row, sweep) for row in found]
            look: Any = {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1.4}
            if found:
                axes.plot(sizes, [row.forward for row in found], **look)
                axes.plot(sizes, [row.both for row in found], **look, linestyle="--", markerfacecolor="white")
        _log(axes, label, "µs")
        ticks = sorted({getattr(row, sweep) for row in rows if row.sweep == sweep})
        if not ticks:
            axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=GREY)
            continue
        # Two ticks as near as 197 and 256 would write over each other.
        shown = [tick for place, tick in enumerate(ticks) if place == 0 or tick > 1.3 * ticks[place - 1]]
        axes.set_xticks(shown, [str(tick) for tick in shown], rotation=30 if len(shown) > 7 else 0)
        axes.minorticks_off()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}"))
    figure.suptitle("12 · 16,384 queries in bfloat16", fontsize=10)
    _keys(figure)
    return figure


def _keys(figure: Figure) -> None:
    """One legend for all panels, below them, where no curve runs through it."""
    looks: list[dict[str, Any]] = [{"color": colour, "marker": marker} for colour, marker in STYLES.values()]
    looks += [{"color": "black", "marker": "o"}]
    looks += [{"color": "black", "marker": "o", "markerfacecolor": "white", "linestyle": "--"}]
    names = [*STYLES, "forward", "forward + backward"]
    keys = [Line2D([], [], label=name, markersize=4, **look) for name, look in zip(names, looks, strict=True)]
    place: Any = {"loc": "outside lower center", "ncols": len(keys), "handlelength": 4}
    figure.legend(handles=keys, **place, frameon=False, fontsize=8)


def roofline(rows: Sequence[Row]) -> Figure:
    """Attained operations a second against operations for each byte, forward."""
    figure = Figure(figsize=(9, 6), layout="constrained", facecolor="white")
    axes = figure.subplots()
    _roofs(axes)
    for sweep, contender, colour, marker, label, places in SERIES:
        found = of(rows, sweep, contender)
        if not found:
            continue
        points = [row.intensity for row in found], [row.attained / 1e12 for row in found]
        look: Any = {"markersize": 8, "markeredgewidth": 1.5} if contender == "conv2d" else {"markersize": 5}
        joined = "" if contender == "conv2d" else "-"
        axes.plot(*points, color=colour, marker=marker, linewidth=1, linestyle=joined, label=label, **look)
        name = "c" if sweep == "maps" else sweep
        for row, place in dict(zip((found[0], found[-1]), places, strict=False)).items():
            text = f"{name.upper() if name != 'r' else name} = {getattr(row, name)}"
            _name(axes, text, row.intensity, row.attained / 1e12, xytext=place, color=colour)
    for number, row in enumerate(of(rows, "c", "convnn")):
        roof, width = min(SCORES * 2 * row.c, MATRIX) / 1e12, 1.15
        ends = row.intensity / width, row.intensity * width
        (mark,) = axes.plot(ends, [roof, roof], color=PURPLE, linewidth=2, alpha=0.5)
        mark.set_label("" if number else "the roof of each C: choosing, or matrix units")
        # Above or below the lines that two of the roofs are part of.
        _name(axes, f"C = {row.c}", ends[1], roof, xytext=(3, {64: -9, 256: 3}.get(row.c, -3)), color=PURPLE)
    _log(axes, "operations for each byte of inputs, output and index, once", "TFLOP/s")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    return figure


def _roofs(axes: Any) -> None:
    ends, ridge, roof = (5.0, 2e4), MATRIX / MEMORY, SCORES * 2 * 64
    axes.plot([ends[0], ridge, ends[1]], [ends[0] * MEMORY / 1e12, MATRIX / 1e12, MATRIX / 1e12], color="black")
    axes.plot([roof / MEMORY, ends[1]], [roof / 1e12] * 2, color=BLUE, linestyle="--", linewidth=1)
    small: Any = {"fontsize": 8, "zorder": 5, "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.5}}
    axes.text(ends[0] * 1.6, ends[0] * 1.2 * MEMORY / 1e12, "memory, 4.8 TB/s", va="center", **small)
    axes.text(ends[1], MATRIX / 1e12 * 1.05, "matrix units, 989 TFLOP/s", ha="right", va="bottom", **small)
    text = f"choosing, {SCORES / 1e12:.1f}e12 scores/s, C = 64"
    axes.text(ends[1], roof / 1e12 * 1.05, text, ha="right", va="bottom", color=BLUE, **small)
    axes.set_xlim(ends)


def _name(axes: Any, text: str, x: float, y: float, **look: Any) -> None:
    axes.annotate(text, (x, y), textcoords="offset points", fontsize=7, **look)


def _log(axes: Any, x: str, y: str) -> None:
    axes.set(xscale="log", yscale="log", xlabel=x, ylabel=y)
    axes.grid(which="major", alpha=0.25, linewidth=0.6)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="+", metavar="FILE.csv")
    parser.add_argument("-o", "--output", type=Path, required=True, help="a folder, made if it is missing")
    given = parser.parse_args()
    try:
        rows = [row for path in given.tables for row in read(path)]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    given.output.mkdir(parents=True, exist_ok=True)
    for draw in (scaling, roofline):
        path = given.output / f"{draw.__name__}.svg"
        with mpl.rc_context(SETTINGS):
            FigureCanvasSVG(draw(rows)).print_svg(path, metadata={"Date": None, "Creator": None})
        print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A run or a sweep as one page: curves, the thesis beside it, neighbours, kernels, dial, configuration."""

from __future__ import annotations

import base64
import csv
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import convnn
from convnn import morph
from convnn_lab.explorer import charts, thesis
from convnn_lab.recipes import Recipe
from convnn_lab.train import dial, store
from convnn_lab.train import kernels as kept
from convnn_lab.train.measure import measure
from convnn_lab.train.run import Run

PICTURES = 3
"""of the data set, in which neighbours are shown"""


@dataclass(frozen=True)
class Told:
    """A run, read."""

    name: str
    run: Run
    recipe: Recipe
    rows: Sequence[Mapping[str, float]]
    summary: Mapping[str, Any]

    @classmethod
    def of(cls, folder: Path) -> Told:
        """Read a run's folder."""
        run = Run.open(folder)
        _, recipe = run.recipe()
        return cls(folder.resolve().name, run, recipe, run.rows(), run.summary() or {"status": "not finished"})


def report(folder: Path) -> str:
    """The report of a run's folder, or of a folder of runs."""
    if (folder / "config.json").exists():
        told = [Told.of(folder)]
    else:
        told = [Told.of(path.parent) for path in sorted(folder.glob("*/config.json"))]
    if not told:
        raise ValueError(f"{folder} holds neither a run nor runs: there is no config.json in it or below it")
    sections = [
        _numbers(told),
        _curves(told),
        *_table(folder),
        _beside_thesis(told),
        *_looks(told),
        _configuration(told),
    ]
    return _page(folder.resolve().name, [section for section in sections if section])


def _page(title: str, sections: Sequence[str]) -> str:
    folder = files("convnn_lab.explorer") / "static"
    style = "\n".join((folder / name).read_text(encoding="utf-8") for name in ("style.css", "report.css"))
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    head = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{html.escape(title)}</title>
<style>
{style}
</style>
</head>
<body class="report">
<header class="top"><div class="heading">
<h1>{html.escape(title)}</h1><p id="subtitle">convnn {convnn.__version__}</p>
</div></header>
<main>
"""
    return head + "\n".join(f"<section>{section}</section>" for section in sections) + "\n</main>\n</body>\n</html>\n"


def table(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table; everything in it is text."""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def picture(content: bytes, label: str) -> str:
    """A picture inside the page."""
    text = base64.b64encode(content).decode()
    return f'<img alt="{html.escape(label)}" src="data:image/png;base64,{text}">'


def _numbers(told: Sequence[Told]) -> str:
    rows = []
    for each in told:
        final, best, by = each.summary.get("final") or {}, each.summary.get("best") or {}, measure(each.recipe)
        judged = [
            "-" if value is None else by.said(value) for value in (part.get(f"val_{by.name}") for part in (final, best))
        ]
        numbers = [*judged, "-" if "val_loss" not in final else f"{final['val_loss']:.4f}"]
        parameters, seconds = each.summary.get("parameters"), each.summary.get("seconds")
        numbers += ["-" if parameters is None else f"{parameters:,}", "-" if seconds is None else f"{seconds:,.0f} s"]
        rows.append([each.name, each.summary["status"], len(each.rows), *numbers])
    judged_by = measure(told[0].recipe).title
    names = ["run", "status", "epochs", f"test {judged_by}", "best epoch", "test loss", "parameters", "time"]
    return f"<h2>Results</h2>{table(names, rows)}"


def _curves(told: Sequence[Told]) -> str:
    drawn, by = [], measure(told[0].recipe)
    title = by.title if by.scale == 1 else f"{by.title} in{by.unit}"
    for label, kind, scale in (("loss", "loss", 1.0), (title, by.name, by.scale)):
        lines: dict[str, list[tuple[float, float]]] = {}
        for each in told:
            for part, name in (("val", each.name), ("train", f"{each.name}, training")):
                found = [
                    (row["epoch"] + 1, scale * row[f"{part}_{kind}"]) for row in each.rows if f"{part}_{kind}" in row
                ]
                lines[name] = found
        training = frozenset(name for name in lines if name.endswith(", training"))
        drawn.append(f"<figure><figcaption>{label}</figcaption>{charts.chart(label, lines, training)}</figure>")
    return f'<h2>Curves</h2><div class="pair">{"".join(drawn)}</div>{charts.legend([each.name for each in told])}'


def _table(folder: Path) -> list[str]:
    path = folder / "table.csv"
    if not path.exists():
        return []
    rows = [list(map(_rounded, row)) for row in csv.reader(path.read_text().splitlines())]
    return [f"<h2>Table of the sweep</h2>{table(rows[0], rows[1:])}"] if len(rows) > 1 else []


def _rounded(cell: str) -> str:
    """Numbers with as many digits as one reads."""
    try:
        return cell if cell.isdigit() else f"{float(cell):.5g}"
    except ValueError:
        return cell


def _beside_thesis(told: Sequence[Told]) -> str:
    rows = []
    for each in told:
        ours = (each.summary.get("final") or {}).get("val_acc")
        for name, row in thesis.rows(each.recipe):
            logged = "-" if row.logged is None else f"{row.logged.accuracy:.2f}"
            mine = "-" if ours is None else f"{100 * ours:.2f}"
            rows.append([each.name, name, row.label, row.printed.accuracy or "-", logged, mine])
    if not rows:
        return "<h2>The thesis</h2><p>The thesis has no row for what was run here.</p>"
    names = ["run", "table", "row", "printed", "logged by its author", "here"]
    return f"<h2>The thesis</h2><p>Test accuracy in percent.</p>{table(names, rows)}"


def _looks(told: Sequence[Told]) -> list[str]:
    """What the layers look at, and their kernels; where something is missing, why."""
    from convnn_lab.explorer import figures, kernels, networks  # noqa: PLC0415 - only where there are weights

    sections = []
    for each in told:
        title = html.escape(each.name)
        try:
            network = networks.of_run(each.run.folder)
        except ValueError as error:
            sections.append(f"<h2>Neighbours of {title}</h2><p>Not shown: {html.escape(str(error))}.</p>")
            continue
        try:
            drawn = []
            for seen in networks.tested(each.run.folder, PICTURES):
                image, layers = network.look(seen)
                shown = figures.saved(figures.maps(image, layers, (0.5, 0.5), 0), dots=110)
                drawn.append(
                    f"<figure><figcaption>{html.escape(seen.name)}</figcaption>{picture(shown, 'neighbours')}</figure>"
                )
            sections.append(
                f"<h2>Neighbours of {title}</h2><p>Of the middle of some test pictures.</p>{''.join(drawn)}"
            )
        except (ValueError, OSError) as error:
            sections.append(f"<h2>Neighbours of {title}</h2><p>Not shown: {html.escape(str(error))}.</p>")
        sections.append(
            f"<h2>Kernels of {title}</h2>{picture(figures.saved(kernels.kernels(network.model), dots=110), 'kernels')}"
        )
        sections += _moved(each, title)
        shares = morph.dial(network.model)
        if shares:
            shown = figures.saved(dial.drawn(shares, each.run.rows()), dots=110)
            sections.append(f"<h2>The dial of {title}</h2>{picture(shown, 'the share of features of every layer')}")
    return sections


def _moved(each: Told, title: str) -> list[str]:
    """How far kernels moved by epoch, for a run that kept them."""
    from convnn_lab import kernels  # noqa: PLC0415 - likewise
    from convnn_lab.explorer import figures  # noqa: PLC0415

    if 0 not in kept.files(each.run):
        return []
    shown = figures.saved(kernels.drawn(kept.read(each.run)), dots=90)
    return [f"<h2>How far the kernels of {title} moved</h2>{picture(shown, 'distance of kernels by epoch')}"]


def _configuration(told: Sequence[Told]) -> str:
    fields = [each.recipe.as_dict() for each in told]
    rows = [[name, *("-" if each[name] is None else each[name] for each in fields)] for name in fields[0]]
    tables = table(["field", *(each.name for each in told)], rows)
    path = told[0].run.folder / "environment.json"
    started = store.read_json(path)[-1] if path.exists() else {}
    packages = ", ".join(f"{name} {version}" for name, version in started.get("packages", {}).items())
    on = ", ".join(started.get("gpus") or []) or f"{started.get('processors', '?')} processors"
    ran = f"<p>On {html.escape(on)}; {html.escape(packages)}.</p>" if started else ""
    opened = " open" if len(told) == 1 else ""
    return f"<h2>Configuration</h2>{ran}<details{opened}><summary>every field</summary>{tables}</details>"

"""The report of a run says what its files say, and nothing in them is more than text."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from convnn import ConvNNAttention, models
from convnn_lab import cli
from convnn_lab.explorer import charts, kernels, thesis
from convnn_lab.recipes import RECIPES
from convnn_lab.tables import TABLES


class Text(HTMLParser):
    """The tables and tags of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        self.inside = tag in ("td", "th")
        if self.inside:
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:  # noqa: ARG002
        self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.rows[-1][-1] += data


def read(path: Path) -> Text:
    text = Text()
    text.feed(path.read_text())
    return text


def test_a_run_is_reported(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    assert cli.main(["report", str(run), "-o", str(target)]) == 0
    told, summary = read(target), json.loads((run / "summary.json").read_text())
    assert not [tag for tag, _ in told.tags if tag in ("script", "b")]
    links = [value for _, given in told.tags for name, value in given.items() if name in ("src", "href")]
    assert links
    assert all(str(link).startswith("data:") for link in links)
    final = summary["final"]
    shown = next(row for row in told.rows if row[0] == run.name and row[1] == "finished")
    assert shown[2:7] == ["1", f"{100 * final['val_acc']:.2f} %", f"{100 * summary['best']['val_acc']:.2f} %",
                          f"{final['val_loss']:.4f}", f"{summary['parameters']:,}"]  # fmt: skip
    config = json.loads((run / "config.json").read_text())
    fields = {row[0]: row[1] for row in told.rows if len(row) == 2}
    assert fields["ratio"] == str(config["ratio"])
    assert fields["width"] == "8"
    # Three pictures, the kernels, and how far they moved.
    assert len([tag for tag, given in told.tags if tag == "img"]) == 5


def test_a_dial_is_reported(tmp_path: Path) -> None:
    folder, target = tmp_path / "dialled", tmp_path / "report.html"
    flags = ["--layer", "convnn", "--dial", "0.5", "--weighting", "softmax", "--epochs", "1", "--batch", "512"]
    flags += ["--width", "4", "--accelerator", "cpu"]
    assert cli.main(["train", "digits", *flags, "--output", str(folder)]) == 0
    assert cli.main(["report", str(folder), "-o", str(target)]) == 0
    assert "<h2>The dial of dialled</h2>" in target.read_text()
    labels = [given.get("alt") for tag, given in read(target).tags if tag == "img"]
    assert "the share of features of every layer" in labels
    assert "distance of kernels by epoch" in labels


def test_a_report_fits_a_phone_and_asks_nobody(run: Path, tmp_path: Path, browser: Any) -> None:
    target = tmp_path / "report.html"
    assert cli.main(["report", str(run), "-o", str(target)]) == 0
    page = browser.new_page(viewport={"width": 360, "height": 700}, color_scheme="dark")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(target.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate("Array.from(document.images).every((image) => image.naturalWidth > 0)")
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    page.close()


def test_runs_are_reported_together_and_what_is_missing_is_said(run: Path, tmp_path: Path) -> None:
    sweep, target = tmp_path / "sweep", tmp_path / "report.html"
    shutil.copytree(run, sweep / "layer=hybrid,seed=0")
    shutil.copytree(run, sweep / "layer=hybrid,seed=1", ignore=shutil.ignore_patterns("checkpoints", "summary.json"))
    (sweep / "table.csv").write_text("layer,val_acc\nhybrid,0.87654321\n")
    assert cli.main(["report", str(sweep), "-o", str(target)]) == 0
    told = read(target)
    assert ["hybrid", "0.87654"] in told.rows
    assert [row[:2] for row in told.rows[1:3]] == [
        ["layer=hybrid,seed=0", "finished"],
        ["layer=hybrid,seed=1", "not finished"],
    ]
    assert "has no weights yet" in target.read_text()
    assert target.read_text().count("<polyline") == 8


def test_a_run_of_a_text_is_judged_by_its_bits(run: Path, tmp_path: Path) -> None:
    text, target = tmp_path / "text", tmp_path / "report.html"
    shutil.copytree(run, text)
    config, summary = (json.loads((text / name).read_text()) for name in ("config.json", "summary.json"))
    (text / "config.json").write_text(json.dumps({**config, "dataset": "shakespeare"}))
    judged = {part: {"val_bits": 2.3456, "val_loss": 1.5} for part in ("final", "best")}
    (text / "summary.json").write_text(json.dumps({**summary, **judged}))
    (text / "metrics.csv").write_text("epoch,train_loss,train_bits,val_loss,val_bits\n0,1.7,2.5,1.5,2.3456\n")
    assert cli.main(["report", str(text), "-o", str(target)]) == 0
    told = read(target)
    assert told.rows[0][3] == "test bits per character"
    assert told.rows[1][3:6] == ["2.346 bits", "2.346 bits", "1.5000"]
    assert "has learned from a text and sees nothing in pictures" in target.read_text()
    assert target.read_text().count("<circle") == 4


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, message in ((tmp_path, "holds neither a run nor runs"), (tmp_path / "no", "there is no folder")):
        assert cli.main(["report", str(folder), "-o", str(tmp_path / "r.html")]) == cli.MISUSED
        assert message in capsys.readouterr().err


def test_a_recipe_finds_its_rows_of_the_thesis() -> None:
    vgg = RECIPES["vgg11-cifar10"]
    found = dict(thesis.rows(vgg))
    assert found["vary-lambda"].printed.accuracy == "81.26"
    assert found["vgg-patch"].label == "Branching, 0.5, patch 1"
    assert {row.label for _, row in thesis.rows(replace(vgg, layer="conv"))} >= {"Conv2D", "Conv2D, without positions"}
    assert dict(thesis.rows(replace(vgg, candidates="grid:64")))["vgg-candidates"].configuration["r"] == 64
    assert not list(thesis.rows(replace(vgg, lr=0.5)))
    assert not list(thesis.rows(RECIPES["digits"]))
    tiny = replace(RECIPES["vit-tiny-cifar100"], layer="kvt", candidates=None)
    assert dict(thesis.rows(tiny))["vit-cifar"].label == "KVT-Attention, k = 9"
    assert set(dict(thesis.rows(vgg))) <= set(TABLES)


def points(svg: str) -> list[list[tuple[float, float]]]:
    root = ElementTree.fromstring(svg)
    lines = root.findall("polyline")
    return [[tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()] for line in lines]  # type: ignore[misc]


@pytest.mark.parametrize("scale", [1e-6, 1.0, 3e7])
def test_a_chart_keeps_proportions_and_its_frame(scale: float) -> None:
    values = [0.31, 2.7, 1.2, 1.9]
    (drawn,) = points(charts.chart("a < b", {"one": [(x + 1, scale * y) for x, y in enumerate(values)]}))
    ups = [y for _, y in drawn]
    slopes = [(ups[n] - ups[0]) / (values[n] - values[0]) for n in (1, 2, 3)]
    assert slopes == pytest.approx([slopes[0]] * 3, rel=0.02)
    assert slopes[0] < 0
    assert all(charts.LEFT <= x <= charts.WIDTH and 0 <= y <= charts.HEIGHT for x, y in drawn)


def test_a_chart_of_one_epoch_of_none_or_of_what_is_no_number() -> None:
    assert "<circle" in charts.chart("loss", {"one": [(1, 2.0)]})
    assert charts.chart("loss", {"one": []}) == "<p>No epoch was measured.</p>"
    assert len(points(charts.chart("loss", {"one": [(1, 2.0), (2, float("nan")), (3, 1.0)]}))[0]) == 2
    assert "<i>" not in charts.legend(["<i>"]).replace('<i style="', "")


def test_kernels_are_measured_by_rank() -> None:
    model = nn.Sequential(models.create("resnet8", layer="hybrid", width=4), ConvNNAttention(6, 2, k=4))
    told = kernels.ranks(model)
    layer: Any = model[1]
    assert told["1.kernel"] == pytest.approx(layer.kernel.weight.abs().mean((0, 1)).tolist())
    first: Any = next(module for name, module in model.named_modules() if name == next(iter(told)))
    assert next(iter(told.values())) == pytest.approx(first.weight.flatten(2).abs().mean((0, 1)).tolist())
    tiles = kernels.tiled(torch.randn(5, 3, 2, 4))
    assert tiles.shape == (2 * 3, 3 * 5, 3)
    assert re.search("hybrid|convnn", next(iter(told)))

"""Numbers and figures of neighbours."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from PIL import Image

from convnn_lab import cli
from convnn_lab.explorer import measures
from convnn_lab.explorer.layer import Choices, Layer, found
from tests.explorer import samples

CHOICES = {
    "attention": Choices(k="all", similarity="scaled_dot", weighting="softmax"),
    "some": Choices(k=5, similarity="euclidean", weighting="softmax"),
    "alike": Choices(k=7, similarity="cosine", weighting="uniform"),
}


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("make", [samples.tokens, samples.padded, samples.strided])
def test_reach_is_what_a_loop_measures(make: Callable[[], Layer], name: str) -> None:
    layer = replace(make(), own=CHOICES[name])
    near, weights = found(layer, layer.own)
    where, picture = layer.map, (240, 90)
    height, width = 90 / where.inner[2], 240 / where.inner[3]
    told = measures.reach(layer, picture)
    for head in range(layer.heads):
        distance = on_map = total = small = large = 0.0
        for query in range(where.before, where.queries):
            row = where.rows[(query - where.before) // len(where.columns)]
            column = where.columns[(query - where.before) % len(where.columns)]
            for key, weight in zip(near.index[head, query].tolist(), weights[head, query].tolist(), strict=True):
                total += weight
                if key < where.before:
                    continue
                down = (key - where.before) // where.cells[1] - row
                across = (key - where.before) % where.cells[1] - column
                on_map += weight
                distance += weight * math.sqrt((down * height) ** 2 + (across * width) ** 2)
                small += weight * (abs(down) <= 1 and abs(across) <= 1)
                large += weight * (abs(down) <= 2 and abs(across) <= 2)
        expected = (distance / on_map, small / total, large / total)
        assert (told.distance[head], told.inside3[head], told.inside5[head]) == pytest.approx(expected, rel=1e-5)


def test_a_window_of_space_is_local() -> None:
    layer = replace(samples.padded(), own=Choices(share=0.0, k=9))
    told = measures.reach(layer, (60, 50))
    assert told.inside3 == (1.0,)
    assert told.distance[0] == pytest.approx(10 * (4 + 4 * 2**0.5) / 9)


def test_heads_overlap_by_the_weight_they_share() -> None:
    layer = samples.tokens()
    layer = replace(layer, own=Choices(k=6, weighting="uniform", similarity="dot"))
    near, _ = found(layer, layer.own)
    sets = [[set(row) for row in head] for head in near.index.tolist()]
    shared = sum(len(one & other) / 6 for one, other in zip(*sets, strict=True)) / len(sets[0])
    told = measures.overlap(layer)
    assert told.flatten().tolist() == pytest.approx([1.0, shared, shared, 1.0])
    same = replace(layer, key=layer.key[:1].expand(2, -1, -1), query=layer.query[:1].expand(2, -1, -1))  # type: ignore[index]
    assert measures.overlap(same).flatten().tolist() == pytest.approx([1.0] * 4)


def test_rollout_follows_every_path_to_the_class_token() -> None:
    layers = [replace(samples.tokens(), own=CHOICES["attention"]) for _ in range(2)]
    means = []
    for layer in layers:
        query, key = (part.double() for part in layer.compared())
        means.append((query @ key.mT / query.shape[-1] ** 0.5).softmax(-1).mean(0))
    tokens = range(len(means[0]))

    def mixed(layer: int, to: int, of: int) -> float:
        return 0.5 * float(means[layer][to, of]) + 0.5 * (to == of)

    expected = [sum(mixed(1, 0, middle) * mixed(0, middle, first) for middle in tokens) for first in tokens]
    told = measures.rollout(layers)
    assert told.shape == (4, 7)
    assert told.flatten().tolist() == pytest.approx(expected[1:], rel=1e-5)
    with pytest.raises(ValueError, match="where all layers have the same tokens"):
        measures.rollout([samples.padded()])


def test_the_dial_ends_at_a_convolution_and_at_attention() -> None:
    layer = replace(samples.padded(), own=Choices(similarity="scaled_dot"))
    square, _ = found(layer, measures.dial(layer, 0.0))
    assert sorted(square.index[0, 0].tolist()) == [0, 1, 2, 8, 9, 10, 16, 17, 18]
    near, weights = found(layer, measures.dial(layer, 1.0, temperature=2.0))
    query, key = layer.compared()
    expected = (query @ key.mT / 5**0.5 / 2).softmax(-1)
    whole = torch.zeros_like(expected).scatter(-1, near.index, weights)
    torch.testing.assert_close(whole, expected)
    assert [measures.dial(layer, turn).k for turn in (0.25, 0.5, 0.75)] == [14, 22, 35]


@pytest.mark.parametrize("mask", ["none", "causal", "window", "bigbird", "own"])
def test_one_row_is_searched_as_all_are(mask: str) -> None:
    layer = samples.tokens()
    for share, self_ in ((0.4, "first"), (1.0, "one"), (1.0, "any")):
        choices = Choices(k=4, mask=mask, share=share, self=self_, weighting="softmax")  # type: ignore[arg-type]
        near, weights = found(layer, choices)
        for query in (1, 17):
            row, weighed = found(layer, choices, only=query)
            assert torch.equal(row.index[:, 0], near.index[:, query])
            torch.testing.assert_close(weighed[:, 0], weights[:, query])


def test_figures_and_numbers_are_written(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, folder = tmp_path / "a $x_1$ <b>.png", tmp_path / "figures"
    samples.image(40, 30).save(picture)
    flags = ["--run", str(run), "--samples", "3", "--dial", "0", "0.5", "1", "--format", "svg", "-o", str(folder)]
    assert cli.main(["neighbors", str(picture), *flags]) == 0
    written = {Path(line).name for line in capsys.readouterr().out.splitlines()}
    assert written == {"maps.svg", "dial.svg", "distance.svg", "locality.svg", "neighbors.csv"}
    for name in written - {"neighbors.csv"}:
        ElementTree.parse(folder / name)
    rows = list(csv.DictReader((folder / "neighbors.csv").read_text().splitlines()))
    assert {row["pictures"] for row in rows} == {"4"}
    assert len({row["layer"] for row in rows}) == len(rows) > 3
    assert all(0 <= float(row["inside_3x3"]) <= float(row["inside_5x5"]) <= 1 for row in rows)


def test_tokens_have_a_rollout_and_heads_an_overlap(tmp_path: Path) -> None:
    picture, folder = tmp_path / "a.png", tmp_path / "figures"
    samples.image(40, 40).save(picture)
    flags = [
        "--model",
        "vit_tiny",
        "--size",
        "32",
        "--layers",
        "blocks.0",
        "blocks.5",
        "--head",
        "-1",
        "-o",
        str(folder),
    ]
    assert cli.main(["neighbors", str(picture), str(picture), *flags]) == 0
    names = {
        "maps-1.png",
        "maps-2.png",
        "rollout-1.png",
        "rollout-2.png",
        "distance.png",
        "locality.png",
        "overlap.png",
    }
    assert {path.name for path in folder.iterdir()} == names | {"neighbors.csv"}
    with Image.open(folder / "maps-1.png") as drawn:
        assert drawn.width > 500


def test_what_cannot_be_drawn_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "a.png"
    samples.image().save(picture)
    for arguments, message in (
        ([], "name at least one picture"),
        ([str(picture), "--at", "2", "0"], "--at and --dial must be from 0 to 1"),
        ([str(picture), "--temperature", "0"], "--temperature must be greater than 0"),
        ([str(picture), "--samples", "3"], "--samples takes pictures of the data set of a --run"),
        ([str(picture), "-o", str(picture)], "--output must name a folder"),
        ([str(picture), "--layers", "zebra"], "no layer is called zebra"),
    ):
        assert (
            cli.main(["neighbors", *arguments, *([] if "-o" in arguments else ["-o", str(tmp_path / "f")])])
            == cli.MISUSED
        )
        assert message in capsys.readouterr().err

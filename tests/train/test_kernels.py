"""What is kept of kernels while a run learns, and what is told of it."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from convnn import ConvNN2d, ConvNNAttention
from convnn_lab import cli
from convnn_lab.recipes import RECIPES, Recipe
from convnn_lab.train import callbacks, fit
from convnn_lab.train.build import build
from convnn_lab.train.kernels import Moved, files, read, reduced
from convnn_lab.train.run import Run


class DeathError(BaseException):
    """The end of a process that nothing can answer."""


def recipe(epochs: int = 2) -> Recipe:
    return replace(RECIPES["digits"], epochs=epochs, batch=512, width=4, accelerator="cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return fit.train("digits", recipe(), tmp_path_factory.mktemp("run") / "run", quiet=True)


def test_what_is_kept_of_a_kernel() -> None:
    model = nn.ModuleDict(
        {
            "depthwise": ConvNNAttention(12, 3, k=4),
            "by head": ConvNNAttention(12, 3, k=2, shared_kernel=False),
            "standard": ConvNNAttention(12, 3, k=5, kernel="standard"),
            "map": ConvNN2d(3, 6, (2, 3)),
            "grouped": ConvNN2d(3, 6, 3, groups=3, k=4, similarity="cosine"),
            "none": ConvNNAttention(12, 3, k=4, kernel=None),
        }
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    weights = model.state_dict()
    kept, kinds = reduced(model, weights)
    assert list(kinds) == ["depthwise", "by head", "standard", "map", "grouped"]
    assert list(kinds.values()) == ["by channel", "by channel", "mixing", "mixing", "by channel"]
    assert torch.equal(kept["depthwise"], weights["depthwise.kernel.weight"][:, 0])
    assert torch.equal(kept["by head"][4:8], weights["by head.kernel.weight"][1, :, 0])
    assert torch.equal(kept["grouped"], weights["grouped.weight"][:, 0])
    for channel, rank in ((0, 0), (5, 4)):
        inputs = weights["map.weight"][channel].flatten(1)[:, rank].double()
        torch.testing.assert_close(kept["map"][channel, rank].double(), (inputs @ inputs / 3).sqrt(), rtol=1e-5, atol=0)
    assert kept["standard"].shape == (4, 5)


def test_a_run_keeps_its_start_and_every_epoch(trained: Run) -> None:
    assert list(files(trained)) == [0, 1, 2]
    moved = read(trained)
    torch.manual_seed(recipe().seed)  # which makes the same model again
    start = build(recipe(), 1, 8, 10)
    last = load_file(trained.checkpoints / "last" / "weights.safetensors")
    first, final = reduced(start, start.state_dict())[0], reduced(start, last)[0]
    assert [each.layer for each in moved] == list(first)
    for each in moved:
        assert torch.equal(each.values[0], first[each.layer])
        assert torch.equal(each.values[-1], final[each.layer])
        assert each.from_one() is None
        assert not each.from_start()[0].any()
        assert (each.from_start()[-1] > 0).all()


def test_a_run_that_died_keeps_the_same_kernels(trained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = replace(recipe(), save_steps=1)
    whole = callbacks.Keeper.save
    count = iter(range(100))

    def save(self: Any, *arguments: Any) -> None:
        whole(self, *arguments)
        if next(count) == 4:  # in the second epoch
            raise DeathError

    with monkeypatch.context() as patched:
        patched.setattr(callbacks.Keeper, "save", save)
        with pytest.raises(DeathError):
            fit.train("digits", given, tmp_path / "run", quiet=True)
    run = Run.open(tmp_path / "run")
    (run.folder / "kernels" / "0009.safetensors").write_bytes(b"left by a run that went further")
    fit.resume(run.folder, quiet=True)
    assert list(files(run)) == [0, 1, 2]
    for ours, theirs in zip(read(run), read(trained), strict=True):
        assert torch.equal(ours.values, theirs.values)


def test_kernels_are_told_and_drawn(trained: Run, tmp_path: Path, capsys: Any) -> None:
    table, figure = tmp_path / "k.csv", tmp_path / "k.png"
    layer = read(trained)[1].layer
    command = ["kernels", str(trained.folder), "--csv", str(table), "--output", str(figure), "--layer", layer]
    assert cli.main(command) == 0
    said = capsys.readouterr().out
    assert "distance from the start" in said
    assert figure.read_bytes().startswith(b"\x89PNG")
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    moved = {each.layer: each for each in read(trained)}
    assert len(rows) == sum(each.values.shape[0] * each.values.shape[2] for each in moved.values())
    for row in rows:
        each, place, rank = moved[row["layer"]], int(row["epochs"]), int(row["rank"]) - 1
        values = each.values[place, :, rank].double()
        assert float(row["mean"]) == pytest.approx(float(values.sum() / len(values)))
        distance = (values - each.values[0, :, rank]).square().sum() / len(values)
        assert float(row["from_start"]) == pytest.approx(float(distance) ** 0.5)
        assert row["from_one"] == ""
        assert f"{float(row['mean']):.3f} {float(row['deviation']):.3f}" in said or place < 2
    assert cli.main(["kernels", str(trained.folder)]) == 0
    assert (trained.folder / "kernels.png").exists()


def test_distance_from_one_is_told_where_kernels_start_there() -> None:
    values = torch.ones(3, 4, 2)
    values[1] += torch.tensor([0.5, -0.5])
    values[2, 0, 0] = 3
    told = Moved("a", "by channel", (0, 1, 2), values).from_one()
    assert told is not None
    assert told.tolist() == [[0, 0], [0.5, 0.5], [1, 0]]


def test_what_kept_no_kernels_is_told(trained: Run, quick: Recipe, tmp_path: Path, capsys: Any) -> None:
    plain = fit.train("digits", replace(quick, epochs=1), tmp_path / "plain", quiet=True)
    assert not files(plain)
    for arguments, said in (
        ([str(plain.folder)], "kept no kernels"),
        ([str(tmp_path)], "holds no run"),
        ([str(trained.folder), "--layer", "nobody"], "--layer must be one of"),
    ):
        assert cli.main(["kernels", *arguments]) == cli.MISUSED
        assert said in capsys.readouterr().err

"""Runs that move along the spectrum: what recipes say of it, resuming anywhere, tests and dials afterwards."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from convnn import ConvNNAttention, models, morph
from convnn.blend import Blend
from convnn.selection import hard, soft, straight_through
from convnn_lab import cli
from convnn_lab.recipes import RECIPES, Recipe, schedules
from convnn_lab.train import build, dial, evaluate, fit, tuning
from convnn_lab.train.morphing import Morph, schedule
from convnn_lab.train.run import Run
from tests.train.test_runs import assert_same, dead

PLACES = ("1.0.conv1", "1.0.conv2", "2.0.conv2", "3.0.conv2")


def told(kind: Any, said: str, epochs: int, times: list[float]) -> list[Any]:
    at = schedule(schedules.read("--morph", kind, said, epochs))
    return [at(time) for time in times]


def test_words_of_a_recipe_become_schedules() -> None:
    assert told("k", "all,25,9", 6, [0, 1.9, 2, 3.9, 4, 6]) == ["all", "all", 25, 25, 9, 9]
    assert told("k", "50,25@1,9@2.5", 6, [0, 1, 2.4, 2.5]) == [50, 25, 25, 9]
    assert told("share", "0..1", 4, [0, 1, 4]) == [0.0, 0.25, 1.0]
    assert told("share", "0.2..0.8@2", 4, [0, 1, 2, 4]) == pytest.approx([0.2, 0.5, 0.8, 0.8])
    assert told("temperature", "1..0.01", 4, [0, 2, 4]) == pytest.approx([1.0, 0.1, 0.01])
    assert told("selection", "1,0.1@2,0@3", 4, [0, 2, 3]) == [1.0, 0.1, 0.0]


@pytest.mark.parametrize(
    ("field", "said", "reason"),
    [
        ("morph_k", "50..9", "k goes from one whole number to the next"),
        ("morph_k", "9,0", "k must be at least 1"),
        ("morph_k", "9.5", ""),
        ("morph_k", "some", ""),
        ("morph_k", "", ""),
        ("morph_k", "9@1,5@2", "stages must begin at 0"),
        ("morph_k", "9,5@2,3@1", "one after the other"),
        ("morph_k", "9,5@20", "within the 20 epochs"),
        ("morph_share", "0..2", "a share is from 0 to 1"),
        ("morph_share", "0..1@21", "within the 20 epochs"),
        ("morph_share", "0..0.5..1", ""),
        ("morph_temperature", "1..0", "greater than 0"),
        ("morph_selection", "1..0", "may end hard, at a stage of 0"),
        ("morph_selection", "1,-1", "greater than 0"),
    ],
)
def test_words_that_are_no_schedule_are_refused(field: str, said: str, reason: str) -> None:
    flag = f"--{field.replace('_', '-')}"
    given: Any = {field: said}
    with pytest.raises(ValueError, match=rf"{flag} must be .* such as .*{reason}"):
        Recipe(**given)


def test_blend_and_dial_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="--blend is a fixed share and --dial a learned one"):
        Recipe(blend=0.1, dial=0.1)
    with pytest.raises(ValueError, match="--dial must be from 0 to 1, got 2"):
        Recipe(dial=2)


def test_words_for_selections_and_dials() -> None:
    assert build.selection("hard") is hard
    assert build.selection("soft:0.25") == soft(0.25)
    assert build.selection("straight_through:2") == straight_through(2.0)
    for wrong in ("soft", "soft:-1", "gentle:1", "straight_through:0"):
        with pytest.raises(ValueError, match=f"--selection must be hard, soft:T or straight_through:T, got '{wrong}'"):
            build.selection(wrong)
    recipe = replace(RECIPES["digits"], layer="convnn", dial=0.3, selection="straight_through:0.5")
    made = build.build(recipe, 1, 8, 10)
    assert morph.dial(made) == {f"layer{place}": [pytest.approx(0.3)] for place in PLACES}
    vit = build.build(Recipe(model="vit_tiny", layer="convnn", dial=0.5), 3, 32, 10, device="meta")
    assert [layer.blend.raw.shape for _, layer in morph.layers(vit)] == [(3, 1, 1)] * 12
    text = build.build(Recipe(model="gpt_tiny", layer="convnn", dial=0.5), 0, 64, 65, device="meta")
    assert [layer.blend.raw.shape for _, layer in morph.layers(text)] == [(4, 1, 1)] * 4
    with pytest.raises(ValueError, match="--dial was not varied in the published models"):
        build.build(replace(RECIPES["vgg11-cifar10"], dial=0.5), 3, 32, 10, device="meta")
    assert {"blend", "dial", "selection"} <= build.irrelevant(Recipe(layer="conv"))


def test_what_learns_is_each_layers_own() -> None:
    made = models.create("resnet8", layer="convnn", weighting="softmax", blend=Blend(0.5, learned=True), num_classes=10)
    raws = [layer.blend.raw for _, layer in morph.layers(made)]
    assert len({id(raw) for raw in raws}) == len(raws) == 4


@pytest.fixture(scope="module")
def moving() -> Recipe:
    """Everything that moves at every step, and averages that must move along."""
    return replace(
        RECIPES["digits"], epochs=2, batch=512, layer="convnn", width=4, stem="half", weighting="softmax", blend=0.0,
        selection="soft:1", morph_share="0..1", morph_temperature="1..0.2", morph_selection="1,0@1", save_steps=1,
        ema=0.5, accelerator="cpu",
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(moving: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return fit.train("digits", moving, tmp_path_factory.mktemp("runs") / "whole", quiet=True)


@pytest.mark.parametrize("saves", [2, 4])
def test_a_moving_run_that_died_ends_as_one_that_did_not(
    moving: Recipe, whole: Run, tmp_path: Path, saves: int
) -> None:
    run = dead(moving, tmp_path / "run", saves)
    assert_same(fit.resume(run.folder, quiet=True), whole, "last/average.safetensors")


def test_a_run_is_tested_as_it_was_when_its_weights_were_saved(whole: Run) -> None:
    final = whole.rows()[-1]
    assert evaluate.evaluate(whole.folder)["loss"] == pytest.approx(final["val_loss"], rel=1e-5)
    assert evaluate.evaluate(whole.folder, "average")["loss"] == pytest.approx(final["ema_val_loss"], rel=1e-5)
    best = max(whole.rows(), key=lambda row: row["val_acc"])
    assert evaluate.evaluate(whole.folder, "best")["loss"] == pytest.approx(best["val_loss"], rel=1e-5)
    assert dial.read(whole.folder) == {f"layer{place}": [pytest.approx(1.0)] for place in PLACES}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"layer": "conv", "morph_k": "5"}, "there is none in this model"),
        ({"layer": "convnn", "morph_k": "9,12@1"}, "at most the number of taps of the layer's kernel, 9, got 12"),
        ({"layer": "convnn", "morph_share": "0..1"}, "a share needs a layer built with a blend"),
        ({"layer": "convnn", "morph_k": "9,5", "morph_layers": "b*"}, r"has a name like 'b\*'; there are layer1"),
    ],
)  # fmt: skip
def test_what_a_model_cannot_do_is_refused_before_the_first_step(
    quick: Recipe, tmp_path: Path, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        fit.train("digits", replace(quick, **given), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


class Learner(pl.LightningModule):
    """Anybody's own module with a converted layer in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = ConvNNAttention(4, 2, k=6), list[Any]()

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:  # noqa: ARG002
        self.seen.append(self.layer.k)
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> None:  # noqa: ARG002
        self.layer(batch[0])
        self.seen.append(("tested", self.layer.k))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore")
def test_the_callback_goes_with_any_lightning_module() -> None:
    loader: Any = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(4, 7, 4)), 2)
    learner = Learner()
    quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        max_epochs=3, accelerator="cpu", enable_model_summary=False, num_sanity_val_steps=0, limit_val_batches=1,
        callbacks=[Morph({"k": morph.stages({0: 6, 0.5: 4, 2: 2})}, "layer")], **quiet,
    )  # fmt: skip
    trainer.fit(learner, loader, loader)
    assert learner.seen == [6, 4, ("tested", 4), 4, 4, ("tested", 4), 2, 2, ("tested", 2)]


def test_a_dial_is_shown_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str], quick: Recipe) -> None:
    given = replace(quick, layer="convnn", width=4, stem="half", dial=0.5, weighting="softmax", epochs=1, lr=0.05)
    run = fit.train("digits", given, tmp_path / "run", quiet=True)
    (row,) = run.rows()
    name = str(tmp_path / "shares.json")
    assert cli.main(["dial", str(run.folder), "--json", name]) == 0
    said = capsys.readouterr().out
    shares = json.loads(Path(name).read_text())
    assert list(shares) == [f"layer{place}" for place in PLACES]
    for layer, (share,) in shares.items():
        assert share != 0.5
        assert row[f"share:{layer}:0"] == pytest.approx(share)
        assert f"{share:.3f}" in said
    assert (run.folder / "dial.png").read_bytes()[:4] == b"\x89PNG"
    plain = fit.train("digits", replace(quick, width=4, epochs=1), tmp_path / "plain", quiet=True)
    assert cli.main(["dial", str(plain.folder)]) == 2
    assert "no layer of" in capsys.readouterr().err
    assert cli.main(["dial", str(run.folder), "--plot", str(tmp_path / "no" / "where.png")]) == 2


def test_a_model_is_tuned_while_it_moves(tmp_path: Path) -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.head = ConvNNAttention(4, 2, k=6), nn.Linear(4, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.attn(tokens).mean(-2))

    labels = torch.arange(60) % 3
    tokens = torch.randn(60, 7, 4) + 3 * nn.functional.one_hot(labels, 4)[:, None]
    model = Pooled()
    data = (tokens, labels)
    schedules: Any = {"k": morph.stages({0: 6, 1.5: 3})}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options: Any = {"epochs": 3, "batch": 10, "prepare": lambda x: x, "schedules": schedules, "optimizer": optimizer}
    looks = tuning.tell("three classes", tuning.tune(model, data, data, **options))
    assert [look.epoch for look in looks] == [0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    assert [look.said["k"] for look in looks] == [6, 6, 6, 3, 3, 3]
    assert looks[-1].accuracy > looks[0].accuracy
    assert tuning.accuracy(model, tokens, labels, lambda x: x, 7) == looks[-1].accuracy
    assert optimizer.param_groups[0]["lr"] < 1e-3
    tuning.write(tmp_path / "looks.csv", {"run": looks})
    assert (tmp_path / "looks.csv").read_text().splitlines()[1].startswith("run,0.5000,k=6,")
    tuning.draw(tmp_path / "looks.svg", {"run": looks}, level=0.5, said="start")
    assert b"<svg" in (tmp_path / "looks.svg").read_bytes()

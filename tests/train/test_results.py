"""What runs are worth: evaluation, prediction, sweeps, tables and figures; sources and sums."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from convnn_lab import cli, commands
from convnn_lab.data import load as load_data
from convnn_lab.recipes import RECIPES, Recipe
from convnn_lab.train import build, checkpoints, evaluate, fit, source
from convnn_lab.train.run import Run
from convnn_lab.train.tally import Tally


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    given = replace(RECIPES["digits"], epochs=4, batch=64, layer="conv", accelerator="cpu", ema=0.9)
    return fit.train("digits", given, tmp_path_factory.mktemp("runs") / "run", quiet=True)


def test_evaluation_is_over_samples_and_equals_the_last_epoch(
    trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "eval.json"
    assert cli.main(["eval", str(trained.folder), "--json", str(target)]) == 0
    last = trained.rows()[-1]
    told = evaluate.evaluate(trained.folder)
    assert (told["top1"], told["top5"], told["samples"]) == (last["val_acc"], last["val_top5"], 360)
    assert told["loss"] == pytest.approx(last["val_loss"], rel=1e-6)
    assert f"top-1 {100 * last['val_acc']:.2f} %" in capsys.readouterr().out
    assert '"samples": 360' in target.read_text()
    best: Any = trained.summary()
    assert evaluate.evaluate(trained.folder, "best")["top1"] == best["best"]["val_acc"]
    assert evaluate.evaluate(trained.folder, "average")["top1"] == last["ema_val_acc"]


def test_evaluation_by_hand(trained: Run) -> None:
    _, recipe = trained.recipe()
    data = load_data("digits")
    model = build.build(recipe, 1, 8, 10)
    checkpoints.load_weights(model, trained.checkpoints / "last")
    images = (data.test.images / 255 - data.mean[0]) / data.std[0]
    with torch.no_grad():
        logits = model.eval()(images)
    told = evaluate.evaluate(trained.folder)
    assert told["loss"] == pytest.approx(float(F.cross_entropy(logits, data.test.labels)), rel=1e-5)
    assert told["top1"] == float((logits.argmax(-1) == data.test.labels).double().mean())


def test_predictions_name_the_classes_of_pictures(
    trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = load_data("digits")
    paths = []
    for number in range(6):
        image = Image.fromarray(data.test.images[number, 0].numpy()).resize((8, 8))
        paths.append(tmp_path / f"{number}.png")
        image.save(paths[-1])
    assert cli.main(["predict", str(trained.folder), *map(str, paths), "--top", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    right = sum(line.split(": ")[1].split()[0] == str(int(data.test.labels[i])) for i, line in enumerate(lines))
    assert right >= 5
    large = tmp_path / "large.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 60, 3), np.uint8)).save(large)
    (seen,) = evaluate.predict(trained.folder, [large], top=20)
    assert sum(share for _, share in seen) == pytest.approx(1)
    for arguments, message in (
        ([str(tmp_path / "no.png")], "there is no picture"),
        ([], "name at least one picture"),
        ([str(trained.folder / "config.json")], "cannot be read as an image"),
    ):
        assert cli.main(["predict", str(trained.folder), *arguments]) == cli.MISUSED
        assert message in capsys.readouterr().err


def test_a_sweep_runs_what_is_missing_and_makes_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["sweep", "digits", "--epochs", "1", "--batch", "512", "--layer", "conv", "--accelerator", "cpu"]
    given += ["--output", str(tmp_path / "sweep")]
    assert cli.main([*given, "--lr", "0.001", "0.01", "--seed", "0", "1"]) == 0
    printed = capsys.readouterr().out
    assert "[4/4] lr=0.01,seed=1" in printed
    with (tmp_path / "sweep" / "table.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["lr"] for row in table] == ["0.001", "0.01"]
    assert {row["seeds"] for row in table} == {"2"}
    finals = [Run(tmp_path / "sweep" / f"lr=0.01,seed={seed}").rows()[-1]["val_acc"] for seed in (0, 1)]
    assert float(table[1]["val_acc"]) == pytest.approx(sum(finals) / 2)
    assert float(table[1]["val_acc_std"]) == pytest.approx(abs(finals[0] - finals[1]) / 2**0.5)
    assert (tmp_path / "sweep" / "curves.png").exists()
    seconds = Run(tmp_path / "sweep" / "lr=0.01,seed=1").rows()
    assert cli.main([*given, "--lr", "0.001", "0.01", "--seed", "0", "1", "2"]) == 0
    assert capsys.readouterr().out.count("epoch 1/1") == 2  # the third seed alone
    assert Run(tmp_path / "sweep" / "lr=0.01,seed=1").rows() == seconds
    assert cli.main([*given, "--lr", "0.001", "0.01", "--seed", "0", "1", "--clip", "2"]) == cli.MISUSED
    assert "holds a run of another recipe; choose another --output" in capsys.readouterr().err


def test_layers_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["compare", "digits", "--epochs", "1", "--batch", "512", "--accelerator", "cpu"]
    assert cli.main([*given, "--max-time", "0.000001", "--output", str(tmp_path / "none")]) == 0
    assert "4 runs are left" in capsys.readouterr().out
    assert cli.main([*given, "--layers", "conv,attention", "--output", str(tmp_path / "two")]) == 0
    printed = capsys.readouterr().out
    for word in ("conv", "attention", "77,754", "49,594", "MFLOPs"):
        assert word in printed
    assert cli.main([*given, "--layers", "conv,cnov", "--output", str(tmp_path / "three")]) == cli.MISUSED
    assert "unknown layer 'cnov'" in capsys.readouterr().err
    assert not (tmp_path / "three").exists()


def test_runs_that_would_be_the_same_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (
            ["sweep", "digits", "--layer", "conv", "--ratio", "0", ".5"],
            "--ratio means nothing to resnet8 with layer conv",
        ),
        (["sweep", "digits", "--lr", "1e-3", "0.001"], "lr=1e-3 and lr=0.001 are the same run"),
        (["compare", "digits", "--layer", "conv"], "layers are compared by --layers A,B,...; leave out --layer"),
        (["compare", "digits", "--layers", "conv"], "--layers must name several layers, each once, got conv"),
        (["train", "digits", "--min-lr", "1", "--schedule", "constant"], "--min-lr is where a cosine ends"),
        (["train", "digits", "--data-dir", "x"], "digits bring their own files"),
        (["train", "digits", "--optimizer", "foo"], "foo"),
        (["train", "digits", "--layer", "convnn", "--k", "1000", "--accelerator", "cpu"], "k must be"),
    ):
        assert cli.main([*arguments, "--output", str(tmp_path / "none")]) == cli.MISUSED, arguments
        assert message in capsys.readouterr().err
        assert not (tmp_path / "none").exists()
    given = commands.read("resnet50-imagenet", RECIPES["resnet50-imagenet"], ["--accumulate", "2"])
    assert given.shares(4) == (160, 2)


@pytest.mark.parametrize("turns", [2, 3])
def test_turns_do_not_change_what_a_step_learns(turns: int, tmp_path: Path) -> None:
    """1,437 images make one batch of 960 and one of 477, which is no multiple of a turn."""
    given = Recipe(dataset="digits", model="vit_tiny", layer="attention", image_size=16, patch=8, epochs=1, batch=960)
    given = replace(given, optimizer="sgd", lr=0.05, clip=None, accelerator="cpu")
    once = fit.train("digits", given, tmp_path / "once", quiet=True).rows()[0]
    parts = fit.train("digits", replace(given, accumulate=turns), tmp_path / "parts", quiet=True).rows()[0]
    assert once["val_loss"] == pytest.approx(parts["val_loss"], rel=1e-4)


def test_flags_with_several_values_are_varied() -> None:
    fixed, axes = commands.grid(["--ratio", "0", ".25", "--compile", "--k", "9", "--weight-decay", "0", "1e-2"])
    assert fixed == ["--compile", "--k", "9"]
    assert axes == {"ratio": ["0", ".25"], "weight_decay": ["0", "1e-2"]}
    read = commands.read("digits", RECIPES["digits"], ["--ema", "--candidates", "random:32", "--data-dir", "x"])
    assert (read.ema, read.candidates, read.data_dir) == (0.999, "random:32", Path("x"))


def test_several_processes_share_every_batch_and_every_test() -> None:
    given = Recipe(dataset="digits", seed=3)
    held: Any = source.load(given)
    held.held.train.labels[:] = torch.arange(1437)
    held.held.test.labels[:] = torch.arange(360)
    (whole,) = ([labels for _, labels in held.train(5, 0, source.Share(60))],)
    parts = [[labels for _, labels in held.train(5, 0, source.Share(20, rank, 3))] for rank in range(3)]
    assert [len(each) for each in parts] == [24] * 3 == [held.length(source.Share(20, 0, 3))] * 3
    for number, together in enumerate(whole):
        seen = torch.cat([part[number] for part in parts])
        assert seen.sort().values.tolist() == together.sort().values.tolist()
        assert held.together(number, source.Share(20, 0, 3)) == len(together)
    tail = [labels.tolist() for _, labels in held.train(5, 7, source.Share(60))]
    assert tail == [labels.tolist() for labels in whole[7:]]
    assert not torch.equal(whole[0], next(iter(held.train(6, 0, source.Share(60))))[1])
    tested = [torch.cat([labels for _, labels in held.test(source.Share(7, rank, 11))]) for rank in range(11)]
    assert torch.cat(tested).sort().values.tolist() == list(range(360))


def test_images_are_prepared_where_they_are() -> None:
    held: Any = source.load(Recipe(dataset="digits", image_size=20))
    prepare = source.Prepare(held.mean, held.std, held.size)
    images = held.held.train.images[:5]
    numbers = (images.double() / 255 - held.mean[0]) / held.std[0]
    expected = F.interpolate(numbers, (20, 20), mode="bilinear")
    torch.testing.assert_close(prepare(images).double(), expected, atol=1e-5, rtol=1e-5)


def test_sums_weigh_samples_and_not_batches() -> None:
    torch.manual_seed(0)
    logits, labels, tally = torch.randn(70, 9), torch.randint(0, 9, (70,)), Tally()
    for part in (slice(0, 64), slice(64, 70)):
        tally.update(logits[part], labels[part])
    told = tally.compute()
    assert told["loss"] == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-6)
    assert told["acc"] == float((logits.argmax(-1) == labels).double().mean())
    assert told["top5"] == float((logits.topk(5).indices == labels[:, None]).any(-1).double().mean())
    soft = Tally()
    soft.update(logits, F.one_hot(labels, 9).float() * 0.7 + 0.1, loss=torch.tensor(3.0))
    assert soft.compute() == pytest.approx({**told, "loss": 3.0, "bits": 3.0 * math.log2(math.e)})


@pytest.mark.parametrize("layer", ["hybrid", "convnn"])
def test_activations_computed_again_change_nothing(layer: str, tmp_path: Path) -> None:
    given = replace(RECIPES["digits"], epochs=2, batch=512, layer=layer, k=4, accelerator="cpu")
    plain = fit.train("digits", given, tmp_path / "plain", quiet=True)
    again = fit.train("digits", replace(given, checkpoint_activations=True), tmp_path / "again", quiet=True)
    mine, theirs = again.rows()[-1], plain.rows()[-1]
    assert mine["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-5)
    assert mine["val_loss"] == pytest.approx(theirs["val_loss"], rel=1e-5)  # running statistics too


def test_half_precision_and_loggers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = replace(RECIPES["digits"], epochs=1, batch=512, layer="conv", accelerator="cpu")
    half = fit.train("digits", replace(given, precision="half"), tmp_path / "half", quiet=True)
    full = fit.train("digits", given, tmp_path / "full", quiet=True)
    assert half.rows()[0]["train_loss"] != full.rows()[0]["train_loss"]
    assert half.rows()[0]["train_loss"] == pytest.approx(full.rows()[0]["train_loss"], rel=0.02)
    assert cli.main(["train", "digits", "--wandb", "none", "--output", str(tmp_path / "logged")]) == cli.MISUSED
    assert "needs a package that is not installed" in capsys.readouterr().err

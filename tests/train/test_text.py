"""Texts: what is read, which windows an epoch sees, and runs that are judged by bits per character."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from convnn_lab import cli
from convnn_lab.data.text import decoded, encoded, read, shakespeare
from convnn_lab.recipes import RECIPES, Recipe, named
from convnn_lab.train import evaluate, fit
from convnn_lab.train.build import build, irrelevant
from convnn_lab.train.measure import ACCURACY, BITS, measure
from convnn_lab.train.run import Run
from convnn_lab.train.source import Share, load
from convnn_lab.train.tally import Tally
from tests.train.test_runs import assert_same, dead

# Nothing in it can be known before it was seen twice, and then everything.
SAID = "".join(f"{a}{b}, " for a in "abcdefgh" for b in "klmnopqrst") * 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("text")
    (place / "input.txt").write_text(SAID)
    return place


@pytest.fixture(scope="module")
def quick(folder: Path) -> Recipe:
    given = replace(RECIPES["shakespeare-tiny"], data_dir=folder, context=32, epochs=2, batch=16, warmup=0.5, lr=3e-3)
    return replace(given, accelerator="cpu", k=4, dropout=0.1)


@pytest.fixture(scope="module")
def whole(quick: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Run:
    given = replace(quick, save_steps=1)
    return fit.train("digits", given, tmp_path_factory.mktemp("runs") / "whole", quiet=True)


def test_a_text_is_its_characters(folder: Path) -> None:
    text = shakespeare(folder)
    assert text.characters == tuple(sorted(set(SAID)))
    joined = torch.cat([text.train, text.test])
    assert decoded(joined, text.characters) == SAID
    assert len(text.test) == len(SAID) // 10
    assert [text.characters.index(each) for each in SAID] == joined.tolist()
    assert torch.equal(encoded(SAID, text.characters), joined.long())


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="say where the text is with --data-dir"):
        shakespeare(None)
    with pytest.raises(ValueError, match=r"looked for .*tinyshakespeare\.txt"):
        shakespeare(tmp_path)
    (tmp_path / "input.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="no text in UTF-8"):
        shakespeare(tmp_path)
    (tmp_path / "input.txt").write_text("".join(chr(300 + number) for number in range(257)))
    with pytest.raises(ValueError, match="at most 256 different ones, got 257 of 257"):
        read(tmp_path / "input.txt")
    with pytest.raises(ValueError, match="no character '!'"):
        encoded("ab!", ("a", "b"))


def windows(batches: Any) -> list[tuple[Tensor, Tensor]]:
    return [pair for tokens, follow in batches for pair in zip(tokens, follow, strict=True)]


@pytest.mark.parametrize("world", [1, 3])
def test_an_epoch_sees_the_text_once_and_the_next_begins_elsewhere(quick: Recipe, world: int) -> None:
    source: Any = load(quick)
    text, starts = decoded(source.text.train, source.classes), []
    for epoch in range(3):
        shares = [Share(4, rank, world) for rank in range(world)]
        seen = [pair for share in shares for pair in windows(source.train(epoch, 0, share))]
        for tokens, follow in seen:
            assert torch.equal(tokens[1:], follow[:-1])
        first = {text.find(decoded(tokens, source.classes)) % 32 for tokens, _ in seen}
        assert len(seen) == min(source.train_count, 4 * world * source.length(shares[0]))
        starts.append(first)
        again = [pair for share in shares for pair in windows(source.train(epoch, 2, share))]
        assert len(seen) - len(again) == 8 * world
    assert len(set(map(frozenset, starts))) > 1


def test_windows_lie_side_by_side(quick: Recipe) -> None:
    source: Any = load(quick)
    source.text, source.train_count = replace(source.text, train=torch.arange(10 * 32 + 7)), 9  # numbers are places
    firsts = set()
    for epoch in range(4):
        begins = sorted(int(tokens[0]) for tokens, _ in windows(source.train(epoch, 0, Share(3))))
        assert begins == [begins[0] + 32 * n for n in range(9)]
        firsts.add(begins[0])
    assert len(firsts) > 1
    assert max(firsts) < 32


@pytest.mark.parametrize("world", [1, 2])
def test_every_window_is_tested_on_once(quick: Recipe, world: int) -> None:
    source: Any = load(quick)
    seen = [windows(source.test(Share(4, rank, world))) for rank in range(world)]
    text = source.text.test.long()
    expected = [text[32 * n : 32 * n + 32] for n in range((len(text) - 1) // 32)]
    found: list[Any] = [None] * len(expected)
    for rank, part in enumerate(seen):
        found[rank::world] = [tokens for tokens, _ in part]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert source.test_count == len(expected)


def test_sums_are_over_characters() -> None:
    logits, labels = torch.randn(3, 7, 11), torch.randint(11, (3, 7))
    tally = Tally()
    tally.update(logits[:2], labels[:2])
    tally.update(logits[2:], labels[2:])
    means = tally.compute()
    loss = float(F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
    assert int(tally.count) == 21
    assert means["loss"] == pytest.approx(loss, rel=1e-6)
    assert means["bits"] == pytest.approx(loss / math.log(2), rel=1e-6)
    assert means["acc"] == float((logits.argmax(-1) == labels).double().mean())


def test_a_run_learns_and_is_judged_by_bits(whole: Run) -> None:
    rows = whole.rows()
    assert list(rows[0])[:6] == ["epoch", "train_loss", "train_bits", "val_loss", "val_bits", "val_acc"]
    assert rows[0]["val_bits"] == pytest.approx(rows[0]["val_loss"] / math.log(2))
    assert rows[-1]["val_bits"] < rows[0]["train_bits"] - 0.3
    summary: Any = whole.summary()
    best = min(rows, key=lambda row: row["val_bits"])
    assert summary["best"] == {"epoch": best["epoch"], "val_bits": best["val_bits"]}
    assert json.loads((whole.folder / "data.json").read_text())["classes"] == sorted(set(SAID))
    assert (whole.folder / "curves.png").stat().st_size > 1000


def test_evaluation_is_the_last_epoch_and_by_hand(whole: Run, capsys: pytest.CaptureFixture[str]) -> None:
    told = evaluate.evaluate(whole.folder)
    assert told["bits"] == pytest.approx(whole.rows()[-1]["val_bits"], rel=1e-6)
    _, recipe = whole.recipe()
    source: Any = load(recipe)
    model, _ = evaluate.trained(whole, recipe, "last", torch.device("cpu"))
    text = source.text.test.long()
    losses = []
    with torch.no_grad():
        for n in range((len(text) - 1) // 32):
            logits = model(text[None, 32 * n : 32 * n + 32])
            losses.append(float(F.cross_entropy(logits[0], text[32 * n + 1 : 32 * n + 33])))
    assert told["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert told["samples"] == 32 * len(losses)
    assert cli.main(["eval", str(whole.folder)]) == 0
    assert f"{told['bits']:.3f} bits per character" in capsys.readouterr().out


def test_a_run_that_died_ends_as_one_that_did_not(quick: Recipe, whole: Run, tmp_path: Path) -> None:
    given = replace(quick, save_steps=1)
    assert_same(fit.resume(dead(given, tmp_path / "run", saves=3).folder, quiet=True), whole)


def test_layers_are_compared_by_bits(quick: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--data-dir", str(quick.data_dir), "--epochs", "1", "--warmup", "0", "--context", "32", "--batch", "32"]
    given += ["--accelerator", "cpu", "--k", "4", "--output", str(tmp_path / "both")]
    assert cli.main(["compare", "shakespeare-tiny", "--layers", "attention,convnn", *given]) == 0
    said = capsys.readouterr().out
    assert "test bits per character" in said
    table = list(csv.DictReader((tmp_path / "both" / "table.csv").read_text().splitlines()))
    assert [row["layer"] for row in table] == ["attention", "convnn"]
    finals = [Run(tmp_path / "both" / f"layer={row['layer']}").rows()[-1]["val_bits"] for row in table]
    assert [float(row["val_bits"]) for row in table] == finals
    assert f"{finals[0]:.3f} bits" in said
    # A kernel of 4 ranks and 32 channels in each of 4 blocks, for all heads.
    assert int(table[1]["parameters"]) - int(table[0]["parameters"]) == 4 * 4 * 32


def test_recipes_of_texts_build_models_of_text() -> None:
    given = named("shakespeare")
    assert (given.batch, given.lr, given.min_lr, given.beta2, given.weight_decay) == (64, 1e-3, 1e-4, 0.99, 0.1)
    model: Any = build(given, 1, 256, 65, device="meta")
    assert type(model).__name__ == "GPT"
    assert (len(model.blocks), model.head.weight.shape, model.pos_embed.shape) == (6, (65, 384), (256, 384))
    assert model.blocks[0].attn.k == 32
    assert irrelevant(given) == {"kernel_size", "patch", "ratio", "stem", "width"}
    assert "context" in irrelevant(named("digits"))
    assert (measure(given), measure(named("digits"))) == (BITS, ACCURACY)
    assert BITS.better(1.5, 1.6)
    assert ACCURACY.better(0.6, 0.5)


def test_what_does_not_fit_a_text_is_refused(quick: Recipe, whole: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for changed, said in (
        ({"model": "resnet8"}, "needs a model of text, such as gpt_tiny, got --model resnet8"),
        ({"mixup": 0.5}, "--mixup is for images"),
        ({"image_size": 8}, "--image-size is for images"),
        ({"flip": 0.5}, "--flip is for folders"),
        ({"context": 3000}, "--context must leave windows"),
    ):
        with pytest.raises(ValueError, match=said):
            load(replace(quick, **changed))
    with pytest.raises(ValueError, match="digits needs a model of images, got --model gpt_tiny"):
        load(Recipe(model="gpt_tiny"))
    assert cli.main(["predict", str(whole.folder), "photo.png"]) == cli.MISUSED
    assert "sees nothing in pictures" in capsys.readouterr().err
    assert cli.main(["train", "digits", "--context", "9"]) == cli.MISUSED
    assert "--context means nothing to resnet8" in capsys.readouterr().err

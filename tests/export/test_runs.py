"""Runs as files for others: ONNX, programs, weights; and models through timm and huggingface_hub."""

from __future__ import annotations

import json
import re
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from convnn import models
from convnn.candidates import Random
from convnn_lab import cli, export
from convnn_lab.recipes import RECIPES
from convnn_lab.train import evaluate, fit
from convnn_lab.train.run import Run


def run_of(layer: str, folder: Path) -> Run:
    recipe = replace(RECIPES["digits"], layer=layer, epochs=1, batch=512, width=4, accelerator="cpu")
    return fit.train("digits", recipe, folder / "run", quiet=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_of("hybrid", tmp_path_factory.mktemp("run"))


def model_of(run: Run, which: Any = "last") -> Any:
    return export.defined(evaluate.trained(run, run.recipe()[1], which, torch.device("cpu"))[0])


def test_weights_carry_what_rebuilds_their_model(trained: Run, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "new" / "model.safetensors"
    assert cli.main(["export", str(trained.folder), str(path)]) == 0
    assert str(path) in capsys.readouterr().out
    x = torch.randn(3, 1, 8, 8)
    assert torch.equal(export.defined(export.load(path))(x), model_of(trained)(x))
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["convnn"])
    assert about["recipe"] == "digits"
    assert len(about["classes"]) == 10
    other = trained.checkpoints / "last" / "weights.safetensors"
    with pytest.raises(ValueError, match="does not say which model"):
        export.load(other)


@pytest.mark.parametrize("layer", ["conv", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_a_program_is_open_in_batch_and_size(layer: str, tmp_path: Path, capsys: Any) -> None:
    trained, path = run_of(layer, tmp_path), tmp_path / "model"
    assert cli.main(["export", str(trained.folder), str(path), "--format", "pt2"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"batch +1 and more", said)
    (least,) = {int(side) for side in re.findall(r"(?:height|width) +(\d+) and more", said)}
    extra = {"convnn.json": ""}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # older releases wonder whether what they read can be written
        program: Any = torch.export.load(path, extra_files=extra).module()
    assert json.loads(extra["convnn.json"])["size"] == 8
    for shape in ((1, 1, 8, 8), (5, 1, 12, 10), (2, 1, least, least), (3, 1, least, 11)):
        x = torch.randn(shape)
        torch.testing.assert_close(program(x), model_of(trained)(x), rtol=1e-5, atol=1e-5)
    with pytest.raises((RuntimeError, AssertionError)):
        program(torch.randn(2, 1, least - 1, least - 1))


@pytest.mark.slow
def test_onnx_is_open_in_batch_and_size(trained: Run, tmp_path: Path, capsys: Any) -> None:
    import onnx  # noqa: PLC0415 - slow to import

    path = tmp_path / "model.onnx"
    assert cli.main(["export", str(trained.folder), str(path), "--weights", "best"]) == 0
    assert "it is within" in capsys.readouterr().out
    about = {each.key: each.value for each in onnx.load(path).metadata_props}
    assert json.loads(about["convnn"])["weights"] == "best"
    model = model_of(trained, "best")
    for shape in ((1, 1, 8, 8), (5, 1, 12, 10)):
        x = torch.randn(shape)
        torch.testing.assert_close(export.runner(path)(x), model(x), rtol=1e-5, atol=1e-5)


def test_what_is_missing_is_named(trained: Run, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert cli.main(["export", str(trained.folder), str(tmp_path / "model.onnx")]) == cli.MISUSED
    said = capsys.readouterr().err
    assert said.startswith("convnn: this export needs ")
    assert said.endswith(": pip install 'convnn[export]'\n")
    assert "onnxscript" in said
    assert cli.main(["export", str(trained.folder), str(tmp_path / "model.bin")]) == cli.MISUSED
    assert "must end with .onnx, .pt2 or .safetensors" in capsys.readouterr().err
    assert cli.main(["export", str(tmp_path), str(tmp_path / "model.pt2")]) == cli.MISUSED
    assert "holds no run" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["pt2", pytest.param("onnx", marks=pytest.mark.slow)])
def test_a_model_of_text_is_open_in_batch_and_tokens(kind: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"layer": "convnn", "k": 3, "mask": "causal", "backend": "reference"}
    model = models.GPT(16, 1, 2, vocabulary=7, length=20, **options).eval()
    done = export.WRITERS[kind](model, torch.zeros(2, 20, dtype=torch.int64), tmp_path / f"model.{kind}", {})
    assert list(done.sizes) == ["batch", "tokens"]
    assert done.sizes["batch"] == (1, None)
    assert done.sizes["tokens"][1] == 20
    assert done.difference is not None
    assert done.difference < 1e-5


OPTIONS: dict[str, Any] = {"num_classes": 5, "layer": "convnn", "k": 4, "image_size": 32, "candidates": "random:4"}


def test_a_model_goes_through_a_hubs_folder(tmp_path: Path) -> None:
    from convnn.integrations import hub  # noqa: PLC0415 - brings timm's libraries along

    model: Any = hub.HubModel(name="vit_tiny", **OPTIONS).eval()
    assert isinstance(model.model.blocks[0].attn.candidates, Random)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == {"name": "vit_tiny", **OPTIONS}
    assert (tmp_path / "model.safetensors").exists()
    again = hub.HubModel.from_pretrained(tmp_path)
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(again(x), model(x))


def test_a_hub_rebuilds_models_from_json_alone() -> None:
    from convnn.integrations import hub  # noqa: PLC0415 - brings timm's libraries along

    with pytest.raises(ValueError, match="options that JSON can hold, got candidates="):
        hub.HubModel(name="vit_tiny", candidates=Random(4))
    with pytest.raises(ValueError, match=r"'random:R' or 'grid:R', got 'all'"):
        hub.HubModel(name="vit_tiny", candidates="all")


@pytest.mark.parametrize(
    ("name", "options", "size"),
    [
        ("convnn_vit_tiny_patch16_224", {"k": 4, "img_size": 48, "depth": 2}, 48),
        ("convnn_resnet18", {"ratio": 0.25}, 32),
    ],
)
def test_a_model_goes_through_timms_folder(name: str, options: dict[str, Any], size: int, tmp_path: Path) -> None:
    import timm  # noqa: PLC0415 - slow to import

    from convnn.integrations import timm as ours  # noqa: PLC0415

    assert name in ours.NAMES
    model = timm.create_model(name, num_classes=5, **options).eval()
    timm.models.save_for_hf(model, str(tmp_path), model_args=options)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    x = torch.randn(2, 3, size, size)
    assert torch.equal(again(x), model(x))
    assert again.num_classes == 5

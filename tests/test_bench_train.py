"""The benchmark of epochs, without a device to measure on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from convnn import HybridConv2d
from convnn_lab.bench import epochs
from convnn_lab.recipes import Recipe
from convnn_lab.train import graph
from tests.train.test_graph import Replays


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> epochs.Variant:
    def make(recipe: Recipe, device: str) -> nn.Module:
        assert device == "cpu"
        assert recipe.precision == "tf32"
        Replays.model = nn.Sequential(HybridConv2d(3, 4, 3, stride=8), nn.Flatten(), nn.Linear(4 * 16, 10))
        return Replays.model

    monkeypatch.setattr(graph, "Graphs", Replays)
    recipe = epochs.VARIANTS["vgg11"]["ratio 0.5"].recipe
    return epochs.Variant(replace(recipe, accelerator="cpu", batch=2), make)


@pytest.mark.parametrize("recorded", [True, False])
def test_an_epoch_is_as_many_steps_as_its_images_need(
    recorded: bool, small: epochs.Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(100))  # a second passes between two looks
    looks = SimpleNamespace(perf_counter=lambda: float(next(clock)))
    monkeypatch.setattr("convnn_lab.bench.epochs.time", looks)
    monkeypatch.setattr(Replays, "replays", 0)
    took = epochs.seconds(small, epochs.Way("tf32", recorded), steps=5, images=80)
    assert took == pytest.approx(1 / 5 * 80 / 2)
    assert Replays.replays == (epochs.FIRST + 5 - graph.TRIES if recorded else 0)


def test_lines_are_added_to_a_file_of_the_same_columns(tmp_path: Path) -> None:
    add = run_path(str(Path(__file__).parents[1] / "benchmarks" / "train.py"))["add"]
    for seconds in (1.5, 2.5):
        add({"network": "ratio 0", "graph": seconds}, tmp_path / "train.csv")
    assert (tmp_path / "train.csv").read_text().split() == ["network,graph", "ratio", "0,1.5", "ratio", "0,2.5"]
    with pytest.raises(ValueError, match="has other columns than network, eager; name another file"):
        add({"network": "ratio 0", "eager": 1.0}, tmp_path / "train.csv")


def test_networks_are_asked_for_by_name_or_by_words_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    script = run_path(str(Path(__file__).parents[1] / "benchmarks" / "train.py"))
    chosen = script["chosen"]
    assert list(chosen("vgg11", ["ratio 0"])) == ["ratio 0"]
    assert list(chosen("vgg11", ["0.5"])) == ["ratio 0.5", "ratio 0.5, plain"]
    assert list(chosen("vit_tiny", ["convnn, all", "kvt"])) == ["kvt, k = 9", "convnn, all"]
    assert list(chosen("vit_tiny", [""])) == list(epochs.VARIANTS["vit_tiny"])
    with pytest.raises(SystemExit):
        script["main"](["--models", "vgg11", "--networks", "plain", "random"])
    said = capsys.readouterr().err
    assert "--networks must be words of 'ratio 0', 'ratio 0.5'" in said
    assert "got 'random'" in said


def test_spans_named_in_the_source_are_no_kernels() -> None:
    watch = epochs.Watch(0)
    watch.looked(last=False)
    with torch.profiler.record_function("a span"):
        torch.ones(3) + 1
    watch.looked(last=True)
    watch.counted = 1
    assert {"aten::add", "a span"} & {each.name for each in watch.kernels()} == {"aten::add"}


def test_compiled_epochs_are_of_compiled_models(small: epochs.Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[nn.Module] = []
    monkeypatch.setattr("convnn_lab.train.module.compile_parts", compiled.append)
    for compiles in (False, True):
        assert epochs.seconds(small, epochs.Way("tf32", recorded=True, compiled=compiles), steps=1, images=4) > 0
    assert compiled == [Replays.model]


def test_what_a_step_is_made_of_is_counted_by_the_step(small: epochs.Variant) -> None:
    found = epochs.kernels(small, epochs.Way("tf32", recorded=False), steps=4)
    launched = {each.name: each.launches for each in found}
    assert launched["aten::addmm"] == 1  # one layer mixes all features, in each of four steps
    assert [each.ms for each in found] == sorted((each.ms for each in found), reverse=True)

    parts = run_path(str(Path(__file__).parents[1] / "benchmarks" / "train.py"))["parts"]
    whole, kernels, *named = parts(small, epochs.Way("tf32", recorded=False), 2, 12.5)
    assert (whole["what"], whole["ms"], kernels["what"]) == ("a whole step", "12.500", "all kernels")
    assert 0 < sum(float(each["ms"]) for each in named) <= float(kernels["ms"]) + 0.01


def parameters(variant: epochs.Variant) -> int:
    return sum(parameter.numel() for parameter in variant.make(variant.recipe, "cpu").parameters())


def test_networks_are_those_of_the_recipes() -> None:
    for name, variant in epochs.VARIANTS["vit_tiny"].items():
        assert variant.recipe.published, name
        assert variant.recipe.layer == name.split(",")[0]
    assert 5e6 < parameters(epochs.VARIANTS["vit_tiny"]["convnn, all"]) < 6e6
    for name, variant in epochs.VARIANTS["vgg11"].items():
        assert variant.recipe.published, name
        assert variant.recipe.ratio == float(name.split(",")[0].removeprefix("ratio "))
    assert parameters(epochs.VARIANTS["vgg11"]["ratio 0.5"]) == 130_015_690  # with what normalises


@pytest.mark.parametrize(
    ("model", "name", "size"), [("vit_tiny", "convnn, all", 224), ("vgg11", "ratio 0.5", 32)], ids=["vit", "vgg"]
)
def test_the_plain_network_computes_what_ours_does(model: str, name: str, size: int) -> None:
    variants = epochs.VARIANTS[model]
    ours, plain = (
        variants[each].make(variants[each].recipe, "cpu").double().eval() for each in (name, f"{name}, plain")
    )
    parts = zip(plain.state_dict(), ours.state_dict().values(), strict=True)
    plain.load_state_dict(dict(parts))
    images = torch.randn(2, 3, size, size, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(plain(images), ours(images), rtol=1e-6, atol=1e-6)

"""Recipes: the numbers they were published with, schedules step by step, models to the last parameter."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from convnn_lab.recipes import RECIPES, Recipe, from_dict, named
from convnn_lab.recipes.limits import seconds
from convnn_lab.train.build import build, irrelevant
from convnn_lab.train.optimizer import in_one_pass, schedule

CIFAR = ("vgg11-cifar10", "vgg11-cifar100", "vgg11-fashion-mnist", "vit-tiny-cifar10", "vit-tiny-cifar100")
IMAGENET = ("resnet50-imagenet", "vit-base-imagenet")


@pytest.mark.parametrize("name", CIFAR)
def test_cifar_is_run_as_published(name: str) -> None:
    given = named(name)
    assert (given.optimizer, given.lr, given.beta1, given.beta2) == ("adamw", 1e-4, 0.9, 0.999)
    assert (given.weight_decay, given.decay_all, given.schedule, given.warmup) == (0.01, True, "constant", 0)
    assert (given.batch, given.epochs, given.clip, given.seed) == (256, 150, 1.0, 42)
    assert (given.precision, given.smoothing, given.mixup, given.cutmix, given.erase) == ("float32", 0, 0, 0, 0)
    assert (given.augment, given.flip, given.jitter, given.crop_scale) == (None, 0, 0, None)
    assert given.k == 9
    if name.startswith("vit"):
        assert (given.heads, given.candidates, given.dropout, given.image_size) == (1, "random:32", 0.1, 224)


@pytest.mark.parametrize("name", IMAGENET)
def test_imagenet_is_run_as_published(name: str) -> None:
    given = named(name)
    assert (given.lr, given.weight_decay, given.warmup, given.warmup_lr, given.min_lr) == (1e-3, 0.05, 20, 1e-7, 5e-6)
    assert (given.schedule, given.epochs, given.clip, given.precision) == ("cosine", 300, 5.0, "half")
    for devices, shares in ((1, (320, 4)), (2, (320, 2)), (4, (320, 1)), (8, (160, 1)), (5, (256, 1))):
        assert given.shares(devices) == shares
    with pytest.raises(ValueError, match="--batch must divide among 3 devices and 2 turns, got 1280"):
        given.shares(3)


def rates(given: Recipe, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=given.lr)
    made = schedule(given, optimizer, steps)
    found = []
    for step in range(given.epochs * steps + 1):
        if made is not None:
            made.step_update(step)
        found.append(optimizer.param_groups[0]["lr"])
    return found


def test_the_rate_rises_straight_and_falls_by_a_cosine() -> None:
    found = rates(named("resnet50-imagenet"), steps=10)
    assert found[0] == pytest.approx(1e-7)
    assert found[100] == pytest.approx((1e-7 + 1e-3) / 2)
    assert found[200] == pytest.approx(1e-3)
    assert found[1600] == pytest.approx((1e-3 + 5e-6) / 2)
    assert found[3000] == pytest.approx(5e-6)
    assert all(a < b for a, b in pairwise(found[:201]))
    assert all(a > b for a, b in pairwise(found[200:]))


def test_updates_take_one_pass_where_gradients_are_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    given = named("vgg11-cifar10")
    assert not in_one_pass(given)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert in_one_pass(given)
    assert in_one_pass(replace(given, precision="bf16", optimizer="sgd"))
    for other in ({"accelerator": "cpu"}, {"precision": "fp16"}, {"fsdp": True}, {"optimizer": "lamb"}):
        assert not in_one_pass(replace(given, **other))


def test_a_constant_rate_stays_after_its_rise() -> None:
    assert set(rates(named("vgg11-cifar10"), steps=2)) == {1e-4}
    found = rates(replace(named("digits"), schedule="constant", epochs=4, warmup=1, warmup_lr=0.0), steps=5)
    assert found[:6] == pytest.approx([0, 4e-4, 8e-4, 12e-4, 16e-4, 2e-3])
    assert set(found[5:]) == {2e-3}


COUNTS = {
    "vgg11-cifar10": 130_015_690,
    "vgg11-cifar100": 130_384_420,
    "vgg11-fashion-mnist": 130_015_690 - 2 * 9 * 64,  # two channels of colour fewer, of nine cells or neighbours
    "vit-tiny-cifar10": 5_500_042,
    "vit-tiny-cifar100": 5_517_412,
    "resnet50-imagenet": 26_474_760,
    "vit-base-imagenet": 86_386_408,
}


@pytest.mark.parametrize("name", COUNTS)
def test_published_recipes_have_the_published_models(name: str) -> None:
    given = named(name)
    classes = {"cifar10": 10, "cifar100": 100, "fashion-mnist": 10}.get(given.dataset, 1000)
    model = build(given, 3, given.image_size or 32, classes, device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == COUNTS[name]
    drops = {module.p for module in model.modules() if isinstance(module, nn.Dropout) and module.p}
    assert drops == ({0.5} if name.startswith("vgg") else {0.1} if name.startswith("vit") else set())


def test_what_was_not_published_is_refused_or_asked_for() -> None:
    vgg = named("vgg11-cifar10")
    wrong: dict[str, dict[str, Any]] = {
        "the published vgg11 has layers conv, hybrid, convnn, got 'attention'": {"layer": "attention"},
        "--similarity was not varied in the published models": {"similarity": "dot"},
        "the published vgg11 has a dropout of 0.5, got 0.2": {"dropout": 0.2},
        "--position was scaled_concat in the published models, got 'coordinates'": {"position": "coordinates"},
        "published models are for cifar10, cifar100, imagenet, fashion-mnist, got 'digits'": {"dataset": "digits"},
        "--candidates must be all, random:R or grid:R, got '32'": {"candidates": "32"},
        "unknown model 'vgg12'": {"model": "vgg12"},
    }
    for message, given in wrong.items():
        with pytest.raises(ValueError, match=message):
            build(replace(vgg, **given), 3, 32, 10, device="meta")
    own = replace(vgg, published=False, similarity="euclidean", dropout=0.2, candidates="random:16")
    assert "HybridConv2d" in repr(build(own, 3, 32, 10, device="meta"))
    with pytest.raises(ValueError, match="unknown layer 'kvt'"):
        build(replace(own, layer="kvt"), 3, 32, 10, device="meta")


def test_fields_a_layer_cannot_be_told_are_known() -> None:
    given = replace(RECIPES["digits"], k=25, candidates="random:32", ratio=0.5)
    assert {"k", "candidates", "ratio", "heads"} <= irrelevant(replace(given, layer="conv"))
    assert irrelevant(given) == {"heads", "dropout", "context", "kernel", "kernel_size"}
    assert "ratio" in irrelevant(replace(given, layer="convnn"))
    assert not {"heads", "k", "patch", "dropout"} & irrelevant(replace(given, model="vit_tiny", layer="convnn"))
    conv = build(replace(given, layer="conv"), 1, 8, 10, device="meta")
    assert "ConvNN" not in repr(conv)


def test_the_kernels_of_two_tables_can_be_said() -> None:
    def count(given: Recipe, channels: int, size: int, classes: int) -> int:
        return sum(each.numel() for each in build(given, channels, size, classes, device="meta").parameters())

    vit = replace(named("vit-tiny-cifar10"), kernel="standard")
    assert count(vit, 3, 224, 10) == 9_460_618
    assert count(replace(vit, published=False), 3, 224, 10) - count(
        replace(vit, published=False, kernel="depthwise"), 3, 224, 10
    ) == 12 * 192 * 9 * (192 - 1)
    text = replace(named("shakespeare-tiny"), kernel="standard")
    assert count(text, 1, 64, 65) > count(replace(text, kernel=None), 1, 64, 65)
    vgg = replace(named("vgg11-cifar10"), kernel_size=1, ratio=0.0)
    assert count(vgg, 3, 32, 10) == 121_822_154
    assert "kernel_size" not in irrelevant(vgg)
    assert {"kernel_size", "kernel"} <= irrelevant(replace(vgg, published=False))


WRONG: dict[str, dict[str, Any]] = {
    "--warmup must be shorter than the 10 epochs, got 10": {"warmup": 10},
    "--epochs must be at least 1, got 0": {"epochs": 0},
    "--ratio must be from 0 to 1, got 1.5": {"ratio": 1.5},
    "--lr must be a finite number, got nan": {"lr": float("nan")},
    "--clip must be more than 0, got 0": {"clip": 0},
    "--seed must be from 0": {"seed": -1},
    "--device-batch and --accumulate say the same thing": {"device_batch": 8, "accumulate": 2},
    "--max-time must be a time such as 9m, 90s or 1h30m, got '9 weeks'": {"max_time": "9 weeks"},
    "--save-every must be a time": {"save_every": "0s"},
}


@pytest.mark.parametrize("message", WRONG)
def test_the_impossible_is_refused_before_anything_runs(message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("*", r"\*")):
        replace(RECIPES["digits"], **WRONG[message])


def test_times_are_read_as_people_write_them() -> None:
    for said, expected in {"9m": 540, "90s": 90, "90": 90, "1h30m": 5400, "2h": 7200, "1.5m": 90, "1m30s": 90}.items():
        assert seconds("--max-time", said) == expected
    for said in ("", "m", "-3", "1d", "1..5m", "0"):
        with pytest.raises(ValueError, match="--max-time must be a time"):
            seconds("--max-time", said)


def test_a_recipe_survives_a_file() -> None:
    for name in RECIPES:
        given = replace(named(name), data_dir=Path("somewhere"), ema=0.5)
        assert from_dict(json.loads(json.dumps(given.as_dict()))) == given
    with pytest.raises(ValueError, match="a recipe has no field colour"):
        from_dict({"colour": "red"})
    with pytest.raises(ValueError, match="unknown recipe 'vgg11-cifar'; did you mean vgg11-cifar10"):
        named("vgg11-cifar")


def test_recipes_need_no_torch() -> None:
    code = "import sys, convnn_lab.recipes, convnn_lab.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert all(field.default is not None or "None" in str(field.type) for field in fields(Recipe))

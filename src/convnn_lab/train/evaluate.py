"""What a trained run is worth, and what it sees in pictures."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytorch_lightning as pl
import torch
from PIL import Image
from torch import Tensor, nn

from convnn_lab.data.augment import test_transform
from convnn_lab.data.loader import read
from convnn_lab.data.text import TEXTS
from convnn_lab.recipes import Recipe
from convnn_lab.train import checkpoints, store
from convnn_lab.train.build import build
from convnn_lab.train.morphing import Morph
from convnn_lab.train.run import Run
from convnn_lab.train.source import FOLDERS, Prepare, Share, load
from convnn_lab.train.surroundings import device_of, half, set_up
from convnn_lab.train.tally import Tally
from convnn_lab.train.text import Codes

Which = Literal["last", "best", "average"]


def evaluate(folder: Path, which: Which = "last", data_dir: Path | None = None) -> dict[str, Any]:
    """Loss, top-1 and top-5 of a run, over all samples it is tested on, on one device; of a text also the bits."""
    run = Run.open(folder)
    _, recipe = run.recipe()
    recipe = recipe if data_dir is None else replace(recipe, data_dir=data_dir)
    recipe = replace(recipe, accelerator="auto")  # where it was trained says nothing about where it is tested
    device = device_of(recipe)
    set_up(recipe)
    source = load(recipe, device)
    model, prepare = trained(run, recipe, which, device)
    tally = Tally().to(device)
    with torch.inference_mode(), _precision(recipe, device):
        for images, labels in source.test(Share(recipe.shares(recipe.devices * recipe.nodes)[0])):
            tally.update(model(prepare(images.to(device))), labels.to(device))
    means = tally.compute()
    told = {"top1": means["acc"], "top5": means["top5"], "loss": means["loss"], "samples": int(tally.count)}
    return told | ({"bits": means["bits"]} if recipe.dataset in TEXTS else {})


def predict(
    folder: Path, pictures: Sequence[Path], top: int = 5, which: Which = "last"
) -> list[list[tuple[str, float]]]:
    """The most likely classes of each picture, with their probabilities."""
    run = Run.open(folder)
    _, recipe = run.recipe()
    if recipe.dataset in TEXTS:
        raise ValueError(f"{folder} has learned from a text and sees nothing in pictures; examples/generate.py writes")
    recipe = replace(recipe, accelerator="auto")
    device = device_of(recipe)
    set_up(recipe)
    about = store.read_json(run.folder / "data.json")
    images = [_picture(path, recipe, about).to(device) for path in pictures]
    model, prepare = trained(run, recipe, which, device)
    with torch.inference_mode(), _precision(recipe, device):
        logits = torch.cat([model(prepare(image)) for image in images]).float()
    best = logits.softmax(-1).topk(min(top, len(about["classes"])))
    return [
        [(about["classes"][place], share) for place, share in zip(places, shares, strict=True)]
        for places, shares in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def trained(run: Run, recipe: Recipe, which: Which, device: torch.device) -> tuple[nn.Module, nn.Module]:
    """The model of a run with its weights, and what makes numbers for it of what the data set holds."""
    about = store.read_json(run.folder / "data.json")
    pl.seed_everything(recipe.seed, verbose=False)
    model = build(recipe, about["channels"], about["size"], len(about["classes"]))
    place = run.checkpoints / ("best" if which == "best" else "last")
    if not place.exists():
        raise ValueError(f"{run.folder} has no weights yet: there is no {place}")
    checkpoints.load_weights(model, place, average=which == "average")
    moving = Morph.of(recipe)
    if moving is not None:
        about_weights = store.read_json(place / store.MANIFEST)
        moving.settle(model, about_weights["epoch"] + 1 if which == "best" else about_weights["time"])
    prepare = Prepare(tuple(about["mean"]), tuple(about["std"]), about["size"]) if about["mean"] else Codes()
    return model.to(device).eval(), prepare.to(device)


def _picture(path: Path, recipe: Recipe, about: dict[str, Any]) -> Tensor:
    """A picture as a batch of one, in bytes, as the run's own data set has them."""
    if not path.is_file():
        raise ValueError(f"there is no picture {path}")
    return pixels(read(path), recipe, about)


def pixels(image: Image.Image, recipe: Recipe, about: dict[str, Any]) -> Tensor:
    """An image as a batch of one, in bytes, as the run's own data set has them."""
    if recipe.dataset in FOLDERS:
        return torch.as_tensor(test_transform(recipe)(image))[None]
    image = image.convert("L") if about["channels"] == 1 else image
    image = image.resize((about["native"], about["native"]), Image.Resampling.BILINEAR)
    held = torch.from_numpy(np.array(image))
    return held[None, None] if about["channels"] == 1 else held.permute(2, 0, 1)[None]


def _precision(recipe: Recipe, device: torch.device) -> AbstractContextManager[Any]:
    dtype = half(recipe)
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)

"""Which network looks at the pictures: a run's, or one by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file
from torch import Tensor, nn

from convnn import models
from convnn_lab.data.text import TEXTS
from convnn_lab.explorer import captured
from convnn_lab.explorer.layer import Layer
from convnn_lab.explorer.pictures import Picture


@dataclass(frozen=True)
class Network:
    """A model, and how it wants to see a picture.

    Args:
        see: the picture as bytes ``(1, C, H, W)``, and as the numbers the model takes.
        notes: what should be known of all its layers.
    """

    name: str
    model: nn.Module
    see: Any
    notes: tuple[str, ...] = ()

    def look(self, picture: Picture, wanted: Sequence[str] = (), cells: int = 3136) -> tuple[Image.Image, list[Layer]]:
        """The picture as the model sees it, and its layers."""
        pixels, numbers = self.see(picture.image)
        return _image(pixels), captured.layers(self.model, numbers, tuple(wanted), cells)


def _image(pixels: Tensor) -> Image.Image:
    channels = pixels[0].permute(1, 2, 0).to(torch.uint8)
    whole = channels.expand(-1, -1, 3) if channels.shape[-1] == 1 else channels
    return Image.fromarray(whole.contiguous().cpu().numpy())


def of_run(folder: Path) -> Network:
    """The network of a run's folder, with the weights of its last epoch."""
    from convnn_lab.train import evaluate, store  # noqa: PLC0415 - Lightning takes seconds to import
    from convnn_lab.train.run import Run  # noqa: PLC0415

    run = Run.open(folder)
    _, recipe = run.recipe()
    if recipe.dataset in TEXTS:
        raise ValueError(f"{folder} has learned from a text and sees nothing in pictures")
    about = store.read_json(folder / "data.json")
    model, prepare = evaluate.trained(run, recipe, "last", torch.device("cpu"))

    def see(image: Image.Image) -> tuple[Tensor, Tensor]:
        pixels = evaluate.pixels(image, recipe, about)
        return pixels, prepare(pixels)

    return Network(folder.resolve().name, model, see)


def by_name(name: str, *, size: int = 224, weights: Path | None = None, **options: Any) -> Network:
    """One of this library's models, or one of timm's; with the weights of a file, or random ones.

    Args:
        options: of the library's models: ``layer``, ``k``, ``ratio``, ``candidates``, ``heads``.
    """
    torch.manual_seed(0)
    if name.startswith("gpt"):
        raise ValueError(f"{name} is a model of text and sees nothing in pictures")
    given = {key: value for key, value in options.items() if value is not None}
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    if name in models.names():
        sized = {"image_size": size} if name.startswith("vit") else {}
        try:
            model = models.create(name, **sized, **given)
        except TypeError as error:
            raise ValueError(f"{name} does not take these options: {error}") from None
    else:
        model, mean, std = _timm(name, size, given)
    notes: tuple[str, ...] = ()
    if weights is None:
        notes = ("its weights are random: nothing was learned",)
    else:
        _load(model, weights)
    return Network(name, model.eval(), _Sized(size, mean, std), notes)


@dataclass(frozen=True)
class _Sized:
    """The middle of a picture as a square, normalised as ImageNet's are."""

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, image: Image.Image) -> tuple[Tensor, Tensor]:
        shown = ImageOps.fit(image, (self.size, self.size), Image.Resampling.BICUBIC)
        pixels = torch.from_numpy(np.array(shown)).permute(2, 0, 1)[None]
        mean, std = (torch.tensor(numbers).reshape(-1, 1, 1) for numbers in (self.mean, self.std))
        return pixels, (pixels.float() / 255 - mean) / std


def _timm(name: str, size: int, options: dict[str, Any]) -> tuple[nn.Module, Any, Any]:
    import timm  # noqa: PLC0415 - takes seconds to import

    import convnn.integrations.timm  # noqa: F401, PLC0415 - registers this library's models

    if not timm.is_model(name):
        known = ", ".join(models.names())
        raise ValueError(f"unknown model {name!r}; known are {known}, and timm's names")
    sized: dict[str, Any] = {"img_size": size} if "vit" in name or "deit" in name else {}
    try:
        model: Any = timm.create_model(name, pretrained=False, **sized, **options)
    except TypeError as error:
        raise ValueError(f"{name} does not take these options: {error}") from None
    told = model.pretrained_cfg
    return model, tuple(told["mean"]), tuple(told["std"])


def _load(model: nn.Module, path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"there is no file of weights {path}")
    try:
        state = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
        model.load_state_dict(state)
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        raise ValueError(f"{path} does not hold the weights of this model: {said}") from None


def tested(folder: Path, count: int) -> list[Picture]:
    """Pictures a run is tested on, evenly out of all of them."""
    from convnn_lab.train.run import Run  # noqa: PLC0415 - Lightning takes seconds to import
    from convnn_lab.train.source import Share, load  # noqa: PLC0415

    source = load(Run.open(folder).recipe()[1])
    chosen = set(torch.linspace(0, source.test_count - 1, min(count, source.test_count)).long().tolist())
    seen, first = list[Picture](), 0
    for images, labels in source.test(Share(256)):
        for place in sorted(chosen & set(range(first, first + len(images)))):
            name = source.classes[int(labels[place - first])]
            seen.append(Picture(f"{name}, number {place}", _image(images[place - first : place - first + 1])))
        first += len(images)
        if len(seen) == len(chosen):
            break
    return seen

"""Where batches come from: arrays in memory, which may be a GPU's, or folders read by workers.

Both give bytes; a :class:`Prepare` makes numbers of them on the device that learns. What an epoch looks like depends on
the seed and its number alone, so that a run can be taken up in the middle of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convnn_lab import data
from convnn_lab.data.arrays import Arrays, Data
from convnn_lab.data.augment import require_arrays_fit, side
from convnn_lab.data.folder import Folder, folder, imagenet
from convnn_lab.data.loader import order, test_loader, train_loader
from convnn_lab.data.text import TEXTS
from convnn_lab.recipes import Recipe

FOLDERS = {"imagenet": imagenet, "folder": folder}
Batch = tuple[Tensor, Tensor]
AT_A_TEST = 4  # times as many images as learned from at once, on a GPU: without gradients they need less memory


@dataclass(frozen=True)
class Share:
    """One of several processes, each of which sees its part of every batch."""

    per_device: int
    rank: int = 0
    world: int = 1


class Source(Protocol):
    """A data set that can be learned from and tested on."""

    classes: tuple[str, ...]
    channels: int
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    train_count: int
    test_count: int

    @property
    def native(self) -> int | None:
        """The side its images have by themselves, if they all have one."""
        ...

    def train(self, epoch: int, start: int, share: Share) -> Iterable[Batch]:
        """This process's batches of an epoch from number ``start`` on."""
        ...

    def test(self, share: Share) -> Iterable[Batch]:
        """This process's part of what is tested on: nothing twice, nothing left out."""
        ...

    def length(self, share: Share) -> int:
        """How many batches an epoch has."""
        ...

    def together(self, number: int, share: Share) -> int:
        """How many images all processes see in a batch."""
        ...


def load(recipe: Recipe, device: torch.device | str = "cpu") -> Source:
    """Open the data set of a recipe; what fits into memory goes to the device."""
    _require_a_model_for(recipe)
    if recipe.dataset in FOLDERS:
        found = FOLDERS[recipe.dataset](recipe.data_dir)
        return FolderSource(found, recipe)
    if recipe.dataset in TEXTS:
        from convnn_lab.train.text import TextSource  # noqa: PLC0415 - it is a source of this file

        return TextSource(TEXTS[recipe.dataset](recipe.data_dir).to(device), recipe)
    if recipe.dataset not in data.DATASETS:
        known = ", ".join([*data.DATASETS, *FOLDERS, *TEXTS])
        raise ValueError(f"unknown data set {recipe.dataset!r}; known are {known}")
    require_arrays_fit(recipe)
    return ArraySource(data.load(recipe.dataset, recipe.data_dir).to(device), recipe)


def _require_a_model_for(recipe: Recipe) -> None:
    """Refuse a model of images for a text, and what is done to images."""
    text = recipe.dataset in TEXTS
    if text != recipe.model.startswith("gpt"):
        needed = "a model of text, such as gpt_tiny" if text else "a model of images"
        raise ValueError(f"{recipe.dataset} needs {needed}, got --model {recipe.model}")
    if text:
        require_arrays_fit(recipe)
        for name in ("image_size", "erase", "mixup", "cutmix"):
            if getattr(recipe, name):
                raise ValueError(
                    f"--{name.replace('_', '-')} is for images, and {recipe.dataset} is a text; leave it out"
                )


class ArraySource:
    """Batches out of arrays: an index and no copy through the host."""

    def __init__(self, held: Data, recipe: Recipe) -> None:
        self.held, self.recipe = held, recipe
        self.classes, self.mean, self.std = held.names, held.mean, held.std
        self.channels = held.train.images.shape[1]
        self.size = recipe.image_size or self.native
        self.train_count, self.test_count = len(held.train), len(held.test)
        # Mixing pairs the images of a batch, and batch statistics of a single image are none.
        self.whole = bool(recipe.mixup or recipe.cutmix)

    @property
    def native(self) -> int:
        """The side of an image."""
        return self.held.train.images.shape[-1]

    def length(self, share: Share) -> int:
        """How many batches an epoch has."""
        size = share.per_device * share.world
        whole, rest = divmod(self.train_count, size)
        return whole + (1 if rest >= 2 * share.world and not self.whole else 0)

    def together(self, number: int, share: Share) -> int:
        """How many images all processes see in a batch: fewer in the last."""
        size = share.per_device * share.world
        return min(size, self.train_count - number * size)

    def train(self, epoch: int, start: int, share: Share) -> Iterable[Batch]:
        """This process's batches of an epoch from number ``start`` on."""
        places = order(self.train_count, self.recipe.seed, epoch).to(self.held.train.labels.device)
        size = share.per_device * share.world
        batches = places.split(size)[start : self.length(share)]
        return Batches(self.held.train, [each[share.rank :: share.world] for each in batches])

    def test(self, share: Share) -> Iterable[Batch]:
        """This process's part of what is tested on."""
        places = torch.arange(self.test_count, device=self.held.test.labels.device)[share.rank :: share.world]
        times = AT_A_TEST if places.is_cuda else 1
        return Batches(self.held.test, list(places.split(times * share.per_device)))


class Batches:
    """Batches of arrays by their places."""

    def __init__(self, arrays: Arrays, places: list[Tensor]) -> None:
        self.arrays, self.places = arrays, places

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[Batch]:
        for place in self.places:
            yield self.arrays.images[place], self.arrays.labels[place]


class FolderSource:
    """Batches of image files."""

    native = None

    def __init__(self, held: Folder, recipe: Recipe) -> None:
        self.held, self.recipe = held, recipe
        self.classes, self.mean, self.std = held.classes, held.mean, held.std
        self.channels, self.size = 3, side(recipe)
        self.train_count, self.test_count = len(held.train), len(held.test)

    def length(self, share: Share) -> int:
        """How many batches an epoch has."""
        return self.train_count // (share.per_device * share.world)

    def together(self, number: int, share: Share) -> int:  # noqa: ARG002
        """How many images all processes see in a batch: incomplete ones are left out."""
        return share.per_device * share.world

    def train(self, epoch: int, start: int, share: Share) -> Iterable[Batch]:
        """This process's batches of an epoch from number ``start`` on."""
        given = {"rank": share.rank, "world": share.world, "per_device": share.per_device}
        return train_loader(self.held, self.recipe, epoch=epoch, start=start, **given)

    def test(self, share: Share) -> Iterable[Batch]:
        """This process's part of what is tested on."""
        return test_loader(self.held, self.recipe, rank=share.rank, world=share.world, per_device=share.per_device)


class Prepare(nn.Module):
    """From bytes to numbers of mean 0 and deviation 1, of the size the model wants.

    Args:
        layout: how a map lies in memory.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        size: int,
        layout: torch.memory_format = torch.contiguous_format,
    ) -> None:
        super().__init__()
        self.size, self.layout = size, layout
        for name, numbers in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(numbers).reshape(-1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:  # noqa: D102
        images = images.contiguous(memory_format=self.layout)
        images = (images.float() / 255 - self.mean) / self.std
        if images.shape[-1] == self.size and images.shape[-2] == self.size:
            return images
        return F.interpolate(images, (self.size, self.size), mode="bilinear", antialias=images.shape[-1] > self.size)

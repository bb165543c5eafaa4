"""Data sets too large for memory: folders of class folders, whose images are read when they are needed.

What happens to an image is decided by the seed, the epoch and the number of the image: not by how many processes read,
and not by where a run was resumed.
"""

from __future__ import annotations

import os
import random
import re
import signal
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from convnn_lab.recipes import Recipe

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
FOLDER = "put images into train/<class>/ and val/<class>/, validation/<class>/ or test/<class>/"
IMAGENET = (
    "get ILSVRC 2012 from image-net.org, or imagenet-object-localization-challenge from Kaggle, and unpack it there"
)


@dataclass(frozen=True, eq=False)
class Part:
    """Images below a place, and their labels.

    Args:
        names: as bytes in one array; a million strings would be copied into every process that reads.
    """

    place: Path
    names: npt.NDArray[np.bytes_]
    labels: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.names)

    def path(self, number: int) -> Path:
        """Where an image is."""
        return self.place / os.fsdecode(self.names[number])


@dataclass(frozen=True, eq=False)
class Folder:
    """A data set on disk, divided into what is learned from and what is tested on.

    Args:
        mean, std: of each channel, of numbers from 0 to 1; those of ImageNet.
    """

    name: str
    train: Part
    test: Part
    classes: tuple[str, ...]
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.classes)


def folder(data_dir: Path | None) -> Folder:
    """Find a data set of any classes; what is tested on is in ``val``, or else ``validation`` or ``test``."""
    if data_dir is None:
        raise ValueError(f"folder: say where its images are with --data-dir; {FOLDER}")
    train = data_dir / "train"
    test = next((data_dir / name for name in ("val", "validation", "test") if (data_dir / name).is_dir()), None)
    if test is None or not train.is_dir():
        raise ValueError(f"folder: looked for train/ and val/, validation/ or test/ in {data_dir}; {FOLDER}")
    return _folder("folder", train, test)


def imagenet(data_dir: Path | None) -> Folder:
    """Find ILSVRC 2012, with its validation images in class folders, or all in one as Kaggle has them."""
    if data_dir is None:
        raise ValueError(f"imagenet: say where its images are with --data-dir; {IMAGENET}")
    places = [data_dir, data_dir / "ILSVRC/Data/CLS-LOC", data_dir / "Data/CLS-LOC"]
    place = next((each for each in places if (each / "train").is_dir() and (each / "val").is_dir()), None)
    if place is None:
        looked = ", ".join(str(each) for each in places)
        raise ValueError(f"imagenet: looked for train/ and val/ in {looked}; {IMAGENET}")
    train, test = place / "train", place / "val"
    classes = _classes(train)
    if len(classes) != 1000:
        raise ValueError(f"imagenet: {train} must have 1000 class folders, got {len(classes)}; {IMAGENET}")
    if _classes(test):
        return _folder("imagenet", train, test)
    return Folder("imagenet", _part(train, classes), _flat(test, data_dir, classes), classes)


def _folder(name: str, train: Path, test: Path) -> Folder:
    classes, tested = _classes(train), _classes(test)
    if not classes:
        raise ValueError(f"{name}: {train} must have a folder for each class, got none; {FOLDER}")
    for place, alone in ((train, set(classes) - set(tested)), (test, set(tested) - set(classes))):
        if alone:
            some = ", ".join(sorted(alone)[:3]) + (f" and {len(alone) - 3} more" if len(alone) > 3 else "")
            raise ValueError(f"{name}: {train} and {test} must have the same class folders; only {place} has {some}")
    return Folder(name, _part(train, classes), _part(test, classes), classes)


def _classes(place: Path) -> tuple[str, ...]:
    _, folders, _ = next(os.walk(place, onerror=_refuse))
    return tuple(sorted(each for each in folders if not each.startswith(".")))


def _part(place: Path, classes: tuple[str, ...]) -> Part:
    found = [_images(place, each) for each in classes]
    for name, names in zip(classes, found, strict=True):
        if not names:
            raise ValueError(f"{place / name} must have an image, one of {' '.join(SUFFIXES)}, got none")
    return Part(place, np.concatenate(found), np.repeat(np.arange(len(classes)), [len(names) for names in found]))


def _images(place: Path, name: str) -> list[bytes]:
    """The images in a folder and below it, in order, by their names from a place on; what is hidden is passed over."""
    found = []
    for path, folders, files in os.walk(place / name, onerror=_refuse, followlinks=True):
        folders[:] = [each for each in folders if not each.startswith(".")]
        inside = os.path.relpath(path, place)
        images = (each for each in files if each.lower().endswith(SUFFIXES) and not each.startswith("."))
        found += [os.fsencode(os.path.join(inside, each)) for each in images]
    return sorted(found)


def _refuse(error: OSError) -> None:
    raise ValueError(f"{error.filename} must be a folder that can be read: {error.strerror}")


def _flat(test: Path, data_dir: Path, classes: tuple[str, ...]) -> Part:
    """Validation images all in one folder, with labels from one of the lists that come with them."""
    names = _images(test, ".")
    if not names:
        raise ValueError(f"imagenet: {test} must have images or class folders, got neither; {IMAGENET}")
    lists = [data_dir / name / "LOC_val_solution.csv" for name in (".", "ILSVRC", "..")]
    notes = test.parent.parent.parent / "Annotations/CLS-LOC/val"
    source = next((each for each in (*lists, notes) if each.exists()), None)
    if source is None:
        looked = ", ".join(str(each) for each in (*lists, notes))
        raise ValueError(f"imagenet: looked for the labels of {test} in {looked}; {IMAGENET}")
    said = _noted(source) if source == notes else _listed(source)
    numbers = {name: number for number, name in enumerate(classes)}
    labels = [numbers.get(said.get(Path(os.fsdecode(each)).stem, ""), -1) for each in names]
    if -1 in labels:
        lost = Path(os.fsdecode(names[labels.index(-1)])).name
        raise ValueError(f"imagenet: {source} must name one of the {len(classes)} classes for {lost}, and does not")
    return Part(test, np.array(names), np.array(labels))


def _listed(path: Path) -> dict[str, str]:
    """Lines such as ``ILSVRC2012_val_00048981,n03995372 85 1 499 272``."""
    lines = (line.partition(",") for line in path.read_text(errors="replace").splitlines())
    return {name: rest.split(" ")[0] for name, _, rest in lines}


def _noted(place: Path) -> dict[str, str]:
    """Files such as ``ILSVRC2012_val_00048981.xml`` with ``<name>n03995372</name>``."""
    found = ((each.stem, re.search(rb"<name>\s*(n\d+)\s*</name>", each.read_bytes())) for each in place.glob("*.xml"))
    return {name: match[1].decode() for name, match in found if match is not None}


class Images(Dataset[tuple[Tensor, int]]):
    """Images as bytes with their labels, by pairs of an epoch and a number."""

    def __init__(self, part: Part, transform: Callable[[Image.Image], Tensor], *, seed: int) -> None:
        self.part, self.transform, self.seed = part, transform, seed

    def __len__(self) -> int:
        return len(self.part)

    def __getitem__(self, index: tuple[int, int]) -> tuple[Tensor, int]:
        epoch, number = index
        image = read(self.part.path(number))
        with drawing(self.seed, epoch, number):
            return self.transform(image), int(self.part.labels[number])


class UnreadableError(ValueError):
    """A file that is no whole image."""


def read(path: Path) -> Image.Image:
    """Read an image as red, green and blue."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of strange notes beside a picture that is whole
            with Image.open(path) as image:
                if image.mode.startswith(("I", "F")):  # would become white without a word
                    raise ValueError(f"its numbers must be bytes, got mode {image.mode}")
                return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, EOFError, struct.error, Image.DecompressionBombError) as error:
        raise UnreadableError(f"{path} cannot be read as an image: {error}") from None


def mixed(*numbers: int) -> int:
    """A seed of 64 bits that whole numbers decide."""
    said = str([int(number) for number in numbers]).encode()
    return int.from_bytes(blake2b(said, digest_size=8).digest(), "big")


@contextmanager
def drawing(*numbers: int) -> Iterator[None]:
    """Inside, Python, numpy and torch on the CPU draw as the numbers decide; outside, as if nothing had happened."""
    seed = mixed(*numbers)
    kept = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    random.seed(seed)
    np.random.seed([seed >> 32, seed % 2**32])
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.default_generator.set_state(kept[2])


def order(count: int, seed: int, epoch: int) -> Tensor:
    """The order in which an epoch takes the images."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(mixed(seed, epoch)))


class Batches(Sampler[list[tuple[int, int]]]):
    """Numbers in batches, each beside its epoch; the last batch may be smaller."""

    def __init__(self, numbers: Tensor, *, size: int, epoch: int) -> None:
        self.numbers, self.size, self.epoch = numbers, size, epoch

    def __len__(self) -> int:
        return len(range(0, len(self.numbers), self.size))

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for first in range(0, len(self.numbers), self.size):
            yield [(self.epoch, number) for number in self.numbers[first : first + self.size].tolist()]


def _undisturbed(_: int) -> None:
    """Leave it to the process that trains to answer signals that reach all of them."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


class Loader(DataLoader[tuple[Tensor, int]]):
    """Batches of bytes ``(B, 3, H, W)`` and labels ``(B,)``."""

    def __init__(self, images: Images, batches: Batches, recipe: Recipe, *, again: bool) -> None:
        super().__init__(
            images,
            batch_sampler=batches,
            num_workers=recipe.workers,
            pin_memory=recipe.accelerator != "cpu" and torch.cuda.is_available(),
            persistent_workers=again and recipe.workers > 0,
            worker_init_fn=_undisturbed,
            generator=torch.Generator(),  # its own: the model's draws are not to depend on how often data is read
        )

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:  # type: ignore[override]
        try:
            yield from map(tuple, super().__iter__())
            return
        except UnreadableError as error:
            said = str(error).strip().split("UnreadableError: ")[-1]
            # It holds the workers, and they it: found by the garbage collector, each would be waited for 5 s.
            error.__traceback__ = None
        raise UnreadableError(said)


def train_loader(
    data: Folder, recipe: Recipe, *, epoch: int, start: int, rank: int, world: int, per_device: int
) -> Loader:
    """One device's share of an epoch, in which a last batch that not all devices could fill is left out.

    Args:
        start: how many of its batches the device has seen.
    """
    from convnn_lab.data.augment import train_transform  # noqa: PLC0415 - timm takes seconds to import

    count, together = len(data.train), world * per_device
    if count < together:
        raise ValueError(f"--batch must be small enough for {count} images, got {together} at once")
    shares = order(count, recipe.seed, epoch)[: count - count % together].reshape(-1, per_device, world)
    if not 0 <= start <= len(shares):
        raise ValueError(f"start must be from 0 to the {len(shares)} batches of an epoch, got {start}")
    images = Images(data.train, train_transform(recipe, data.mean), seed=recipe.seed)
    return Loader(images, Batches(shares[start:, :, rank].flatten(), size=per_device, epoch=epoch), recipe, again=False)


def test_loader(data: Folder, recipe: Recipe, *, rank: int, world: int, per_device: int) -> Loader:
    """One device's share of what is tested on: each image on one device, once, so that shares may differ by one."""
    from convnn_lab.data.augment import test_transform  # noqa: PLC0415 - timm takes seconds to import

    images = Images(data.test, test_transform(recipe), seed=recipe.seed)
    return Loader(images, Batches(torch.arange(len(images))[rank::world], size=per_device, epoch=0), recipe, again=True)

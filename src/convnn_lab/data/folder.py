"""Data sets too large for memory: folders of class folders, of which only the names are read."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

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

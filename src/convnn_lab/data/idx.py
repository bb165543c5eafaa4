"""Fashion-MNIST in the IDX files it is distributed in, compressed or not."""

from __future__ import annotations

import gzip
import zlib
from math import prod
from pathlib import Path

import numpy as np

from convnn_lab.data.arrays import Arrays, Data, checked

# Where Debian's package dataset-fashion-mnist puts the files.
INSTALLED = Path("/usr/share/datasets/fashion-mnist")
NAMES = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
HOW = "install the Debian package dataset-fashion-mnist, or put its four standard files there"


def fashion_mnist(data_dir: Path | None) -> Data:
    """Read Fashion-MNIST: 60,000 and 10,000 images of 28 by 28."""
    folders = [INSTALLED] if data_dir is None else [data_dir, data_dir / "fashion-mnist"]
    folder = next((each for each in folders if _find(each, "train-images-idx3-ubyte") is not None), None)
    if folder is None:
        looked = " and ".join(str(each) for each in folders)
        raise ValueError(f"fashion-mnist: looked for train-images-idx3-ubyte[.gz] in {looked}; {HOW}")
    train, test = (_part(folder, kind) for kind in ("train", "t10k"))
    return Data("fashion-mnist", train, test, NAMES, (0.2860,), (0.3530,))


def _part(folder: Path, kind: str) -> Arrays:
    images, labels = (_array(folder, f"{kind}-{name}") for name in ("images-idx3-ubyte", "labels-idx1-ubyte"))
    return checked(images[:, None], labels, classes=10, shape=(1, 28, 28), source=folder)


def _find(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _array(folder: Path, name: str) -> np.ndarray:
    path = _find(folder, name)
    if path is None:
        raise ValueError(f"fashion-mnist: looked for {name}[.gz] in {folder}; {HOW}")
    return read(path)


def read(path: Path) -> np.ndarray:
    """Read an IDX file of bytes: two zeros, the type, the number of sides, the sides, the bytes."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise ValueError(f"{path} is no IDX file of bytes: it begins with {content[:4].hex() or 'nothing'}")
    start = 4 + 4 * content[3]
    sides = [int.from_bytes(content[place : place + 4], "big") for place in range(4, start, 4)]
    if len(content) != start + prod(sides):
        raise ValueError(f"{path} is damaged: {sides} needs {start + prod(sides)} bytes, and it has {len(content)}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(sides)

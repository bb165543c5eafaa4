"""Data sets that fit into memory, read from their standard files.

Images stay bytes until they are looked at, and may live on a GPU whole. Nothing is downloaded, and nothing that was
downloaded is trusted: archives are read and never unpacked, pickles may name nothing but arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from convnn_lab.data.arrays import Arrays, Data
from convnn_lab.data.cifar import cifar10, cifar100
from convnn_lab.data.digits import digits
from convnn_lab.data.idx import fashion_mnist

__all__ = ["DATASETS", "Arrays", "Data", "load"]

DATASETS: dict[str, Callable[[Path | None], Data]] = {
    "digits": digits,
    "fashion-mnist": fashion_mnist,
    "cifar10": cifar10,
    "cifar100": cifar100,
}


def load(name: str, data_dir: Path | str | None = None) -> Data:
    """Read a data set.

    Args:
        data_dir: the folder its files are in; ``digits`` needs none.

    Example:
        >>> data = load("digits")
        >>> data.train.images.shape, data.classes
        (torch.Size([1437, 1, 8, 8]), 10)
    """
    if name not in DATASETS:
        raise ValueError(f"unknown data set {name!r}; known are {', '.join(DATASETS)}")
    return DATASETS[name](None if data_dir is None else Path(data_dir))

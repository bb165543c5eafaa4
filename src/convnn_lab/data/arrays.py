"""Images and labels in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Arrays:
    """Images as bytes, and their labels.

    Shape:
        images ``(N, C, H, W)`` of uint8, labels ``(N,)`` of int64.
    """

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return self.images.shape[0]

    def to(self, device: torch.device | str) -> Arrays:
        """Move all of it to a device."""
        return Arrays(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True, eq=False)
class Data:
    """A data set, divided into what is learned from and what is tested on.

    Args:
        names: what the classes are called.
        mean, std: of each channel, of numbers from 0 to 1.
    """

    name: str
    train: Arrays
    test: Arrays
    names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return len(self.names)

    def to(self, device: torch.device | str) -> Data:
        """Move all of it to a device."""
        return replace(self, train=self.train.to(device), test=self.test.to(device))


def checked(
    images: np.ndarray, labels: np.ndarray, *, classes: int, shape: tuple[int, ...], source: Path | str
) -> Arrays:
    """Require images and labels that belong together."""
    if images.dtype != np.uint8 or images.shape[1:] != shape or images.ndim != 4:
        came = f"{images.shape} of {images.dtype}"
        raise ValueError(f"{source}: images must be bytes of shape (N, {', '.join(map(str, shape))}), got {came}")
    if labels.shape != images.shape[:1]:
        raise ValueError(f"{source}: there must be a label for each of {len(images)} images, got {labels.shape}")
    if len(labels) == 0 or labels.min() < 0 or labels.max() >= classes:
        came = "none" if len(labels) == 0 else f"{labels.min()} to {labels.max()}"
        raise ValueError(f"{source}: labels must be from 0 to {classes - 1}, got {came}")
    return Arrays(torch.from_numpy(images.copy()), torch.from_numpy(labels.astype(np.int64)))

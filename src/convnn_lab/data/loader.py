"""Batches of images that are read when they are needed.

What happens to an image is decided by the seed, the epoch and the number of the image: not by how many processes read,
and not by where a run was resumed.
"""

from __future__ import annotations

import random
import signal
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from convnn_lab.data.folder import Folder, Part
from convnn_lab.recipes import Recipe


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


ANSWERED = (signal.SIGTERM, signal.SIGINT)  # by the process that trains, where they reach all processes


@contextmanager
def _held_back() -> Iterator[None]:
    """Let these signals wait; a process started meanwhile never gets those of before it ignores them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ANSWERED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _undisturbed(_: int) -> None:
    """Leave signals to the process that trains."""
    for number in ANSWERED:
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
            with _held_back():  # workers start here
                batches = super().__iter__()
            yield from map(tuple, batches)
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

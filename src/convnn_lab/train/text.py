"""Batches of a text: windows of so many characters, and the character that follows each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from convnn_lab.data.loader import mixed, order
from convnn_lab.data.text import Text
from convnn_lab.recipes import Recipe
from convnn_lab.train.source import ArraySource, Batch, Share

CONTEXT = 256


class TextSource(ArraySource):
    """Windows side by side: an epoch sees the text once, beginning somewhere else every time."""

    def __init__(self, held: Text, recipe: Recipe) -> None:
        self.text, self.recipe = held, recipe
        self.classes, self.channels = held.characters, 1
        self.mean, self.std = (), ()
        self.size = CONTEXT if recipe.context is None else recipe.context
        # Wherever an epoch begins, it has as many whole windows.
        self.train_count, self.test_count = len(held.train) // self.size - 1, (len(held.test) - 1) // self.size
        self.whole = False
        if self.train_count < 1 or self.test_count < 1:
            came = f"{len(held.train)} to learn from and {len(held.test)} to test on"
            raise ValueError(f"--context must leave windows of a text of {came}, got {self.size}")

    @property
    def native(self) -> None:  # type: ignore[override]
        """A text has no side."""

    def train(self, epoch: int, start: int, share: Share) -> Iterable[Batch]:
        """This process's batches of an epoch from number ``start`` on."""
        seed = self.recipe.seed
        first = mixed(seed, epoch, 1) % self.size
        places = (first + self.size * order(self.train_count, seed, epoch)).to(self.text.train.device)
        batches = places.split(share.per_device * share.world)[start : self.length(share)]
        return Windows(self.text.train, [each[share.rank :: share.world] for each in batches], self.size)

    def test(self, share: Share) -> Iterable[Batch]:
        """This process's part of what is tested on: whole windows from the first character on."""
        places = self.size * torch.arange(self.test_count, device=self.text.test.device)[share.rank :: share.world]
        return Windows(self.text.test, list(places.split(share.per_device)), self.size)


class Windows:
    """Batches of windows by the places where they begin."""

    def __init__(self, text: Tensor, places: list[Tensor], size: int) -> None:
        self.text, self.places, self.size = text, places, size

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[Batch]:
        offsets = torch.arange(self.size + 1, device=self.text.device)
        for place in self.places:
            windows = self.text[place[:, None] + offsets].long()
            yield windows[:, :-1], windows[:, 1:]


class Codes(nn.Module):
    """Numbers of characters stay what they are."""

    def forward(self, tokens: Tensor) -> Tensor:  # noqa: D102
        return tokens

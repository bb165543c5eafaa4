"""Texts, character by character."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

FILES = ("tinyshakespeare.txt", "input.txt")
HOW = "put the text there that char-rnn calls tinyshakespeare: 1,115,394 characters in tinyshakespeare.txt or input.txt"
TESTED = 10  # one part in so many, the last, is tested on


@dataclass(frozen=True, eq=False)
class Text:
    """A text as numbers of its characters, divided into what is learned from and what is tested on.

    Args:
        characters: what the numbers stand for.

    Shape:
        train, test ``(N,)`` of uint8.
    """

    name: str
    train: Tensor
    test: Tensor
    characters: tuple[str, ...]

    def to(self, device: torch.device | str) -> Text:
        """Move all of it to a device."""
        return replace(self, train=self.train.to(device), test=self.test.to(device))


def shakespeare(data_dir: Path | None) -> Text:
    """Read a million characters of Shakespeare's plays; the last tenth is tested on."""
    if data_dir is None:
        raise ValueError(f"shakespeare: say where the text is with --data-dir; {HOW}")
    places = [folder / name for folder in (data_dir, data_dir / "text") for name in FILES]
    path = next((each for each in places if each.is_file()), None)
    if path is None:
        raise ValueError(f"shakespeare: looked for {', '.join(map(str, places))}; {HOW}")
    return read(path)


TEXTS: dict[str, Callable[[Path | None], Text]] = {"shakespeare": shakespeare}


def read(path: Path) -> Text:
    """Read a text of at most 256 different characters."""
    try:
        said = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}") from None
    characters = tuple(sorted(set(said)))
    if len(characters) > 256 or len(said) < TESTED:
        came = f"{len(said)} of {len(characters)}"
        raise ValueError(f"{path} must have at least {TESTED} characters of at most 256 different ones, got {came}")
    numbers = encoded(said, characters).to(torch.uint8)
    tested = len(numbers) // TESTED
    return Text(path.stem, numbers[: len(numbers) - tested], numbers[len(numbers) - tested :], characters)


def encoded(said: str, characters: Sequence[str]) -> Tensor:
    """The numbers of characters, ``(N,)``; one that is not known is refused."""
    codes = np.array([ord(each) for each in characters])
    given = np.frombuffer(said.encode("utf-32-le"), np.uint32).astype(np.int64)
    places = np.searchsorted(codes, given).clip(max=len(codes) - 1)
    strange = given[codes[places] != given]
    if len(strange):
        raise ValueError(f"the text this was learned from has no character {chr(int(strange[0]))!r}")
    return torch.from_numpy(places)


def decoded(numbers: Tensor, characters: Sequence[str]) -> str:
    """The text of numbers ``(N,)``."""
    return "".join(characters[number] for number in numbers.tolist())

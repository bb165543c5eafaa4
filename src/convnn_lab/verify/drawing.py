"""What random cases are drawn with: torch's own generator, and nothing else, so that a seed repeats a case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from convnn.backends import Backend

T = TypeVar("T")


Answer: TypeAlias = Tensor | tuple[Tensor | None, ...]


class Problem(NamedTuple):
    """A random case: two ways to one answer, and the arguments, which are known even if either way raises.

    Args:
        relative: whether a difference counts by the size of the number, where that is above 1.
    """

    ours: Callable[[str | Backend], Answer]
    theirs: Callable[[], Answer]
    arguments: str
    relative: bool = False


Case: TypeAlias = Callable[[], Problem]


def between(low: int, high: int) -> int:
    """Draw a whole number, both ends included."""
    return int(torch.randint(low, high + 1, ()))


def coin(chance: float = 0.5) -> bool:
    """Draw True with this chance."""
    return torch.rand(()).item() < chance


def one_of(*options: T) -> T:
    """Draw one of them."""
    return options[between(0, len(options) - 1)]


def numbers(axes: int, low: int, high: int) -> int | tuple[int, ...]:
    """Draw a number for all axes, or one for each."""
    return between(low, high) if coin(0.3) else tuple(between(low, high) for _ in range(axes))


def each(given: int | tuple[int, ...], axes: int) -> tuple[int, ...]:
    """One number for every axis."""
    return given if isinstance(given, tuple) else (given,) * axes


def call(name: str, *arguments: Any, **options: Any) -> str:
    """Write a call as one would type it; tensors by type and shape."""
    named = (f"{key}={_written(value)}" for key, value in options.items())
    return f"{name}({', '.join([*map(_written, arguments), *named])})"


def _written(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{tuple(value.shape)}"
    return getattr(value, "__name__", None) or repr(value)

"""The one place where a name becomes a strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def resolve(word: str, choice: Any, known: Mapping[str, Any]) -> Any:
    """Return what ``choice`` stands for: a name is looked up in ``known``, anything callable is taken as it is.

    Example:
        >>> resolve("similarity", "dot", {"dot": max}) is max
        True
        >>> resolve("similarity", "dott", {"dot": max, "cosine": min})
        Traceback (most recent call last):
        ...
        ValueError: unknown similarity 'dott'; known are 'cosine', 'dot'
    """
    if isinstance(choice, str):
        if choice not in known:
            raise ValueError(f"unknown {word} {choice!r}; known are {', '.join(map(repr, sorted(known)))}")
        return known[choice]
    if not callable(choice):
        names = ", ".join(map(repr, sorted(known)))
        raise TypeError(f"{word} must be a callable or one of {names}, got {choice!r}")
    return choice

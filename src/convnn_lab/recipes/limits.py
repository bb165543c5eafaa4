"""What the numbers of a recipe may be."""

from __future__ import annotations

import re
from typing import Any


def seconds(flag: str, said: str) -> float:
    """Read a time such as 9m, 90s or 1h30m; a bare number counts seconds."""
    units = {"h": 3600, "m": 60, "s": 1}
    parts = re.fullmatch(r"(?:([\d.]+)h)?(?:([\d.]+)m)?(?:([\d.]+)s?)?", said.strip())
    try:
        numbers = [float(part) * unit for part, unit in zip(parts.groups(), units.values(), strict=True) if part]  # type: ignore[union-attr]
        total = sum(numbers)
        if numbers and total > 0:
            return total
    except (AttributeError, ValueError):
        pass
    raise ValueError(f"{flag} must be a time such as 9m, 90s or 1h30m, got {said!r}")


def flag(name: str) -> str:
    """The flag of a field."""
    return f"--{name.replace('_', '-')}"


def least(recipe: Any, smallest: float, *names: str) -> None:
    """Require numbers that are large enough, where they are given."""
    for name in names:
        value = getattr(recipe, name)
        if value is not None and value < smallest:
            raise ValueError(f"{flag(name)} must be at least {smallest}, got {value}")


def share(recipe: Any, *names: str) -> None:
    """Require numbers from 0 to 1, where they are given."""
    for name in names:
        value = getattr(recipe, name)
        if value is not None and not 0 <= value <= 1:
            raise ValueError(f"{flag(name)} must be from 0 to 1, got {value}")

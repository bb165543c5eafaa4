"""What became of every convolution and attention of a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

HEADERS = ("name", "was", "is", "exact", "note")


@dataclass(frozen=True)
class Entry:
    """One module: where it stands, what it was, and what it is now.

    Args:
        names: every name it has in the model.
        before: the class it was of.
        after: the class of what replaced it, or None where it was left.
        exact: whether nothing changed, up to rounding.
        note: why it was left, or what to know of its twin.
    """

    names: tuple[str, ...]
    before: str
    after: str | None
    exact: bool
    note: str = ""

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]


@dataclass(frozen=True)
class Report:
    """What was replaced, what was left, and why; printed as a table.

    Args:
        entries: in the order of the model.
        notes: what else was changed.
    """

    entries: tuple[Entry, ...]
    notes: tuple[str, ...] = ()

    @property
    def replaced(self) -> tuple[Entry, ...]:
        """What is another layer now."""
        return tuple(entry for entry in self.entries if entry.after is not None)

    @property
    def left(self) -> tuple[Entry, ...]:
        """What is as it was, each with its reason."""
        return tuple(entry for entry in self.entries if entry.after is None)

    @property
    def exact(self) -> bool:
        """Whether the model computes what it computed before."""
        return all(entry.exact for entry in self.replaced)

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __getitem__(self, name: str) -> Entry:
        """The entry of a module by one of its names."""
        for entry in self.entries:
            if name in entry.names:
                return entry
        raise KeyError(name)

    def __str__(self) -> str:
        rows = [HEADERS, *(_row(entry) for entry in self.entries)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(HEADERS))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines.insert(1, "  ".join("-" * width for width in widths))
        inexact = sum(not entry.exact for entry in self.replaced)
        total = f"{len(self.replaced)} replaced ({inexact} not exact), {len(self.left)} left"
        return "\n".join([*(lines if self.entries else []), *self.notes, total])

    __repr__ = __str__


def _row(entry: Entry) -> tuple[str, ...]:
    exact = "-" if entry.after is None else "yes" if entry.exact else "no"
    name = ", ".join(name or "(the model)" for name in entry.names)
    return (name, entry.before, entry.after or "(left)", exact, entry.note)

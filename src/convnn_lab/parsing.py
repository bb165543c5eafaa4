"""Reading a command line; a wrong one is answered in one line."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def parse(kind: Any, arguments: Sequence[str], **options: Any) -> Any:
    """Make a ``kind``, a dataclass or several by name, of arguments."""
    try:
        import tyro
    except ModuleNotFoundError:
        raise ValueError("the command needs the laboratory: pip install 'convnn[lab]'") from None
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            if isinstance(kind, dict):
                config = (tyro.conf.PositionalRequiredArgs,)
                return tyro.extras.subcommand_cli_from_dict(kind, args=arguments, config=config, **options)
            return tyro.cli(kind, args=arguments, **options)
    except SystemExit as end:
        if not end.code:
            raise
        raise ValueError(_one_line(said.getvalue())) from None


def taken(arguments: Sequence[str], flag: str) -> tuple[str | None, list[str]]:
    """Take a flag and its value out of the arguments."""
    rest, value = list(arguments), None
    for place, word in enumerate(rest):
        if word == flag:
            if place + 1 == len(rest) or rest[place + 1].startswith("--"):
                raise ValueError(f"{flag} needs a value")
            value = rest[place + 1]
            del rest[place : place + 2]
            break
        if word.startswith(f"{flag}="):
            value = word.removeprefix(f"{flag}=")
            del rest[place]
            break
    if any(word == flag or word.startswith(f"{flag}=") for word in rest):
        raise ValueError(f"{flag} was given twice")
    return value, rest


def require_writable(path: Path, flag: str = "--json") -> None:
    """Refuse a file that could not be written, before the work and not after it."""
    folder = path.resolve().parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"{flag} must name a file that can be written, got {str(path)!r}")


def _one_line(box: str) -> str:
    """Take the message out of the box the parser draws: what stands between its title and its first inner rule."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box)
    lines = [line.strip(" │") for line in plain.splitlines()][1:]
    rules = [number for number, line in enumerate(lines) if re.fullmatch("[─-]{5,}", line)]
    first = 1 if rules[:1] == [0] else 0
    last = next((rule for rule in rules if rule > first), len(lines))
    return f"{' '.join(lines[first:last])} (see convnn --help)"

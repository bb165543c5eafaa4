"""The ``convnn`` command. Nothing here imports torch before there is work to do, so that help answers at once."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

# What a command ends with: 0, all is well; 1, what it checked does not hold; 2, it was asked for the impossible.
HOLDS, FAILS, MISUSED = 0, 1, 2


@dataclass(frozen=True)
class Verify:
    """Compare the operator and its layers with torch's own convolutions and attention."""

    cases: int = 20
    """random cases per row"""
    seed: int = 0
    """where the random cases start"""
    json: Path | None = None
    """also write the table to this file"""

    def run(self) -> int:
        """Print the table; 1 if any row differs."""
        if self.cases < 1:
            raise ValueError(f"--cases must be at least 1, got {self.cases}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"--seed must be from 0 to 2**63 - 1, got {self.seed}")
        if self.json is not None:
            _require_writable(self.json)
        from convnn_lab import verify

        rows = verify.compare(self.cases, self.seed)
        verify.show(rows)
        if self.json is not None:
            self.json.write_text(verify.as_json(rows, self.cases, self.seed))
        return HOLDS if all(row.holds for row in rows) else FAILS


COMMANDS: dict[str, Callable[..., Verify]] = {"verify": Verify}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; a wrong call is answered in one line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if list(arguments) == ["--version"]:
            from importlib.metadata import version

            sys.stdout.write(f"convnn {version('convnn')}\n")
            return HOLDS
        return _parse(arguments).run()
    except (ValueError, OSError) as error:
        sys.stderr.write(f"convnn: {error}\n")
        return MISUSED
    except KeyboardInterrupt:
        sys.stderr.write("convnn: interrupted\n")
        return 130


def _parse(arguments: Sequence[str]) -> Verify:
    try:
        import tyro
    except ModuleNotFoundError:
        raise ValueError("the command needs the laboratory: pip install 'convnn[lab]'") from None
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.extras.subcommand_cli_from_dict(
                COMMANDS,
                prog="convnn",
                description="Convolution and attention as one operator over nearest neighbours.",
                args=arguments,
            )
    except SystemExit as end:
        if not end.code:
            raise
        raise ValueError(_one_line(said.getvalue())) from None


def _one_line(box: str) -> str:
    """Take the message out of the box the parser draws: what stands between its title and its first inner rule."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box)
    lines = [line.strip(" │") for line in plain.splitlines()][1:]
    rules = [number for number, line in enumerate(lines) if re.fullmatch("[─-]{5,}", line)]
    first = 1 if rules[:1] == [0] else 0
    last = next((rule for rule in rules if rule > first), len(lines))
    return f"{' '.join(lines[first:last])} (see convnn --help)"


def _require_writable(path: Path) -> None:
    """Refuse a file that could not be written, before the work and not after it."""
    folder = path.resolve().parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"--json must name a file that can be written, got {str(path)!r}")


if __name__ == "__main__":
    sys.exit(main())

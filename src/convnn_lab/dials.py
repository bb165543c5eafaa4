"""The command that shows where a run's layers settled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from convnn_lab.parsing import require_writable


@dataclass(frozen=True)
class Dial:
    """Show where the layers of a run settled between convolution, 0, and attention, 1."""

    run: Path
    """its folder"""
    weights: Literal["last", "best", "average"] = "last"
    plot: Path | None = None
    """where the figure goes; dial.png in the run's folder unless told"""
    json: Path | None = None
    """also write it to this file"""

    def run_it(self) -> int:
        """Print a line for every layer or head, and draw them."""
        for flag, path in (("--json", self.json), ("--plot", self.plot)):
            if path is not None:
                require_writable(path, flag)
        from convnn_lab.train import dial, store

        shares = dial.read(self.run, self.weights)
        dial.show(shares)
        dial.draw(self.run / "dial.png" if self.plot is None else self.plot, shares, dial.rows_of(self.run))
        if self.json is not None:
            store.write_json(self.json, shares)
        return 0

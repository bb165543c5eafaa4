"""The commands that look into a run."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from convnn_lab.parsing import require_writable


@dataclass(frozen=True)
class Kernels:
    """Show how the kernels of a run have moved, by layer, rank and epoch, and draw them."""

    run: Path
    """its folder"""
    output: Path | None = None
    """the figure; kernels.png in the folder unless told"""
    layer: str | None = None
    """whose kernel is drawn by channel and rank; the one that moved most unless told"""
    csv: Path | None = None
    """also write mean, deviation and distances by layer, epoch and rank to this file"""

    def run_it(self) -> int:
        """Print the table and draw the figure."""
        target = self.run / "kernels.png" if self.output is None else self.output
        if self.csv is not None:
            require_writable(self.csv, "--csv")
        from convnn_lab import kernels
        from convnn_lab.train.kernels import read
        from convnn_lab.train.run import Run

        moved = read(Run.open(self.run))
        if self.output is not None:
            require_writable(target, "--output")
        kernels.draw(target, moved, self.layer)
        kernels.show(self.run.name, moved)
        sys.stdout.write(f"{target}\n")
        if self.csv is not None:
            kernels.write_csv(self.csv, moved)
        return 0

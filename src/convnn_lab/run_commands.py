"""The commands that look into a run, or take a file for others out of it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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


@dataclass(frozen=True)
class Export:
    """Write the model of a run as a file for others: convnn export RUN model.onnx."""

    run: Path
    """its folder"""
    path: Path
    """the file; what it ends with says the format unless --format does"""
    format: Literal["onnx", "pt2", "safetensors"] | None = None
    """ONNX; a program of torch.export; or weights, with what rebuilds their model"""
    weights: Literal["last", "best", "average"] = "last"
    """of the last epoch, of the best, or the average of --ema"""

    def run_it(self) -> int:
        """Write it, and say for which sizes it is."""
        kind = self.format or self.path.suffix.lstrip(".")
        if kind not in ("onnx", "pt2", "safetensors"):
            raise ValueError(f"{self.path} must end with .onnx, .pt2 or .safetensors, or say --format")
        if not (self.run / "config.json").exists():
            raise ValueError(f"{self.run} holds no run: there is no config.json in it")
        from convnn_lab import export

        done = export.export(self.run, self.path, kind, self.weights)
        sys.stdout.write(f"{done.path}, {done.path.stat().st_size:,} bytes\n")
        for name, (least, most) in done.sizes.items():
            span = f"{least} and more" if most is None else str(least) if least == most else f"{least} to {most}"
            sys.stdout.write(f"{name:7}{span}\n")
        if done.difference is not None:
            sys.stdout.write(f"run once more on other sizes, it is within {done.difference:.1e} of the model\n")
        return 0

"""Seconds per epoch of CIFAR's 50,000 images in `convnn train`, by how steps are launched.

python benchmarks/train.py [--models vgg11 vit_tiny] [--precisions tf32 float32 bf16] [--steps 20] [--csv FILE]

On random images: compiled and recorded, recorded, and kernel by kernel. The first steps of every run are not
counted; the time of the others is scaled to an epoch, without its test. Ratios are to the first network of a group.
Lines are added to the file as they are measured.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

from convnn_lab.bench import epochs, measure, report

# What a column is called, and how steps are launched in it.
WAYS: dict[str, dict[str, bool]] = {
    "compiled": {"recorded": True, "compiled": True},
    "graph": {"recorded": True},
    "eager": {"recorded": False},
}


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--models", nargs="+", choices=list(epochs.VARIANTS), default=list(epochs.VARIANTS))
    asked.add_argument(
        "--precisions", nargs="+", choices=["tf32", "float32", "bf16"], default=["tf32", "float32", "bf16"]
    )
    asked.add_argument("--steps", type=int, default=20)
    asked.add_argument("--csv", type=Path)
    given = asked.parse_args()
    if given.steps < 1:
        asked.error(f"--steps must be at least 1, got {given.steps}")
    measure.require_device()
    about = report.surroundings()
    print(report.headline(about))
    print(f"{'seconds per epoch':42}" + "".join(f"{way:>10}{'ratio':>7}" for way in WAYS), flush=True)
    for model in given.models:
        for precision in given.precisions:
            first: list[float] = []
            for name, variant in epochs.VARIANTS[model].items():
                took = [epochs.seconds(variant, precision, steps=given.steps, **how) for how in WAYS.values()]
                first = first or took
                cells = "".join(f"{now:10.2f}{now / base:7.2f}" for now, base in zip(took, first, strict=True))
                print(f"{f'{model}, {precision}, {name}':42}{cells}", flush=True)
                row = {"model": model, "precision": precision, "network": name, **dict(zip(WAYS, took, strict=True))}
                if given.csv is not None:
                    add(row | about, given.csv)


def add(row: dict[str, Any], to: Path) -> None:
    """Add a line to a file, which names its columns first."""
    new = not to.exists()
    if not new and to.read_text().partition("\n")[0] != ",".join(row):
        raise ValueError(f"{to} has other columns than {', '.join(row)}; name another file")
    with to.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        if new:
            writer.writeheader()
        writer.writerow(row)


if __name__ == "__main__":
    main()

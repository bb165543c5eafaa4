"""Seconds per epoch of CIFAR's 50,000 images in `convnn train`, by how steps are launched.

python benchmarks/train.py [--models vgg11 vit_tiny] [--precisions tf32 float32 bf16] [--ways compiled graph eager]
                           [--networks WORD ...] [--steps 20] [--csv FILE] [--kernels FILE]

On random images: compiled and recorded, recorded, and kernel by kernel. The first steps of every run are not
counted; the time of the others is scaled to an epoch, without its test. Ratios are to the first network of a group.
Lines are added to files as they are measured. What steps are made of is watched in runs of its own.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from convnn_lab.bench import epochs, measure, report
from convnn_lab.bench.epochs import Variant, Way

# What a column is called, and how steps are launched in it.
WAYS: dict[str, dict[str, bool]] = {
    "compiled": {"recorded": True, "compiled": True},
    "graph": {"recorded": True},
    "eager": {"recorded": False},
}
LEAST = 0.01  # of a step: what takes less is not named
WHAT = ("what", "launches", "ms")


def main(arguments: Sequence[str] | None = None) -> None:
    given = told(arguments)
    measure.require_device()
    about = report.surroundings()
    whose = ("model", "precision", "network")
    for path, names in ((given.csv, (*WAYS, *about)), (given.kernels, ("way", *WHAT, *about))):
        require(path, (*whose, *names))
    print(report.headline(about))
    print(f"{'seconds per epoch':42}" + "".join(f"{way:>10}{'ratio':>7}" for way in given.ways), flush=True)
    for model in given.models:
        for precision in given.precisions:
            first: list[float] = []
            for name, variant in chosen(model, given.networks).items():
                ways = {way: Way(precision, **WAYS[way]) for way in given.ways}
                took = [epochs.seconds(variant, way, steps=given.steps) for way in ways.values()]
                first = first or took
                cells = "".join(f"{now:10.2f}{now / base:7.2f}" for now, base in zip(took, first, strict=True))
                print(f"{f'{model}, {precision}, {name}':42}{cells}", flush=True)
                row = {"model": model, "precision": precision, "network": name}
                if given.csv is not None:
                    every = dict.fromkeys(WAYS, "") | dict(zip(ways, took, strict=True))
                    add(row | every | about, given.csv)
                if given.kernels is not None:
                    for (launched, way), epoch in zip(ways.items(), took, strict=True):
                        step = 1000 * epoch * variant.recipe.batch / epochs.IMAGES
                        for line in parts(variant, way, given.steps, step):
                            add(row | {"way": launched} | line | about, given.kernels)


def told(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What is asked for; what cannot be is refused."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--models", nargs="+", choices=list(epochs.VARIANTS), default=list(epochs.VARIANTS))
    asked.add_argument(
        "--precisions", nargs="+", choices=["tf32", "float32", "bf16"], default=["tf32", "float32", "bf16"]
    )
    asked.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    asked.add_argument("--networks", nargs="+", default=[""], help="those of these names, or whose names contain one")
    asked.add_argument("--steps", type=int, default=20)
    asked.add_argument("--csv", type=Path)
    asked.add_argument("--kernels", type=Path, help="also write what steps are made of")
    given = asked.parse_args(arguments)
    if given.steps < 1:
        asked.error(f"--steps must be at least 1, got {given.steps}")
    for word in given.networks:
        if not any(chosen(model, [word]) for model in given.models):
            there = ", ".join(repr(name) for model in given.models for name in epochs.VARIANTS[model])
            asked.error(f"--networks must be words of {there}, got {word!r}")
    return given


def chosen(model: str, words: list[str]) -> dict[str, Variant]:
    """The networks of a model that a word names, or whose names contain it."""
    there = epochs.VARIANTS[model]
    named = {name for word in words for name in there if name == word or (word not in there and word in name)}
    return {name: each for name, each in there.items() if name in named}


def parts(variant: Variant, way: Way, steps: int, step: float) -> list[dict[str, Any]]:
    """A step of so many ms as it was timed, the sum of its kernels as they were watched, and the longest of these."""
    found = epochs.kernels(variant, way, steps=steps)
    whole = sum(each.ms for each in found)
    named = [(each.name[:100], f"{each.launches:.1f}", each.ms) for each in found if each.ms >= LEAST * whole]
    lines = [("a whole step", "", step), ("all kernels", f"{sum(each.launches for each in found):.1f}", whole), *named]
    return [dict(zip(WHAT, (what, launches, f"{ms:.3f}"), strict=True)) for what, launches, ms in lines]


def require(path: Path | None, names: tuple[str, ...]) -> None:
    """Refuse a file that is there with other columns."""
    if path is not None and path.exists() and path.read_text().partition("\n")[0] != ",".join(names):
        raise ValueError(f"{path} has other columns than {', '.join(names)}; name another file")


def add(row: Mapping[str, Any], to: Path) -> None:
    """Add a line to a file, which names its columns first."""
    require(to, tuple(row))
    new = not to.exists()
    with to.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        if new:
            writer.writeheader()
        writer.writerow(row)


if __name__ == "__main__":
    main()

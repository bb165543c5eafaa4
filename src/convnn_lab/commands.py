"""The commands that take a recipe and its flags, and those that take a run."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from convnn_lab.parsing import parse, require_writable, taken
from convnn_lab.recipes import RECIPES, Recipe, named

CONVOLUTIONAL, TRANSFORMERS = "conv,hybrid,convnn,attention", "attention,kvt,convnn"
EMA = "0.999"

TRAIN = """usage: convnn train RECIPE [--FLAG VALUE ...] [--output DIR]
       convnn train --from RUN [--FLAG VALUE ...] [--output DIR]
       convnn train --resume RUN [--max-time TIME] [--data-dir DIR]

recipes: {recipes}
convnn train RECIPE --help lists the flags with what the recipe sets them to.
"""
SWEEP = """usage: convnn sweep RECIPE --FLAG VALUE [VALUE ...] ... [--output DIR]
       convnn compare RECIPE [--layers A,B,...] [--FLAG VALUE ...] [--output DIR]

A flag with several values is varied; every combination is run. What has finished is not run again, what was stopped
is resumed. The folder then holds table.csv and curves.png beside the runs.

recipes: {recipes}
"""


@dataclass(frozen=True)
class Train:
    """Train a recipe, or go on with a run: convnn train RECIPE, convnn train --resume RUN."""


@dataclass(frozen=True)
class Sweep:
    """Train every combination of some fields: convnn sweep RECIPE --ratio 0 .25 .5 --seed 0 1 2."""


@dataclass(frozen=True)
class Compare:
    """Train a recipe with several layers: convnn compare RECIPE --layers conv,hybrid,convnn,attention."""


@dataclass(frozen=True)
class Eval:
    """Test a run again: exact numbers over all samples, on one device."""

    run: Path
    """its folder"""
    weights: Literal["last", "best", "average"] = "last"
    """of the last epoch, of the best, or the average of --ema"""
    data_dir: Path | None = None
    """where the data set is now, if it moved"""
    json: Path | None = None
    """also write it to this file"""

    def run_it(self) -> int:
        """Print the numbers."""
        if self.json is not None:
            require_writable(self.json)
        from convnn_lab.train import evaluate, store

        told = evaluate.evaluate(self.run, self.weights, self.data_dir)
        said = f"{told['bits']:.3f} bits per character, " if "bits" in told else ""
        said += f"top-1 {100 * told['top1']:.2f} %, top-5 {100 * told['top5']:.2f} %, loss {told['loss']:.4f}"
        sys.stdout.write(f"{said} over {told['samples']:,} samples\n")
        if self.json is not None:
            store.write_json(self.json, told)
        return 0


@dataclass(frozen=True)
class Predict:
    """Say what a run sees in pictures."""

    run: Path
    """its folder"""
    images: tuple[Path, ...]
    """pictures"""
    top: int = 5
    """how many classes to name"""
    weights: Literal["last", "best", "average"] = "last"

    def run_it(self) -> int:
        """Print the classes of each picture."""
        if self.top < 1:
            raise ValueError(f"--top must be at least 1, got {self.top}")
        if not self.images:
            raise ValueError("name at least one picture")
        from convnn_lab.train import evaluate

        for path, seen in zip(
            self.images, evaluate.predict(self.run, self.images, self.top, self.weights), strict=True
        ):
            said = ", ".join(f"{name} {100 * share:.1f} %" for name, share in seen)
            sys.stdout.write(f"{path}: {said}\n")
        return 0


def train(arguments: list[str]) -> int:
    """Run ``convnn train``."""
    _help(arguments, TRAIN)
    resumed, rest = taken(arguments, "--resume")
    if resumed is not None:
        return _resume(Path(resumed), rest)
    name, base, rest = _base(rest, TRAIN)
    output, rest = taken(rest, "--output")
    recipe = read(name, base, rest)
    from convnn_lab.train import build, fit

    said = {word.split("=")[0].lstrip("-").replace("-", "_") for word in rest if word.startswith("--")}
    for field in sorted(build.irrelevant(recipe) & said):
        flag = f"--{field.replace('_', '-')}"
        raise ValueError(f"{flag} means nothing to {recipe.model} with layer {recipe.layer}; leave it out")
    run = fit.train(name, recipe, None if output is None else Path(output))
    return _said(run)


def _resume(folder: Path, rest: list[str]) -> int:
    limit, rest = taken(rest, "--max-time")
    moved, rest = taken(rest, "--data-dir")
    if rest:
        raise ValueError(f"a resumed run keeps its recipe, but for --max-time and --data-dir; got {' '.join(rest)}")
    from convnn_lab.train import fit
    from convnn_lab.train.run import Run

    if Run.open(folder).finished:
        sys.stdout.write(f"{folder} has finished already\n")
        return 0
    return _said(fit.resume(folder, max_time=limit, data_dir=None if moved is None else Path(moved)))


def _said(run: Any) -> int:
    from convnn_lab.train.measure import measure
    from convnn_lab.train.surroundings import global_rank

    summary = run.summary() if global_rank(run.recipe()[1].devices) == 0 else None
    if summary is not None and summary["status"] == "finished":
        by = measure(run.recipe()[1])
        said = by.said(summary["final"][f"val_{by.name}"])
        sys.stdout.write(f"{run.folder}: {said} after {summary['epochs']} epochs\n")
    return 130 if run.interrupted else 0


def compare(arguments: list[str]) -> int:
    """Run ``convnn compare``: a sweep over layers."""
    _help(arguments, SWEEP)
    layers, rest = taken(arguments, "--layers")
    name, base, rest = _base(rest, SWEEP)
    layers = layers or (TRANSFORMERS if base.model.startswith(("vit", "gpt")) else CONVOLUTIONAL)
    chosen = [layer for layer in layers.split(",") if layer]
    if len(set(chosen)) != len(chosen) or len(chosen) < 2:
        raise ValueError(f"--layers must name several layers, each once, got {layers}")
    if any(word.split("=")[0] == "--layer" for word in rest):
        raise ValueError("layers are compared by --layers A,B,...; leave out --layer")
    return _swept("compare", name, base, [*rest, "--layer", *chosen])


def sweep(arguments: list[str]) -> int:
    """Run ``convnn sweep``."""
    _help(arguments, SWEEP)
    return _swept("sweep", *_base(arguments, SWEEP))


def _swept(kind: str, name: str, base: Recipe, rest: list[str]) -> int:
    output, rest = taken(rest, "--output")
    limit, rest = taken(rest, "--max-time")
    fixed, axes = grid(rest)
    from convnn_lab.recipes.limits import seconds
    from convnn_lab.train import sweep as several
    from convnn_lab.train.surroundings import global_rank

    def combined(differs: Mapping[str, str]) -> Recipe:
        varied = [word for field, value in differs.items() for word in (f"--{field.replace('_', '-')}", value)]
        return read(name, base, [*fixed, *varied])

    points = several.points(axes, combined)
    folder = Path("runs") / f"{kind}-{name}" if output is None else Path(output)
    allowed = None if limit is None else seconds("--max-time", limit)
    results = several.run_all(name, folder, points, max_seconds=allowed)
    if global_rank(points[0].recipe.devices):
        return 0
    several.show(f"{name}: {kind}", results)
    done = sum(len(each.finals) + each.failed for each in results)
    left = (
        "" if done == len(points) else f"; {len(points) - done} runs are left, and the same command goes on with them"
    )
    sys.stdout.write(f"{folder}/table.csv, {folder}/curves.png{left}\n")
    return 1 if any(each.failed for each in results) else 0


def grid(arguments: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Part flags with one value or none from those with several, which are varied."""
    fixed: list[str] = []
    axes: dict[str, list[str]] = {}
    flag, values = "", list[str]()
    for word in [*arguments, "--"]:
        if not word.startswith("--"):
            values.append(word)
            continue
        if len(values) > 1:
            axes[flag.lstrip("-").replace("-", "_")] = values
        else:
            fixed += [*([flag] if flag else []), *values]
        flag, values = word, []
    return fixed, axes


def read(name: str, base: Recipe, arguments: Sequence[str]) -> Recipe:
    """A recipe with some fields set by flags."""
    words = list(arguments)
    for place, word in enumerate(words):
        if word == "--ema" and (place + 1 == len(words) or words[place + 1].startswith("-")):
            words.insert(place + 1, EMA)
    said = {word.split("=")[0] for word in words}
    # The two say the same thing: what was asked for outweighs what the recipe sets.
    if "--accumulate" in said and "--device-batch" not in said:
        base = replace(base, device_batch=None)
    described = f"Train {name}; what stands in brackets is what the recipe sets."
    recipe: Recipe = parse(Recipe, words, prog=f"convnn train {name}", description=described, default=base)
    return recipe


def _base(arguments: list[str], usage: str) -> tuple[str, Recipe, list[str]]:
    """What the flags start from: a recipe by name, or that of a run."""
    from_run, rest = taken(arguments, "--from")
    if from_run is not None:
        from convnn_lab.train.run import Run

        name, recipe = Run.open(Path(from_run)).recipe()
        return name, recipe, rest
    if not rest or rest[0].startswith("-"):
        first = usage.splitlines()[0].removeprefix("usage: ")
        raise ValueError(f"a recipe comes first: {first}; there are {', '.join(RECIPES)}")
    return rest[0], named(rest[0]), rest[1:]


def _help(arguments: Sequence[str], usage: str) -> None:
    """Print how a command is called, where nothing more was said."""
    if list(arguments) in ([], ["--help"], ["-h"]):
        sys.stdout.write(usage.format(recipes=", ".join(RECIPES)))
        raise SystemExit(0 if arguments else 2)


BY_RECIPE = {"train": train, "sweep": sweep, "compare": compare}

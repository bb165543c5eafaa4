"""From the row of a table to the run that repeats it: its recipe, its folder, its command. Needs no torch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from convnn_lab.recipes import RECIPES, Recipe
from convnn_lab.recipes.recipe import Precision
from convnn_lab.tables import TABLES, Row, Table

NAMES = {"vgg11": "vgg11", "vit_tiny": "vit-tiny", "resnet50": "resnet50", "vit_base": "vit-base"}
# What published models are without a word; said twice it would be two recipes of one run.
UNSAID = {"kernel_size": 3, "kernel": "depthwise", "patch": 1, "position": None}
# What says nothing of what a run ends with.
ASIDE: dict[str, Any] = {"data_dir": None, "max_time": None, "save_every": "1m"}


@dataclass(frozen=True)
class Told:
    """What a call says of all its runs; None leaves it to the recipe."""

    epochs: int | None = None
    precision: Precision | None = None
    deterministic: bool = False
    compile: bool = False
    data_dir: Path | None = None
    save_every: str = "5m"


@dataclass(frozen=True)
class Job:
    """One run that rows ask for."""

    recipe_name: str
    recipe: Recipe
    folder: Path

    @property
    def command(self) -> str:
        """What starts the run in its folder."""
        return shlex.join(["convnn", *self.words])

    @property
    def again(self) -> str:
        """What repeats the run, in a folder of its own."""
        base = RECIPES[self.recipe_name]
        flags = differences(base, replace(self.recipe, save_every=base.save_every))
        return shlex.join(["convnn", "train", self.recipe_name, *flags])

    @property
    def words(self) -> list[str]:
        """The arguments of the command."""
        flags = differences(RECIPES[self.recipe_name], self.recipe)
        return ["train", self.recipe_name, *flags, "--output", str(self.folder)]


def trained(row: Row) -> bool:
    """Whether a row is a model; the others are single layers."""
    return "model" in row.configuration


def recipe_of(row: Row) -> tuple[str, Recipe]:
    """The recipe a row was run by, with its name."""
    told = dict(row.configuration)
    name = told.pop("recipe", None) or f"{NAMES[told['model']]}-{row.dataset}"
    base = RECIPES[name]
    searched = told.pop("candidates", "all" if told.get("layer") == "kvt" else None)
    if searched is not None:
        of = {"random": "random:", "spatial": "grid:"}.get(searched)
        told["candidates"] = f"{of}{told.pop('r')}" if of else base.candidates and "all"
    told["position"] = "scaled_concat" if told.get("position") and told.get("ratio") != 0 else None
    known = {each.name for each in fields(Recipe)} - {"epochs"}
    said = {key: value for key, value in told.items() if key in known and (key, value) not in UNSAID.items()}
    return name, replace(base, dataset=row.dataset, **said)


def slug(row: Row) -> str:
    """The name of a row's folder."""
    return re.sub(r"[^a-z0-9.]+", "-", f"{row.dataset} {row.label}".lower()).strip("-")


def homes(output: Path) -> dict[Recipe, Path]:
    """Where the runs of a recipe are: with the first row of all tables that has it, so that none is trained twice."""
    found: dict[Recipe, Path] = {}
    for table in TABLES.values():
        for row in table.rows:
            if trained(row):
                found.setdefault(recipe_of(row)[1], output / table.name / slug(row))
    return found


def jobs(rows: Sequence[Row], seeds: Sequence[int], output: Path, told: Told) -> list[list[Job]]:
    """The runs of every row, one for each seed; rows alike have the same."""
    there = homes(output)
    return [[_job(row, seed, there, told) for seed in seeds] for row in rows]


def _job(row: Row, seed: int, there: dict[Recipe, Path], told: Told) -> Job:
    name, recipe = recipe_of(row)
    folder = there.get(recipe)
    if folder is None:
        raise ValueError(f"{row.label} on {row.dataset} is in no table")
    given: dict[str, Any] = {"epochs": told.epochs, "precision": told.precision}
    given = {key: value for key, value in given.items() if value is not None}
    given |= {"deterministic": told.deterministic, "compile": told.compile, "save_every": told.save_every}
    recipe = replace(recipe, **given, seed=seed, data_dir=data_of(row.dataset, told.data_dir))
    return Job(name, recipe, folder / f"seed-{seed}")


def data_of(dataset: str, data_dir: Path | None) -> Path | None:
    """Where a data set is: in the folder of its name, or in the folder itself."""
    if data_dir is None:
        return None
    own = data_dir / dataset
    return (own if own.exists() else data_dir).resolve()


def plain(recipe: Recipe) -> Recipe:
    """A recipe without what says nothing of its numbers."""
    return replace(recipe, **ASIDE)


def differences(base: Recipe, recipe: Recipe) -> list[str]:
    """The flags that lead from one recipe to another."""
    flags: list[str] = []
    for each in fields(Recipe):
        value = getattr(recipe, each.name)
        if value == getattr(base, each.name):
            continue
        word = each.name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{word}" if value else f"--no-{word}")
        else:
            flags += [f"--{word}", str(value)]
    return flags


def chosen(table: Table, words: Sequence[str], datasets: Sequence[str]) -> list[Row]:
    """The rows of a table by words of their labels and by data set; all unless told."""
    for dataset in datasets:
        if dataset not in {row.dataset for row in table.rows}:
            there = ", ".join(dict.fromkeys(row.dataset for row in table.rows))
            raise ValueError(f"{table.name} has no rows on {dataset!r}; there are {there}")
    rows = [row for row in table.rows if not datasets or row.dataset in datasets]
    named = [_named(rows, word, table) for word in words]
    return [row for row in rows if not words or any(row in each for each in named)]


def _named(rows: Sequence[Row], word: str, table: Table) -> list[Row]:
    """The rows of this label; if there are none, those whose labels contain it."""
    exact = [row for row in rows if row.label.lower() == word.lower()]
    found = exact or [row for row in rows if word.lower() in row.label.lower()]
    if not found:
        labels = ", ".join(repr(label) for label in list(dict.fromkeys(row.label for row in rows))[:8])
        raise ValueError(f"no row of {table.name} is called {word!r}; there are {labels}, ...")
    return found

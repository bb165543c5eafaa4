"""Which rows of the thesis a run repeats."""

from __future__ import annotations

from collections.abc import Iterator

from convnn_lab.recipes import Recipe
from convnn_lab.tables import TABLES, Row

SAME_FOR_ALL = {"candidates": "all", "patch": 1, "position": False, "heads": 1, "kernel": "depthwise", "kernel_size": 3}
RUNS = {"cifar10": (150, 1e-4), "cifar100": (150, 1e-4), "imagenet": (300, 1e-3)}
"""epochs and learning rate, where a row does not say"""
VARIED = ("lr", "epochs", "fused", "batch")


def rows(recipe: Recipe) -> Iterator[tuple[str, Row]]:
    """The rows of a recipe's model, data set, rate and epochs, each with the name of its table."""
    if not recipe.published:
        return
    asked = _asked(recipe)
    for name, table in TABLES.items():
        for row in table.rows:
            told = dict(row.configuration)
            usual = RUNS.get(row.dataset, (recipe.epochs, recipe.lr))
            epochs, rate = told.pop("epochs", usual[0]), told.pop("lr", usual[1])
            told = {key: value for key, value in told.items() if key not in VARIED and not key.startswith("printed")}
            same = {**SAME_FOR_ALL, **told} == {**SAME_FOR_ALL, **asked}
            if row.dataset == recipe.dataset and same and (epochs, rate) == (recipe.epochs, recipe.lr):
                yield name, row


def _asked(recipe: Recipe) -> dict[str, object]:
    """The recipe as the configuration of a row."""
    ratio = 0.5 if recipe.ratio is None else recipe.ratio
    asked: dict[str, object] = {"model": recipe.model, "layer": recipe.layer}
    kind, _, count = (recipe.candidates or "all").replace("grid", "spatial").partition(":")
    searches = recipe.layer in ("hybrid", "convnn", "kvt")
    if recipe.model == "vgg11":
        asked |= {"layer": "hybrid", "ratio": {"conv": 0.0, "convnn": 1.0}.get(recipe.layer, ratio)}
        searches = bool(asked["ratio"])
    elif recipe.layer == "hybrid":
        asked["ratio"] = ratio
    if searches:
        asked |= {"k": recipe.k or 9, "candidates": kind} | ({"r": int(count)} if count else {})
        asked |= {"position": recipe.position is not None, "patch": recipe.patch or 1}
    if recipe.model.startswith("vit"):
        asked["heads"] = recipe.heads or 1
        asked.pop("patch", None)
    return asked

"""From the fields of a recipe to the model they name."""

from __future__ import annotations

from typing import Any

from torch import nn

from convnn import models
from convnn.blend import Blend, cells
from convnn.candidates import grid, random
from convnn.descriptor import scaled_concat
from convnn.layers.windows import Nearness
from convnn.models import gpt, vit
from convnn.selection import Selection, hard, soft, straight_through
from convnn_lab.recipes import Recipe
from convnn_lab.tables import presets

# What only layers that search can be told, and what only one of them can.
SEARCH = ("k", "candidates", "position", "similarity", "weighting", "selection", "blend", "dial")
SEARCHING = ("hybrid", "convnn", "kvt")


def build(recipe: Recipe, channels: int, size: int, classes: int, *, device: str | None = None) -> nn.Module:
    """Make the model of a recipe for images of so many channels and sides, or for texts of such a size.

    Example:
        >>> build(Recipe(layer="hybrid", ratio=0.25), channels=1, size=8, classes=10).fc.out_features
        10
    """
    _known(recipe.model)
    if recipe.published:
        return _published(recipe, classes, device)
    options: dict[str, Any] = {"layer": recipe.layer}
    if recipe.model.startswith("gpt"):
        options |= {"vocabulary": classes, "length": size}
    else:
        options |= {"in_channels": channels, "num_classes": classes}
    left = irrelevant(recipe)
    for name in (*SEARCH, "ratio", "heads", "patch", "kernel", "dropout", "stem", "width"):
        value = getattr(recipe, name)
        if value is not None and name not in left:
            options["blend" if name == "dial" else name] = _strategy(name, value, recipe, size)
    if recipe.model.startswith("vit"):
        options["image_size"] = size
    try:
        return models.create(recipe.model, **options, device=device)
    except TypeError as error:
        raise ValueError(f"{recipe.model} with layer {recipe.layer} does not take these options: {error}") from None


def irrelevant(recipe: Recipe) -> set[str]:
    """The fields that say nothing to the layer and the model of a recipe."""
    vit, vgg, gpt = (recipe.model.startswith(family) for family in ("vit", "vgg", "gpt"))
    said = {"patch"} if gpt else {"context"}
    if recipe.layer not in SEARCHING:
        said |= set(SEARCH) - ({"k"} if recipe.layer == "attention" and recipe.published else set())
    if recipe.layer != "hybrid":
        said.add("ratio")
    if recipe.layer == "kvt":
        said |= {"similarity", "weighting", "position", "blend", "dial"}
    if not (vit or gpt) and recipe.layer != "attention":
        said.add("heads")
    if not vit and recipe.layer not in ("hybrid", "convnn"):
        said.add("patch")
    if not (vit or vgg or gpt):
        said.add("dropout")
    if not recipe.model.startswith("resnet") or recipe.published:
        said |= {"stem", "width"}
    kernels = {"kernel": recipe.layer == "convnn" and (vit or gpt), "kernel_size": vgg and recipe.published}
    return said | {name for name, meant in kernels.items() if not meant}


def candidates(said: str | None) -> Any:
    """Candidates from a word such as random:32; None for all."""
    if said is None or said == "all":
        return None
    kind, _, count = said.partition(":")
    if kind not in ("random", "grid") or not count.isdigit():
        raise ValueError(f"--candidates must be all, random:R or grid:R, got {said!r}")
    return (random if kind == "random" else grid)(int(count))


def selection(said: str) -> Selection:
    """A selection from a word such as soft:0.1.

    Example:
        >>> selection("straight_through:0.5")
        straight_through(temperature=0.5)
    """
    kind, _, temperature = said.partition(":")
    kinds: dict[str, Any] = {"soft": soft, "straight_through": straight_through}
    try:
        return hard if said == "hard" else kinds[kind](float(temperature))
    except (KeyError, ValueError):
        raise ValueError(f"--selection must be hard, soft:T or straight_through:T, got {said!r}") from None


def _blend(share: float, recipe: Recipe, size: int, *, learned: bool) -> Blend:
    """A share of space and features: of the cells of a map, or of a ViT's patches or a text and what heads compare."""
    if recipe.model.startswith("gpt"):
        heads = recipe.heads or gpt.CONFIGURATIONS[recipe.model][2]
        return Blend(share, axes=1, features="scaled_dot", learned=learned, heads=heads if learned else None)
    if not recipe.model.startswith("vit"):
        return Blend(share, space=Nearness((3, 3), (1, 1)), learned=learned)
    _, _, heads, patch = vit.CONFIGURATIONS[recipe.model]
    side, heads = size // (recipe.patch or patch), recipe.heads or heads
    places = cells((side, side), class_tokens=1)
    return Blend(
        share, coordinates=places, features="scaled_dot", learned=learned, heads=heads if learned else None
    )  # fmt: skip


def _strategy(name: str, value: Any, recipe: Recipe, size: int) -> Any:
    if name == "candidates":
        return candidates(value)
    if name == "selection":
        return selection(value)
    if name in ("blend", "dial"):
        return _blend(value, recipe, size, learned=name == "dial")
    if name == "position" and value == "scaled_concat":
        return scaled_concat(0.5)
    return value


def _known(name: str) -> None:
    if name not in models.names():
        raise ValueError(f"unknown model {name!r}; known are {', '.join(models.names())}")


def _published(recipe: Recipe, classes: int, device: str | None) -> nn.Module:
    """The model as it was run; what was not varied then cannot be varied here."""
    for name in ("similarity", "weighting", "selection", "blend", "dial"):
        if getattr(recipe, name) is not None:
            raise ValueError(f"--{name} was not varied in the published models; say --no-published to choose it")
    dropout = 0.5 if recipe.model == "vgg11" else None if recipe.model == "resnet50" else 0.1
    if recipe.dropout not in (None, dropout):
        said = f"the published {recipe.model} has a dropout of {dropout}, got {recipe.dropout}"
        raise ValueError(f"{said}; say --no-published to choose it")
    if recipe.position not in (None, "scaled_concat"):
        raise ValueError(f"--position was scaled_concat in the published models, got {recipe.position!r}")
    row: dict[str, Any] = {"model": recipe.model, "layer": recipe.layer, "k": recipe.k or 9}
    row |= {"ratio": {"conv": 0.0, "convnn": 1.0}.get(recipe.layer, 0.5 if recipe.ratio is None else recipe.ratio)}
    row |= {"position": recipe.position is not None, "patch": recipe.patch or 1, "heads": recipe.heads or 1}
    candidates(recipe.candidates)  # refuses what it is not
    kind, _, count = (recipe.candidates or "all").replace("grid", "spatial").partition(":")
    row |= {"candidates": kind, **({"r": int(count)} if count else {})}
    row |= {name: value for name in ("kernel", "kernel_size") if (value := getattr(recipe, name)) is not None}
    family = {"vgg11": ("conv", "hybrid", "convnn"), "resnet50": ("conv", "hybrid", "convnn")}
    layers = family.get(recipe.model, ("attention", "convnn", "kvt", "local", "sparse"))
    if recipe.layer not in layers:
        raise ValueError(f"the published {recipe.model} has layers {', '.join(layers)}, got {recipe.layer!r}")
    if recipe.dataset not in presets.CLASSES or classes != presets.CLASSES[recipe.dataset]:
        known = ", ".join(presets.CLASSES)
        raise ValueError(f"published models are for {known}, got {recipe.dataset!r}; say --no-published")
    return presets.build(row, recipe.dataset, device=device)

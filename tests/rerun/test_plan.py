"""Every row of every table has one recipe, one folder and one command, and they are those of the published model."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from convnn_lab.commands import read
from convnn_lab.parsing import taken
from convnn_lab.recipes import RECIPES, Recipe
from convnn_lab.rerun import plan
from convnn_lab.tables import TABLES, Row, presets
from convnn_lab.train.build import build, irrelevant

TRAINED = [name for name in TABLES if not name.startswith("fast-")]


def model_of(recipe: Recipe) -> str:
    channels = presets.CHANNELS.get(recipe.dataset, 3)
    return repr(build(recipe, channels, recipe.image_size or 32, presets.CLASSES[recipe.dataset], device="meta"))


@pytest.mark.parametrize("name", ["vary-lambda", "vgg-k", "vit-kernels", "vit-candidates", "fashion-lambda"])
def test_the_recipe_of_a_row_builds_the_model_the_table_counts(name: str) -> None:
    rows = TABLES[name].rows
    for row in (rows[0], rows[len(rows) // 3], rows[-1]):
        assert model_of(plan.recipe_of(row)[1]) == repr(presets.build(row.configuration, row.dataset, device="meta"))


# What a model is where a row says nothing; ASIDE is not the model's.
DEFAULTS = {"k": 9, "candidates": "all", "position": False, "patch": 1, "kernel": "depthwise", "kernel_size": 3}
ASIDE = ("lr", "epochs", "fused")


@pytest.mark.parametrize("name", TRAINED)
def test_the_recipe_of_a_row_says_all_that_its_model_is_made_of(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(presets, "build", lambda row, dataset, **_: asked.append(row | {"dataset": dataset}))
    for row in TABLES[name].rows:
        model_of(plan.recipe_of(row)[1])
        told = {key: value for key, value in row.configuration.items() if key not in ASIDE}
        said = DEFAULTS | asked.pop()
        if not row.configuration.get("ratio", 1) or row.configuration["layer"] in (
            "attention",
            "local",
            "sparse",
            "conv",
        ):
            searching = {"k", "candidates", "r", "position"}  # of what searches nothing
            told, said = ({key: one[key] for key in one if key not in searching} for one in (told, said))
        wanted = DEFAULTS | {"heads": 1, "ratio": said["ratio"], "dataset": row.dataset} | told
        assert said == {key: wanted[key] for key in wanted if key in said}, row.label
        assert told.keys() <= said.keys(), row.label


def test_rows_are_run_as_their_recipe_says_but_for_what_they_vary() -> None:
    for name in TRAINED:
        for row in TABLES[name].rows:
            base, recipe = plan.recipe_of(row)
            assert RECIPES[base].epochs == recipe.epochs
            assert recipe.lr == row.configuration.get("lr", RECIPES[base].lr)
            assert (recipe.batch, recipe.weight_decay) == (RECIPES[base].batch, RECIPES[base].weight_decay)


def test_runs_alike_have_one_folder_and_others_have_their_own() -> None:
    homes = plan.homes(Path("out"))
    assert len(set(homes.values())) == len(homes)
    ratios = {row.label: row for row in TABLES["vary-lambda"].rows if row.dataset == "cifar10"}
    for table, label in (("vgg-patch", "Conv2D, patch 1"), ("vgg-lr", "Conv2D, learning rate 1e-4")):
        (row,) = [row for row in TABLES[table].rows if (row.label, row.dataset) == (label, "cifar10")]
        assert plan.recipe_of(row)[1] == plan.recipe_of(ratios["Conv2D, without positions"])[1]
    # Without neighbours no place is compared with another.
    assert plan.recipe_of(ratios["Conv2D, with positions"]) == plan.recipe_of(ratios["Conv2D, without positions"])
    assert plan.recipe_of(ratios["ConvNN, with positions"]) != plan.recipe_of(ratios["ConvNN, without positions"])
    assert homes[plan.recipe_of(ratios["ConvNN, with positions"])[1]] == Path(
        "out/vary-lambda/cifar10-convnn-with-positions"
    )


@pytest.mark.parametrize("name", TRAINED)
def test_the_command_of_a_row_gives_its_recipe_and_no_flag_it_would_refuse(name: str, tmp_path: Path) -> None:
    told = plan.Told(epochs=31, precision="bf16", deterministic=True, data_dir=tmp_path)
    for (job,) in plan.jobs(TABLES[name].rows[::9], [7], Path("out"), told):
        program, command, base, *words = shlex.split(job.command)
        output, words = taken(words, "--output")
        assert (program, command, output) == ("convnn", "train", str(job.folder))
        assert read(base, RECIPES[base], words) == job.recipe
        said = {word.lstrip("-").replace("-", "_") for word in words if word.startswith("--")}
        assert not said & irrelevant(job.recipe), job.command
        assert (job.recipe.epochs, job.recipe.precision, job.recipe.seed) == (31, "bf16", 7)


def test_a_data_set_is_in_its_own_folder_or_in_the_one_that_was_named(tmp_path: Path) -> None:
    (tmp_path / "cifar10").mkdir()
    assert plan.data_of("cifar10", tmp_path) == tmp_path / "cifar10"
    assert plan.data_of("cifar100", tmp_path) == tmp_path
    assert plan.data_of("cifar10", None) is None


def test_rows_are_chosen_by_words_and_data_sets() -> None:
    table = TABLES["vary-lambda"]

    def labels(rows: list[Row]) -> list[tuple[str, str]]:
        return [(row.label, row.dataset) for row in rows]

    found = plan.chosen(table, ["Conv2D, without", "0.5, without"], ["cifar10"])
    assert labels(found) == [("Conv2D, without positions", "cifar10"), ("Branching, 0.5, without positions", "cifar10")]
    assert len(plan.chosen(table, [], [])) == 36
    with pytest.raises(ValueError, match="no row of vary-lambda is called 'zebra'; there are 'Conv2D, without"):
        plan.chosen(table, ["zebra"], [])
    with pytest.raises(ValueError, match="vary-lambda has no rows on 'imagenet'; there are cifar10, cifar100"):
        plan.chosen(table, [], ["imagenet"])


def test_a_label_means_its_row_alone_and_every_word_must_mean_one() -> None:
    labels = {row.label for row in plan.chosen(TABLES["vit-k"], ["ConvNN, random, k = 1"], ["cifar10"])}
    assert labels == {"ConvNN, random, k = 1"}
    assert len(plan.chosen(TABLES["vit-k"], ["random, k = 1"], ["cifar10"])) > 1
    with pytest.raises(ValueError, match="no row of vary-lambda is called 'Brnching'"):
        plan.chosen(TABLES["vary-lambda"], ["Conv2D, without", "Brnching"], ["cifar10"])

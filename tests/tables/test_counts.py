"""Every row of every table, counted again: parameters, the thesis's GFLOPS, true operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from convnn import ConvNN2d
from convnn.candidates import Cells
from convnn_lab.reproduce import cut
from convnn_lab.tables import TABLES, Row
from convnn_lab.tables.flops import Flops, count
from convnn_lab.tables.presets import build, image_size

_SEEN: dict[str, tuple[int, Flops]] = {}


def counts(row: Row) -> tuple[int, Flops]:
    key = repr((row.dataset, sorted((k, v) for k, v in row.configuration.items() if k not in ("lr", "epochs"))))
    if key not in _SEEN:
        model = build(row.configuration, row.dataset, device="meta")
        flops = count(model, image_size(row.configuration), fused=bool(row.configuration.get("fused")))
        _SEEN[key] = sum(parameter.numel() for parameter in model.parameters()), flops
    return _SEEN[key]


# Where the thesis prints another number than its own architecture has; each row says why in its note.
TYPOS = {("vgg-patch", "Branching, 0.5, patch 2", "cifar100")}


@pytest.mark.parametrize("name", TABLES)
def test_every_row_counts_to_what_was_printed_and_logged(name: str) -> None:
    for row in TABLES[name].rows:
        if "model" not in row.configuration:
            continue
        parameters, flops = counts(row)
        said = f"{name}: {row.label}, {row.dataset}"
        if row.printed.parameters is not None:
            agrees = f"{cut(parameters / 1e6, 3)}M" == row.printed.parameters
            assert agrees != ((name, row.label, row.dataset) in TYPOS), said
            assert agrees or row.note, said
        if row.logged is not None:
            assert parameters == round(row.logged.parameters * 1e6), said
            assert flops.thesis == pytest.approx(row.logged.gflops * 1e9, abs=6), said
        elif row.printed.gflops is not None:
            digits = len(row.printed.gflops.partition(".")[2])
            assert cut(flops.thesis / 1e9, digits) == row.printed.gflops, said


RANDOM = {"k": 9, "candidates": "random", "r": 32}
SPATIAL = {"k": 9, "candidates": "spatial", "r": 128}
EXACT: list[Any] = [  # model, options, data, parameters, GFLOPS of the thesis's count to 8 digits, true GFLOPS
    ({"model": "vgg11", "ratio": 0.0}, "cifar10", 130_015_690, 0.29368320, 0.599),
    ({"model": "vgg11", "ratio": 0.5}, "cifar100", 130_384_420, 0.32607037, 0.632),
    ({"model": "vgg11", "ratio": 1.0, "position": True}, "cifar10", 130_015_690, 0.33130096, 0.637),
    ({"model": "vgg11", "ratio": 0.5, "patch": 2}, "cifar10", 199_152_778, 0.30754035, 1.071),
    ({"model": "vgg11", "ratio": 0.5, "patch": 2}, "cifar100", 199_521_508, 0.30827763, 1.072),
    ({"model": "vgg11", "ratio": 1.0, "patch": 2}, "cifar10", 268_289_866, 0.30754035, 1.530),
    ({"model": "vgg11", "ratio": 1.0, "patch": 2}, "cifar100", 268_658_596, 0.30827763, 1.530),
    ({"model": "vit_tiny", "layer": "attention"}, "cifar10", 5_479_306, 2.50793184, 2.507),
    ({"model": "vit_tiny", "layer": "local"}, "cifar10", 4_299_658, 1.99161926, 1.987),
    ({"model": "vit_tiny", "layer": "local"}, "cifar100", 4_317_028, 1.99165382, 1.987),
    ({"model": "vit_tiny", "layer": "kvt", "k": 100}, "cifar100", 5_496_676, 2.50843211, 2.507),
    ({"model": "vit_tiny", "layer": "sparse"}, "cifar10", 5_479_306, 2.50979467, 2.507),
    ({"model": "vit_tiny", "layer": "convnn", "k": 9}, "cifar10", 5_500_042, 2.33318496, 2.336),
    ({"model": "vit_tiny", "layer": "convnn", **RANDOM}, "cifar10", 5_500_042, 2.03742048, 2.041),
    ({"model": "vit_tiny", "layer": "convnn", "k": 9, "kernel": "separable"}, "cifar10", 5_942_410, 2.33318496, 2.511),
    ({"model": "vit_tiny", "layer": "convnn", "k": 9, "kernel": "standard"}, "cifar100", 9_477_988, 2.33321952, 3.897),
    ({"model": "resnet50", "layer": "conv"}, "imagenet", 25_583_592, 8.17836851, 8.178),
    ({"model": "resnet50", "layer": "convnn", "k": 9}, "imagenet", 25_557_032, 10.32144896, 13.327),
    ({"model": "resnet50", "layer": "hybrid", "k": 4}, "imagenet", 24_191_240, 10.65542042, 12.826),
    ({"model": "resnet50", "layer": "hybrid", **RANDOM, "k": 16, "r": 64}, "imagenet", 29_671_688, 5.68606720, 9.861),
    ({"model": "vit_base", "layer": "attention", "heads": 12}, "imagenet", 86_379_496, 35.13143885, 35.128),
    ({"model": "vit_base", "layer": "convnn", "heads": 1, "k": 16}, "imagenet", 86_526_952, 34.44516019, 34.470),
    ({"model": "vit_base", "layer": "convnn", "heads": 12, "k": 9}, "imagenet", 86_386_408, 34.43245133, 34.445),
    ({"model": "vit_base", "layer": "convnn", "heads": 1, **RANDOM}, "imagenet", 86_462_440, 31.49761613, 31.510),
    ({"model": "vit_base", "layer": "convnn", "heads": 12, **SPATIAL}, "imagenet", 86_386_408, 34.18190515, 34.194),
    ({"model": "vit_base", "layer": "kvt", "heads": 12, "k": 9}, "imagenet", 86_379_496, 35.13702734, 35.128),
]  # fmt: skip


@pytest.mark.parametrize("case", EXACT, ids=lambda case: f"{case[0]['model']}-{case[1]}-{case[2]}")
def test_counts_are_exact_to_the_last_digit(case: Any) -> None:
    configuration, dataset, parameters, convention, true = case
    made, flops = counts(Row("", dataset, configuration))
    assert made == parameters
    assert flops.thesis == pytest.approx(convention * 1e9, abs=6)
    assert flops.true / 1e9 == pytest.approx(true, abs=6e-4)


def test_a_fused_row_hides_its_aggregation_from_the_thesiss_count() -> None:
    plain, fused = (
        counts(Row("", "imagenet", {"model": "vit_base", "layer": "convnn", "heads": 12, "k": 25, "fused": fused}))[1]
        for fused in (False, True)
    )
    assert plain.thesis - fused.thesis == 12 * 197 * 25 * 768
    assert fused.thesis == pytest.approx(34.41611136e9, abs=6)
    assert plain.true == fused.true


def test_what_has_no_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no published model for None on 'none'"):
        build(TABLES["fast-speed"].rows[0].configuration, "none")


def true_gflops(row: Row) -> float | None:  # noqa: PLR0911 - one for each kind of row
    """Twice the multiplications with addition of the published architectures, counted by torch's own counter."""
    given = row.configuration
    among: Any = given.get("candidates", "all")
    k: Any = given.get("k")
    r: Any = given.get("r")
    if given["model"] == "vgg11":
        hundred = row.dataset == "cifar100"
        if given.get("patch", 1) == 2:
            return 1.530 if given["ratio"] == 1 else 1.072 if hundred else 1.071
        plain = {0.0: (0.599, 0.600)}.get(given["ratio"], (0.637, 0.637) if given.get("position") else (0.631, 0.632))
        return plain[hundred]
    if given["model"] == "vit_tiny":
        if given["layer"] != "convnn":
            return 1.986 if given["layer"] == "local" else 2.507
        kernels: dict[Any, float] = {"separable": 2.511, "standard": 3.897}
        return 2.041 if among != "all" else kernels.get(given.get("kernel"), 2.336)
    if given["model"] == "resnet50":
        whole = {"conv": 8.178, "convnn": 13.327}.get(given["layer"])
        some = {("all", None): {4: 12.826, 6: 13.160, 9: 13.661, 16: 14.830}, ("spatial", 25): {9: 8.582}}
        some |= {("random", 32): {4: 7.767, 6: 8.101, 9: 8.602, 16: 9.771}}
        some |= {("random", 48): {4: 7.812, 6: 8.146, 9: 8.647, 16: 9.816}}
        some |= {("random", 64): {4: 7.857, 6: 8.191, 9: 8.692, 16: 9.861}}
        return whole or some[among, r][k]
    if given["layer"] != "convnn":
        return 35.128
    sparse = {(1, 32): 31.510, (1, 128): 33.218, (12, 32): 33.846, (12, 128): 34.194}
    if among != "all":
        return sparse[given["heads"], r]
    return {4: 34.427, 9: 34.445, 16: 34.470}.get(k)  # of the fused kernels torch's counter sees nothing


@pytest.mark.parametrize(
    "name", ["vary-lambda", "vgg-patch", "vit-cifar", "vit-kernels", "resnet-imagenet", "vit-imagenet"]
)
def test_every_row_has_its_true_operations(name: str) -> None:
    checked = 0
    for row in TABLES[name].rows:
        expected = None if row.configuration.get("position") and not row.configuration["ratio"] else true_gflops(row)
        if expected is not None:
            # Some are rounded and some cut after three digits.
            ours = counts(row)[1].true / 1e9
            assert -5.1e-4 <= ours - expected < 1e-3, f"{row.label}, {row.dataset}: {ours} and {expected}"
            checked += 1
    assert checked >= len(TABLES[name].rows) - 2


@pytest.mark.parametrize(("side", "steps", "padding"), [(32, 4, 5), (16, 8, 15), (8, 4, 7), (8, 8, 21)])
def test_the_grid_stands_where_it_stood(side: int, steps: int, padding: int) -> None:
    row = next(row for row in TABLES["vgg-candidates"].rows if row.label.endswith(f"spatial, r = {steps}²"))
    model = build(row.configuration, "cifar10", device="meta")
    among: Any = next(each.candidates for each in model.modules() if isinstance(each, ConvNN2d))
    whole = side + 2
    chosen = among(torch.Size(), Cells((whole, whole)), torch.device("cpu"))
    places = torch.linspace(0, side - 1, steps).long().tolist()
    assert chosen.tolist() == [above * side + before for above in places for before in places]
    rim = [number for number in chosen.tolist() if {number // whole, number % whole} & {0, whole - 1}]
    assert len(rim) == padding
    assert among(torch.Size(), Cells((4, 4)), torch.device("cpu")) is None

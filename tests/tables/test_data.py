"""The tables say what the thesis and the author's logs say, and say it in one vocabulary."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from decimal import ROUND_DOWN, Decimal
from typing import Any

import pytest

from convnn_lab.tables import TABLES, Logged, Row

ROWS = {
    "vary-lambda": 36,
    "vgg-dynamics": 6,
    "vgg-lr": 18,
    "vgg-k": 78,
    "vgg-candidates": 126,
    "vgg-patch": 10,
    "vit-cifar": 16,
    "vit-cifar-dynamics": 4,
    "vit-k": 89,
    "vit-candidates": 52,
    "vit-kernels": 8,
    "resnet-imagenet": 19,
    "resnet-k": 9,
    "resnet-r": 13,
    "vit-imagenet": 21,
    "vit-heads": 6,
    "vit-imagenet-k": 10,
    "vit-imagenet-candidates": 4,
    "vit-dynamics": 30,
    "fast-speed": 2,
    "fast-correctness": 1,
    "fashion-lambda": 9,
}
COLUMNS = ("loss", "accuracy", "gflops", "parameters")
LAYERS = {
    "vgg11": {"hybrid"},
    "resnet50": {"conv", "hybrid", "convnn"},
    "vit_tiny": {"attention", "kvt", "local", "sparse", "convnn"},
    "vit_base": {"attention", "kvt", "convnn"},
    None: {"convnn"},
}
VALUES: dict[str, set[Any]] = {
    "model": {"vgg11", "vit_tiny", "resnet50", "vit_base"},
    "layer": {"conv", "hybrid", "convnn", "attention", "kvt", "local", "sparse"},
    "ratio": {n / 8 for n in range(9)},
    "k": {*range(1, 13), 16, 25, 36, 100},
    "kernel_size": {1, 2, 3},
    "candidates": {"all", "random", "spatial"},
    "r": {side**2 for side in range(4, 33, 2)} | set(range(16, 193, 16)) | {25},
    "position": {True},
    "patch": {1, 2},
    "kernel": {"depthwise", "separable", "standard"},
    "heads": {1, 12},
    "lr": {1e-3, 1e-4, 1e-5},
    "epochs": set(range(50, 301, 50)),
    "fused": {True},
    "batch": {4, 32},
    "tokens": {197},
    "width": {768},
}


def every_row() -> Iterator[tuple[str, Row]]:
    for table in TABLES.values():
        for row in table.rows:
            yield table.name, row


def find(table: str, dataset: str, label: str) -> Row:
    (row,) = [row for row in TABLES[table].rows if (row.dataset, row.label) == (dataset, label)]
    return row


def printed(table: str, dataset: str, label: str) -> tuple[str | None, ...]:
    row = find(table, dataset, label)
    return tuple(getattr(row.printed, column) for column in COLUMNS)


def logged(row: Row) -> Logged:
    assert row.logged is not None
    return row.logged


def truncated(value: float, like: str) -> str:
    """``value`` with as many digits as ``like``."""
    return str(Decimal(str(value)).quantize(Decimal(like), rounding=ROUND_DOWN))


def test_every_table_is_there_in_order_and_whole() -> None:
    assert [(name, len(table.rows)) for name, table in TABLES.items()] == list(ROWS.items())
    assert all(name == table.name and table.title for name, table in TABLES.items())


@pytest.mark.parametrize("name", ROWS)
def test_a_label_is_one_row_of_a_data_set(name: str) -> None:
    labels = [(row.dataset, row.label) for row in TABLES[name].rows]
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize("name", ROWS)
def test_rows_differ_in_configuration(name: str) -> None:
    configurations = [(row.dataset, sorted(row.configuration.items())) for row in TABLES[name].rows]
    assert all(one not in configurations[:place] for place, one in enumerate(configurations))


def test_configurations_use_the_documented_keys_and_values() -> None:
    for name, row in every_row():
        for key, value in row.configuration.items():
            if key.startswith("printed_"):
                assert float(value) >= 0
            else:
                assert value in VALUES[key], (name, row.label, key)
        model = row.configuration.get("model")
        assert row.configuration["layer"] in LAYERS[model], (name, row.label)
        assert (model is None) == (row.dataset == "none")
        assert ("r" in row.configuration) == (row.configuration.get("candidates") in {"random", "spatial"})
        assert ("ratio" in row.configuration) == (row.configuration["layer"] == "hybrid")


def test_every_printed_number_is_a_number() -> None:
    for _, row in every_row():
        for column in COLUMNS:
            value = getattr(row.printed, column)
            if value is not None:
                assert value.endswith("M") == (column == "parameters")
                assert float(value.removesuffix("M")) > 0


def test_every_row_has_a_number() -> None:
    for name, row in every_row():
        has_printed = any(getattr(row.printed, column) is not None for column in COLUMNS)
        assert has_printed or row.logged is not None or name.startswith(("fast-", "fashion-")), (name, row.label)


def test_what_is_printed_is_what_was_logged_truncated() -> None:
    off = set()
    for name, row in every_row():
        for column in COLUMNS:
            value = getattr(row.printed, column)
            if row.logged is not None and value is not None:
                digits = value.removesuffix("M")
                if truncated(getattr(row.logged, column), digits) != digits:
                    assert row.note, (name, row.label)
                    off.add((name, row.dataset, row.label, column))
    hundred = {row.label for row in TABLES["vary-lambda"].rows}
    assert off == {("vary-lambda", "cifar100", label, "gflops") for label in hundred} | {
        ("vary-lambda", "cifar10", "Branching, 0.125, with positions", "accuracy"),
        ("vgg-patch", "cifar100", "Conv2D, patch 1", "gflops"),
        ("vgg-patch", "cifar100", "Branching, 0.5, patch 1", "gflops"),
        ("vgg-patch", "cifar100", "ConvNN, patch 1", "gflops"),
        ("vgg-patch", "cifar100", "Branching, 0.5, patch 2", "parameters"),
        ("vit-cifar", "cifar10", "Self-Attention", "loss"),
        ("vit-kernels", "cifar10", "Attention", "loss"),
    }


def test_a_run_is_named_for_its_data_set_and_has_one_set_of_numbers() -> None:
    runs: dict[str, Logged] = {}
    for _, row in every_row():
        if row.logged is not None:
            assert {"CIFAR10": "cifar10", "CIFAR100": "cifar100"}[
                row.logged.run.split("/")[1].split("-")[-1]
            ] == row.dataset
            assert runs.setdefault(row.logged.run, row.logged) == row.logged


def test_no_imagenet_row_claims_a_log() -> None:
    assert all((row.logged is not None) == row.dataset.startswith("cifar") for _, row in every_row())


def test_the_parameters_of_neighbours_are_those_of_the_kernels() -> None:
    head = {"cifar10": 0.0, "cifar100": 0.36873}
    products = 1.024192  # input times output channels of the eight convolutions
    for row in TABLES["vgg-k"].rows:
        ratio, size = row.configuration["ratio"], row.configuration["kernel_size"]
        taps = ratio * row.configuration.get("k", 0) + (1 - ratio) * size**2
        expected = 130.01569 + head[row.dataset] + products * (taps - 9)
        assert logged(row).parameters == pytest.approx(expected, abs=1e-7)
    for row in TABLES["vit-k"].rows:
        kernel = 12 * 192 * row.configuration["k"] / 1e6 if row.configuration["layer"] == "convnn" else 0
        expected = {"cifar10": 5.479306, "cifar100": 5.496676}[row.dataset] + kernel
        assert logged(row).parameters == pytest.approx(expected, abs=1e-7)


def test_the_gflops_of_candidates_are_those_of_their_number() -> None:
    maps = ((34, 3), (18, 64), (10, 128 + 256), (6, 256 + 512), (4, 512 + 512))  # padded sides and channels
    rows = [row for row in TABLES["vgg-candidates"].rows if row.configuration.get("candidates") == "random"]
    for row in rows:
        r = row.configuration["r"]
        search = sum(2 * side**2 * min(r, side**2) * channels for side, channels in maps) / 1e9
        plain = {"cifar10": 0.2936832, "cifar100": 0.29442048}[row.dataset]
        assert logged(row).gflops == pytest.approx(plain + search, abs=2e-8)
    for row in TABLES["vit-candidates"].rows:
        if "r" in row.configuration:
            fewer = (2 * 192 * 192 + 2 * 197 * 192) * 12 * (192 - row.configuration["r"]) / 1e9
            full = {"cifar10": 2.3242224, "cifar100": 2.32425696}[row.dataset]
            assert logged(row).gflops == pytest.approx(full - fewer, abs=2e-8)


def test_tables_need_no_torch() -> None:
    code = "import sys, convnn_lab.tables; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# Typed from the pages of the thesis, apart from the data.
CELLS: tuple[tuple[str, str, str, tuple[str | None, ...]], ...] = (
    ("vary-lambda", "cifar10", "Branching, 0.5, without positions", ("1.424", "81.26", "0.325", "130.015M")),
    ("vary-lambda", "cifar10", "Branching, 0.375, with positions", ("1.386", "82.08", "0.331", "130.015M")),
    ("vary-lambda", "cifar100", "Branching, 0.625, without positions", ("3.281", "49.74", "0.325", "130.384M")),
    ("vary-lambda", "cifar100", "ConvNN, with positions", ("4.586", "32.33", "0.331", "130.384M")),
    ("vgg-patch", "cifar10", "ConvNN, patch 2", ("1.631", "60.32", "0.307", "268.289M")),
    ("vgg-patch", "cifar100", "Branching, 0.5, patch 2", ("4.242", "37.01", "0.308", "199.512M")),
    ("vit-cifar", "cifar10", "Self-Attention", ("1.558", "77.41", "2.507", "5.479M")),
    ("vit-cifar", "cifar10", "ConvNN, random", ("0.779", "79.82", "2.037", "5.500M")),
    ("vit-cifar", "cifar100", "Local-Attention", ("3.688", "49.73", "1.991", "4.317M")),
    ("vit-kernels", "cifar10", "ConvNN, standard", ("1.940", "72.90", "2.333", "9.460M")),
    ("vit-kernels", "cifar100", "ConvNN, depthwise separable", ("4.140", "43.75", "2.333", "5.959M")),
    ("resnet-imagenet", "imagenet", "Conv2D", ("1.170", "78.86", "8.178", "25.583M")),
    ("resnet-imagenet", "imagenet", "ConvNN, all, k = 9", ("1.187", "76.22", "10.321", "25.557M")),
    ("resnet-imagenet", "imagenet", "Branching, all, k = 16", ("0.999", "79.76", "10.655", "29.671M")),
    ("resnet-imagenet", "imagenet", "Branching, random, k = 9, r = 48", ("1.180", "78.99", "5.641", "26.474M")),
    ("resnet-imagenet", "imagenet", "Branching, spatial, k = 9, r = 25", ("1.082", "78.82", "5.576", "26.474M")),
    ("resnet-k", "imagenet", "Branching, random, k = 6, r = 32", (None, "78.84", None, None)),
    ("resnet-r", "imagenet", "Branching, random, k = 16, r = 64", (None, "79.37", "5.686", "29.671M")),
    ("vit-imagenet", "imagenet", "MHA, 12 heads", ("0.899", "80.94", "35.131", "86.379M")),
    ("vit-imagenet", "imagenet", "ConvNN, 1 head, spatial, k = 9, r = 128", ("1.076", "75.86", "33.205", "86.462M")),
    ("vit-imagenet", "imagenet", "Fast-ConvNN, 12 heads, all, k = 25", ("0.834", "81.64", "34.416", "86.398M")),
    ("vit-imagenet", "imagenet", "KVT, 12 heads, k = 36", ("0.880", "81.03", "35.137", "86.379M")),
    ("vit-heads", "imagenet", "KVT, 1 head, k = 9", (None, "76.95", None, None)),
    ("vit-imagenet-k", "imagenet", "KVT, 12 heads, k = 100", (None, "81.04", None, None)),
    ("vit-imagenet-candidates", "imagenet", "MHA, 12 heads", (None, "80.94", "35.13", None)),
    ("vit-dynamics", "imagenet", "Fast-ConvNN, 12 heads, k = 25, epoch 200", (None, "80.13", None, None)),
    ("vit-dynamics", "imagenet", "KVT, 12 heads, k = 9, epoch 50", (None, "65.25", None, None)),
)


@pytest.mark.parametrize(("table", "dataset", "label", "cells"), CELLS)
def test_cells_read_as_on_the_page(table: str, dataset: str, label: str, cells: tuple[str | None, ...]) -> None:
    assert printed(table, dataset, label) == cells


def test_the_benchmark_reads_as_on_the_page() -> None:
    original, triton = (row.configuration for row in TABLES["fast-speed"].rows)
    assert (original["printed_forward_ms"], original["printed_backward_mb"]) == ("4.92", "904.88")
    assert (triton["printed_backward_ms"], triton["printed_forward_mb"]) == ("6.84", "341.95")
    assert float(original["printed_forward_mb"]) / float(triton["printed_forward_mb"]) == pytest.approx(2.32, abs=0.01)

"""ViT-Tiny on CIFAR, with one head: the methods, and the kernels of ConvNN."""

from __future__ import annotations

from typing import Any

from convnn_lab.tables.logs import CIFAR, Numbers, vit_run
from convnn_lab.tables.record import Dataset, Logged, Printed, Row, Table


def configuration(layer: str, **more: Any) -> dict[str, Any]:
    """Of a method with one head, and for ConvNN with a depthwise kernel on 9 neighbours among all."""
    base = {"model": "vit_tiny", "layer": layer, "heads": 1}
    return base | ({"k": 9, "candidates": "all", "kernel": "depthwise"} if layer == "convnn" else {}) | more


_LOSS = "The loss is a typo for 1.588."
_BAND = "A band of 24 tokens to either side, not the strided pattern of Child et al., whose run reached {}."
_FULL = "The GFLOPS leave the aggregation out; with it they are {}."

# What a row is, and the folder and name of the run that the table prints
_METHODS: dict[str, tuple[dict[str, Any], str, str]] = {
    "Self-Attention": (configuration("attention"), "Baseline_Test**", "Attention_NH1"),
    "Local-Attention": (configuration("local"), "Baseline_Test**", "LocalAttention_NH1"),
    "KVT-Attention, k = 9": (configuration("kvt", k=9), "K_test", "KvtAttention_K9"),
    "KVT-Attention, k = 100": (configuration("kvt", k=100), "K_test", "KvtAttention_K100"),
    "Sparse-Attention": (configuration("sparse"), "Baseline_Test_Sparse---", "SparseAttention_Local_NH1_CW49"),
    "ConvNN, all": (configuration("convnn"), "K_test_correct---", "ConvNNAttention_K9"),
    "ConvNN, random": (
        configuration("convnn", candidates="random", r=32),
        "N_test_correct---",
        "ConvNNAttention_K9_N32_random",
    ),
    "ConvNN, spatial": (
        configuration("convnn", candidates="spatial", r=32),
        "N_test_correct---",
        "ConvNNAttention_K9_N32_spatial",
    ),
    "ConvNN, depthwise separable": (
        configuration("convnn", kernel="separable"),
        "Conv_test---",
        "ConvNNAttention_depthwise-separable_K9",
    ),
    "ConvNN, standard": (
        configuration("convnn", kernel="standard"),
        "Conv_test---",
        "ConvNNAttention_standard_K9",
    ),
}

# Printed, logged, note
_LINES: dict[Dataset, dict[str, tuple[Printed, Numbers, str]]] = {
    "cifar10": {
        "Self-Attention": (
            Printed("1.558", "77.41", "2.507", "5.479M"),
            (1.58811316, 77.4121, 2.50793184, 5.479306),
            _LOSS,
        ),
        "Local-Attention": (
            Printed("1.626", "76.51", "1.991", "4.299M"),
            (1.62640539, 76.5137, 1.99161926, 4.299658),
            "",
        ),
        "KVT-Attention, k = 9": (
            Printed("1.775", "75.77", "2.508", "5.479M"),
            (1.77566193, 75.7715, 2.50839755, 5.479306),
            "",
        ),
        "KVT-Attention, k = 100": (
            Printed("1.593", "76.41", "2.508", "5.479M"),
            (1.59312751, 76.416, 2.50839755, 5.479306),
            "",
        ),
        "Sparse-Attention": (
            Printed("2.026", "72.50", "2.509", "5.479M"),
            (2.0265508, 72.5098, 2.50979467, 5.479306),
            _BAND.format("42.11"),
        ),
        "ConvNN, all": (Printed("1.978", "73.67", "2.333", "5.500M"), (1.97830142, 73.6719, 2.33318496, 5.500042), ""),
        "ConvNN, random": (
            Printed("0.779", "79.82", "2.037", "5.500M"),
            (0.77941933, 79.8242, 2.03742048, 5.500042),
            "",
        ),
        "ConvNN, spatial": (
            Printed("2.737", "63.01", "2.037", "5.500M"),
            (2.73707466, 63.0176, 2.03742048, 5.500042),
            "",
        ),
        "ConvNN, depthwise separable": (
            Printed("1.939", "71.93", "2.333", "5.942M"),
            (1.93993105, 71.9336, 2.33318496, 5.94241),
            _FULL.format("2.511"),
        ),
        "ConvNN, standard": (
            Printed("1.940", "72.90", "2.333", "9.460M"),
            (1.94014634, 72.9004, 2.33318496, 9.460618),
            _FULL.format("3.897"),
        ),
    },
    "cifar100": {
        "Self-Attention": (
            Printed("3.817", "50.07", "2.507", "5.496M"),
            (3.81798501, 50.0781, 2.5079664, 5.496676),
            "",
        ),
        "Local-Attention": (
            Printed("3.688", "49.73", "1.991", "4.317M"),
            (3.68821455, 49.7363, 1.99165382, 4.317028),
            "",
        ),
        "KVT-Attention, k = 9": (
            Printed("3.883", "48.21", "2.508", "5.496M"),
            (3.88347712, 48.2129, 2.50843211, 5.496676),
            "",
        ),
        "KVT-Attention, k = 100": (
            Printed("3.738", "50.34", "2.508", "5.496M"),
            (3.73851328, 50.3418, 2.50843211, 5.496676),
            "",
        ),
        "Sparse-Attention": (
            Printed("4.565", "44.62", "2.509", "5.496M"),
            (4.56584505, 44.6289, 2.50982923, 5.496676),
            _BAND.format("16.71"),
        ),
        "ConvNN, all": (Printed("3.983", "48.67", "2.333", "5.517M"), (3.9839956, 48.6719, 2.33321952, 5.517412), ""),
        "ConvNN, random": (
            Printed("2.341", "53.60", "2.037", "5.517M"),
            (2.34186037, 53.6035, 2.03745504, 5.517412),
            "",
        ),
        "ConvNN, spatial": (
            Printed("5.020", "38.22", "2.037", "5.517M"),
            (5.02092071, 38.2227, 2.03745504, 5.517412),
            "",
        ),
        "ConvNN, depthwise separable": (
            Printed("4.140", "43.75", "2.333", "5.959M"),
            (4.14089561, 43.75, 2.33321952, 5.95978),
            _FULL.format("2.511"),
        ),
        "ConvNN, standard": (
            Printed("3.900", "47.17", "2.333", "9.477M"),
            (3.90062265, 47.1777, 2.33321952, 9.477988),
            _FULL.format("3.897"),
        ),
    },
}


def row(dataset: Dataset, method: str, label: str = "") -> Row:
    """A row of the table of methods or of kernels, under another label where there is one."""
    how, folder, name = _METHODS[method]
    printed, numbers, note = _LINES[dataset][method]
    return Row(label or method, dataset, how, printed, Logged(vit_run(dataset, folder, name), *numbers), note)


def reference(dataset: Dataset, method: str) -> Row:
    """A line across a figure, or the end of a curve: the run that the table of methods prints."""
    whole = row(dataset, method)
    return Row(whole.label, dataset, whole.configuration, logged=whole.logged)


_KERNELS = {
    "Attention": "Self-Attention",
    "ConvNN, depthwise": "ConvNN, all",
    "ConvNN, depthwise separable": "ConvNN, depthwise separable",
    "ConvNN, standard": "ConvNN, standard",
}

VIT_CIFAR = Table(
    "vit-cifar",
    "ViT-Tiny: methods",
    tuple(row(dataset, method) for dataset in CIFAR for method in list(_METHODS)[:8]),
)
VIT_CIFAR_DYNAMICS = Table(
    "vit-cifar-dynamics",
    "ViT-Tiny: loss over the epochs, as the run of the methods ends",
    tuple(reference(dataset, method) for dataset in CIFAR for method in ("Self-Attention", "ConvNN, random")),
)
VIT_KERNELS = Table(
    "vit-kernels",
    "ViT-Tiny: kernels of ConvNN",
    tuple(row(dataset, method, label) for dataset in CIFAR for label, method in _KERNELS.items()),
)

"""VGG-11 on CIFAR: the branch ratio, the learning rate and the patch size.

The 1x1 convolution at the end of a branching layer is there in every row, also where one branch is empty: "Conv2D" is
the ratio 0 and "ConvNN" the ratio 1.
"""

from __future__ import annotations

from typing import Any

from convnn_lab.tables.logs import CIFAR, vgg_run
from convnn_lab.tables.record import Dataset, Logged, Printed, Row, Table

PARAMETERS: dict[Dataset, float] = {"cifar10": 130.01569, "cifar100": 130.38442}
"""in millions, as logged, of every row with 9 neighbours, a 3x3 kernel and no patches"""

PLAIN_GFLOPS: dict[Dataset, float] = {"cifar10": 0.2936832, "cifar100": 0.29442048}
FULL_GFLOPS: dict[Dataset, float] = {"cifar10": 0.32533309, "cifar100": 0.32607037}
POSITION_GFLOPS: dict[Dataset, float] = {"cifar10": 0.33130096, "cifar100": 0.33203824}

COLUMN = "The one GFLOPS column stands for both data sets and shows CIFAR-10's; CIFAR-100's is 0.0007 more."

NAMES = {0.0: "Conv2D", 0.5: "Branching, 0.5", 1.0: "ConvNN"}


def configuration(ratio: float, **more: Any) -> dict[str, Any]:
    """Of a branching layer with 3x3 kernels, and 9 neighbours among all where it has neighbours at all."""
    base = {"model": "vgg11", "layer": "hybrid", "ratio": ratio, "kernel_size": 3}
    return base | ({"k": 9, "candidates": "all"} if ratio else {}) | more


def reference(dataset: Dataset, ratio: float) -> Row:
    """A line across a figure: the run that the table of ratios prints, without positions."""
    loss, accuracy = next(line[3:] for line in _WITHOUT[dataset] if line[0] == ratio)
    gflops = FULL_GFLOPS[dataset] if ratio else PLAIN_GFLOPS[dataset]
    run = vgg_run(dataset, "BR_test", "BranchingConvNN_All_K9_Col_Col", ratio)
    logged = Logged(run, loss, accuracy, gflops, PARAMETERS[dataset])
    return Row(NAMES[ratio], dataset, configuration(ratio), logged=logged)


# ratio, printed loss and accuracy, logged loss and accuracy
_Lines = dict[Dataset, tuple[tuple[float, str, str, float, float], ...]]
_WITHOUT: _Lines = {
    "cifar10": (
        (0.0, "1.529", "80.65", 1.5295817, 80.6543),
        (0.125, "1.393", "81.10", 1.3935445, 81.1035),
        (0.25, "1.467", "81.21", 1.46727344, 81.2109),
        (0.375, "1.422", "80.95", 1.42280746, 80.957),
        (0.5, "1.424", "81.26", 1.42464298, 81.2695),
        (0.625, "1.403", "80.79", 1.4031178, 80.791),
        (0.75, "1.479", "79.58", 1.47953821, 79.5898),
        (0.875, "1.332", "78.18", 1.33242001, 78.1836),
        (1.0, "2.694", "54.00", 2.69454793, 54.0039),
    ),
    "cifar100": (
        (0.0, "3.939", "44.83", 3.9394568, 44.834),
        (0.125, "3.905", "45.08", 3.90524366, 45.0879),
        (0.25, "3.518", "47.87", 3.51897085, 47.8711),
        (0.375, "3.578", "48.34", 3.57880346, 48.3496),
        (0.5, "3.474", "48.37", 3.47402666, 48.3789),
        (0.625, "3.281", "49.74", 3.28177003, 49.7461),
        (0.75, "3.516", "46.93", 3.51627476, 46.9336),
        (0.875, "3.906", "45.72", 3.90605138, 45.7227),
        (1.0, "5.011", "29.50", 5.01138371, 29.502),
    ),
}
_WITH: _Lines = {
    "cifar10": (
        (0.0, "1.529", "80.65", 1.5295817, 80.6543),
        (0.125, "1.420", "80.97", 1.4208518, 80.9473),
        (0.25, "1.447", "80.91", 1.44715647, 80.918),
        (0.375, "1.386", "82.08", 1.38637466, 82.0898),
        (0.5, "1.213", "81.77", 1.21313278, 81.7773),
        (0.625, "1.341", "80.81", 1.34186121, 80.8105),
        (0.75, "1.283", "80.26", 1.28394185, 80.2637),
        (0.875, "1.225", "78.70", 1.22532961, 78.7012),
        (1.0, "2.388", "57.15", 2.38861057, 57.1582),
    ),
    "cifar100": (
        (0.0, "3.939", "44.83", 3.9394568, 44.834),
        (0.125, "3.665", "47.73", 3.6658679, 47.7344),
        (0.25, "3.702", "47.65", 3.70225559, 47.6562),
        (0.375, "3.696", "48.39", 3.69606578, 48.3984),
        (0.5, "3.588", "48.80", 3.58834621, 48.8086),
        (0.625, "3.323", "49.23", 3.3230297, 49.2383),
        (0.75, "3.533", "48.78", 3.53314541, 48.7891),
        (0.875, "3.539", "46.26", 3.53988352, 46.2695),
        (1.0, "4.586", "32.33", 4.58677742, 32.334),
    ),
}
_LAMBDA_NOTES: dict[tuple[Dataset, float], str] = {
    ("cifar10", 0.0): "The row repeats the run without positions; the author's second run gave 1.201 and 81.44.",
    ("cifar100", 0.0): "The row repeats the run without positions; the author's second run gave 3.840 and 44.33.",
    ("cifar10", 0.125): "The log says 80.94.",
}
_PARAMETERS: dict[Dataset, str] = {"cifar10": "130.015M", "cifar100": "130.384M"}


def _vary_lambda(dataset: Dataset, position: bool) -> list[Row]:
    rows = []
    for ratio, loss, accuracy, *finals in (_WITH if position else _WITHOUT)[dataset]:
        encoding = "Loc_Col_Col" if position and ratio else "Col_Col"
        gflops = ("0.331" if position else "0.325") if ratio else "0.293"
        full = (POSITION_GFLOPS if position else FULL_GFLOPS) if ratio else PLAIN_GFLOPS
        run = vgg_run(dataset, "BR_test", f"BranchingConvNN_All_K9_{encoding}", ratio)
        name = {0.0: "Conv2D", 1.0: "ConvNN"}.get(ratio, f"Branching, {ratio}")
        notes = [_LAMBDA_NOTES.get((dataset, ratio), "") if position else "", COLUMN if dataset == "cifar100" else ""]
        rows.append(
            Row(
                f"{name}, {'with' if position else 'without'} positions",
                dataset,
                configuration(ratio, **({"position": True} if position else {})),
                Printed(loss, accuracy, gflops, _PARAMETERS[dataset]),
                Logged(run, finals[0], finals[1], full[dataset], PARAMETERS[dataset]),
                " ".join(note for note in notes if note),
            )
        )
    return rows


_DYNAMICS = tuple(reference(dataset, ratio) for dataset in CIFAR for ratio in NAMES)

# learning rate, ratio, logged loss and accuracy
_LR: dict[Dataset, tuple[tuple[str, float, float, float], ...]] = {
    "cifar10": (
        ("1e-3", 0.0, 2.95506044, 80.8984),
        ("1e-3", 0.5, 1.29572974, 81.5527),
        ("1e-3", 1.0, 1.78786332, 56.3379),
        ("1e-4", 0.0, 1.37957505, 79.7852),
        ("1e-4", 0.5, 1.29768166, 80.4004),
        ("1e-4", 1.0, 2.81003371, 52.7539),
        ("1e-5", 0.0, 3.79449115, 68.3887),
        ("1e-5", 0.5, 2.01347902, 73.3789),
        ("1e-5", 1.0, 3.56805248, 48.1055),
    ),
    "cifar100": (
        ("1e-3", 0.0, 4.53555867, 30.2637),
        ("1e-3", 0.5, 3.82748408, 37.7832),
        ("1e-3", 1.0, 2.81852992, 30.7617),
        ("1e-4", 0.0, 3.69086965, 45.7812),
        ("1e-4", 0.5, 3.61307204, 48.7598),
        ("1e-4", 1.0, 5.07526154, 29.5801),
        ("1e-5", 0.0, 8.52789506, 30.957),
        ("1e-5", 0.5, 4.83756142, 43.0762),
        ("1e-5", 1.0, 6.1644223, 23.6133),
    ),
}
_SECOND = "A second run of what the table of ratios prints."


def _lr(dataset: Dataset) -> list[Row]:
    rows = []
    for lr, ratio, loss, accuracy in _LR[dataset]:
        gflops = FULL_GFLOPS[dataset] if ratio else PLAIN_GFLOPS[dataset]
        run = vgg_run(dataset, "loss_test", f"lr_{lr}/BranchingConvNN_K9_col_col", ratio)
        logged = Logged(run, loss, accuracy, gflops, PARAMETERS[dataset])
        note = _SECOND if lr == "1e-4" else ""
        label = f"{NAMES[ratio]}, learning rate {lr}"
        rows.append(Row(label, dataset, configuration(ratio, lr=float(lr)), logged=logged, note=note))
    return rows


_COUNT = "The GFLOPS leave the aggregation out; with it a patch of 2 costs more than one of 1, not less."
_TYPO = "The parameters are a typo for 199.521M."

# ratio, patch, printed loss, accuracy, GFLOPS and parameters, note
_PATCH: dict[Dataset, tuple[tuple[float, int, str, str, str, str, str], ...]] = {
    "cifar10": (
        (0.0, 1, "1.529", "80.65", "0.293", "130.015M", ""),
        (0.5, 1, "1.424", "81.26", "0.325", "130.015M", ""),
        (0.5, 2, "1.403", "74.81", "0.307", "199.152M", _COUNT),
        (1.0, 1, "2.694", "54.00", "0.325", "130.015M", ""),
        (1.0, 2, "1.631", "60.32", "0.307", "268.289M", _COUNT),
    ),
    "cifar100": (
        (0.0, 1, "3.939", "44.83", "0.293", "130.384M", "The GFLOPS are CIFAR-10's; the log says 0.294."),
        (0.5, 1, "3.474", "48.37", "0.325", "130.384M", "The GFLOPS are CIFAR-10's; the log says 0.326."),
        (0.5, 2, "4.242", "37.01", "0.308", "199.512M", f"{_TYPO} {_COUNT}"),
        (1.0, 1, "5.011", "29.50", "0.325", "130.384M", "The GFLOPS are CIFAR-10's; the log says 0.326."),
        (1.0, 2, "4.487", "28.17", "0.308", "268.658M", _COUNT),
    ),
}
_PATCHED: dict[tuple[Dataset, float], tuple[float, float, float, float]] = {
    ("cifar10", 0.5): (1.40321172, 74.8145, 0.30754035, 199.152778),
    ("cifar10", 1.0): (1.63163012, 60.3223, 0.30754035, 268.289866),
    ("cifar100", 0.5): (4.24228337, 37.0117, 0.30827763, 199.521508),
    ("cifar100", 1.0): (4.4874054, 28.1738, 0.30827763, 268.658596),
}


def _patch(dataset: Dataset) -> list[Row]:
    rows = []
    for ratio, patch, *printed, note in _PATCH[dataset]:
        logged = reference(dataset, ratio).logged
        if patch == 2:
            run = vgg_run(dataset, "pixelshuf_test", "BranchingConvNN_K9_col_col", ratio)
            logged = Logged(run, *_PATCHED[dataset, ratio])
        label = f"{NAMES[ratio]}, patch {patch}"
        rows.append(Row(label, dataset, configuration(ratio, patch=patch), Printed(*printed), logged, note))
    return rows


VARY_LAMBDA = Table(
    "vary-lambda",
    "VGG-11: branch ratios, with and without positions",
    tuple(row for dataset in CIFAR for position in (False, True) for row in _vary_lambda(dataset, position)),
)
FASHION_LAMBDA = Table(
    "fashion-lambda",
    "VGG-11: branch ratios on Fashion-MNIST, which the thesis has not",
    tuple(
        Row(NAMES.get(ratio, f"Branching, {ratio}"), "fashion-mnist", configuration(ratio))
        for ratio, *_ in _WITHOUT["cifar10"]
    ),
)
VGG_DYNAMICS = Table("vgg-dynamics", "VGG-11: loss over the epochs, as the run of the ratios ends", _DYNAMICS)
VGG_LR = Table("vgg-lr", "VGG-11: learning rates", tuple(row for dataset in CIFAR for row in _lr(dataset)))
VGG_PATCH = Table("vgg-patch", "VGG-11: patch sizes", tuple(row for dataset in CIFAR for row in _patch(dataset)))

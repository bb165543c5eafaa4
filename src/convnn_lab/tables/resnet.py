"""ResNet-50 on ImageNet: branching with the ratio 0.5, a 3x3 kernel and more or fewer neighbours."""

from __future__ import annotations

from typing import Any

from convnn_lab.tables.record import Printed, Row, Table

_REPLACED = "The thesis says that all 3x3 convolutions are replaced; its counts say the 13 of 16 without a stride."
_BIAS = "Every convolution has a bias here, 26,560 parameters that the other rows lack."
_FEWER = "31 % fewer GFLOPS than Conv2D by a count that leaves the aggregation and half the 3x3 out, 4.5 % with them."

_PARAMETERS = {4: "24.191M", 6: "25.104M", 9: "26.474M", 16: "29.671M"}
_GFLOPS = {"all": "10.655", 32: "5.596", 48: "5.641", 64: "5.686"}

_CONV: dict[str, Any] = {"model": "resnet50", "layer": "conv"}

# neighbours, printed loss and accuracy
_ALL = ((4, "1.119", "79.06"), (6, "1.066", "79.19"), (9, "1.045", "79.42"), (16, "0.999", "79.76"))

# neighbours, random candidates, printed loss and accuracy
_RANDOM = (
    (4, 32, "1.093", "78.73"),
    (4, 48, "1.150", "79.03"),
    (4, 64, "1.147", "79.06"),
    (6, 32, "1.143", "78.84"),
    (6, 48, "1.136", "78.99"),
    (6, 64, "1.080", "79.16"),
    (9, 32, "1.142", "78.98"),
    (9, 48, "1.180", "78.99"),
    (9, 64, "1.123", "79.24"),
    (16, 32, "1.138", "79.12"),
    (16, 48, "1.088", "79.28"),
    (16, 64, "1.065", "79.37"),
)


def _branching(k: int, candidates: str = "all", r: int | None = None) -> dict[str, Any]:
    base: dict[str, Any] = {"model": "resnet50", "layer": "hybrid", "ratio": 0.5, "kernel_size": 3, "k": k}
    return base | {"candidates": candidates} | ({} if r is None else {"r": r})


def _all(k: int, printed: Printed) -> Row:
    return Row(f"Branching, all, k = {k}", "imagenet", _branching(k), printed, note=_REPLACED)


def _random(k: int, r: int, printed: Printed) -> Row:
    note = f"{_REPLACED} {_FEWER}" if (k, r) == (4, 48) else _REPLACED
    return Row(f"Branching, random, k = {k}, r = {r}", "imagenet", _branching(k, "random", r), printed, note=note)


def _conv(printed: Printed) -> Row:
    return Row("Conv2D", "imagenet", _CONV, printed, note=_BIAS)


_CONVNN = Row(
    "ConvNN, all, k = 9",
    "imagenet",
    {"model": "resnet50", "layer": "convnn", "k": 9, "candidates": "all"},
    Printed("1.187", "76.22", "10.321", "25.557M"),
    note=_REPLACED,
)
_SPATIAL = Row(
    "Branching, spatial, k = 9, r = 25",
    "imagenet",
    _branching(9, "spatial", 25),
    Printed("1.082", "78.82", "5.576", "26.474M"),
    note=_REPLACED,
)

RESNET_IMAGENET = Table(
    "resnet-imagenet",
    "ResNet-50: all rows",
    (
        _conv(Printed("1.170", "78.86", "8.178", "25.583M")),
        _CONVNN,
        *(_all(k, Printed(loss, top, _GFLOPS["all"], _PARAMETERS[k])) for k, loss, top in _ALL),
        *(_random(k, r, Printed(loss, top, _GFLOPS[r], _PARAMETERS[k])) for k, r, loss, top in _RANDOM),
        _SPATIAL,
    ),
)
RESNET_K = Table(
    "resnet-k",
    "ResNet-50: neighbours, among all or 32 random candidates",
    (
        _conv(Printed(accuracy="78.86")),
        *(_all(k, Printed(accuracy=top)) for k, _, top in _ALL),
        *(_random(k, r, Printed(accuracy=top)) for k, r, _, top in _RANDOM if r == 32),
    ),
)
RESNET_R = Table(
    "resnet-r",
    "ResNet-50: random candidates",
    (
        _conv(Printed(None, "78.86", "8.178", "25.583M")),
        *(_random(k, r, Printed(None, top, _GFLOPS[r], _PARAMETERS[k])) for k, r, _, top in _RANDOM),
    ),
)

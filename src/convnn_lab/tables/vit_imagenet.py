"""ViT-Base on ImageNet, with one head or twelve."""

from __future__ import annotations

from typing import Any

from convnn_lab.tables.record import Printed, Row, Table

_ORDER = "With one head the candidates are taken before the projection, with twelve after it: the GFLOPS tell."
_PEAK = "The conclusion says that ConvNN keeps gaining from more neighbours; from 25 to 36 it does not."
_BEHIND = "Still behind attention, which the text says is overtaken in the last 100 epochs."


def _attention(heads: int) -> dict[str, Any]:
    return {"model": "vit_base", "layer": "attention", "heads": heads}


def _kvt(heads: int, k: int) -> dict[str, Any]:
    return {"model": "vit_base", "layer": "kvt", "heads": heads, "k": k}


def _convnn(heads: int, k: int, candidates: str = "all", **more: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"model": "vit_base", "layer": "convnn", "heads": heads, "kernel": "depthwise", "k": k}
    return base | {"candidates": candidates} | more


# label, configuration, printed loss, accuracy, GFLOPS and parameters, note
_LINES: tuple[tuple[str, dict[str, Any], str, str, str, str, str], ...] = (
    ("MHA, 1 head", _attention(1), "0.913", "79.35", "35.131", "86.379M", ""),
    ("MHA, 12 heads", _attention(12), "0.899", "80.94", "35.131", "86.379M", ""),
    ("ConvNN, 1 head, all, k = 4", _convnn(1, 4), "1.131", "74.60", "34.423", "86.416M", ""),
    ("ConvNN, 1 head, all, k = 9", _convnn(1, 9), "0.969", "78.20", "34.432", "86.462M", ""),
    ("ConvNN, 1 head, all, k = 16", _convnn(1, 16), "0.937", "79.14", "34.445", "86.526M", ""),
    (
        "ConvNN, 1 head, random, k = 9, r = 32",
        _convnn(1, 9, "random", r=32),
        *("1.262", "71.60", "31.497", "86.462M", _ORDER),
    ),
    (
        "ConvNN, 1 head, spatial, k = 9, r = 128",
        _convnn(1, 9, "spatial", r=128),
        *("1.076", "75.86", "33.205", "86.462M", _ORDER),
    ),
    ("ConvNN, 12 heads, all, k = 9", _convnn(12, 9), "0.855", "81.19", "34.432", "86.386M", ""),
    ("ConvNN, 12 heads, all, k = 16", _convnn(12, 16), "0.838", "81.60", "34.445", "86.391M", ""),
    ("Fast-ConvNN, 12 heads, all, k = 25", _convnn(12, 25, fused=True), "0.834", "81.64", "34.416", "86.398M", ""),
    ("Fast-ConvNN, 12 heads, all, k = 36", _convnn(12, 36, fused=True), "0.845", "81.61", "34.416", "86.407M", _PEAK),
    (
        "ConvNN, 12 heads, random, k = 9, r = 32",
        _convnn(12, 9, "random", r=32),
        *("1.064", "76.04", "33.833", "86.386M", _ORDER),
    ),
    (
        "ConvNN, 12 heads, spatial, k = 9, r = 128",
        _convnn(12, 9, "spatial", r=128),
        *("0.931", "79.31", "34.181", "86.386M", _ORDER),
    ),
    ("KVT, 1 head, k = 4", _kvt(1, 4), "1.182", "73.38", "35.131", "86.379M", ""),
    ("KVT, 1 head, k = 9", _kvt(1, 9), "1.020", "76.95", "35.131", "86.379M", ""),
    ("KVT, 1 head, k = 16", _kvt(1, 16), "0.972", "78.25", "35.131", "86.379M", ""),
    ("KVT, 12 heads, k = 9", _kvt(12, 9), "0.883", "80.50", "35.137", "86.379M", ""),
    ("KVT, 12 heads, k = 16", _kvt(12, 16), "0.871", "81.04", "35.137", "86.379M", ""),
    ("KVT, 12 heads, k = 25", _kvt(12, 25), "0.874", "81.28", "35.137", "86.379M", ""),
    ("KVT, 12 heads, k = 36", _kvt(12, 36), "0.880", "81.03", "35.137", "86.379M", ""),
    ("KVT, 12 heads, k = 100", _kvt(12, 100), "0.884", "81.04", "35.137", "86.379M", ""),
)
_ROWS = tuple(Row(label, "imagenet", how, Printed(*printed), note=note) for label, how, *printed, note in _LINES)


def _figure(*points: tuple[str, str, str | None]) -> tuple[Row, ...]:
    """Rows of the table by their labels, with what the figure prints of each: accuracy and GFLOPS."""
    rows = {row.label: row for row in _ROWS}
    return tuple(
        Row(label, "imagenet", rows[label].configuration, Printed(None, accuracy, gflops), note=rows[label].note)
        for label, accuracy, gflops in points
    )


# label, configuration, printed accuracy after 50, 100, ... 300 epochs
_CURVES = (
    ("MHA, 12 heads", _attention(12), ("71.70", "76.72", "78.69", "79.96", "80.95", "80.94")),
    ("ConvNN, 12 heads, k = 9", _convnn(12, 9), ("67.57", "73.61", "76.38", "78.63", "80.74", "81.19")),
    (
        "Fast-ConvNN, 12 heads, k = 25",
        _convnn(12, 25, fused=True),
        ("69.83", "74.91", "77.79", "80.13", "81.26", "81.64"),
    ),
    ("KVT, 12 heads, k = 9", _kvt(12, 9), ("65.25", "71.31", "75.04", "78.13", "79.84", "80.50")),
    ("KVT, 12 heads, k = 25", _kvt(12, 25), ("69.79", "74.75", "77.71", "79.80", "80.81", "81.28")),
)

VIT_IMAGENET = Table("vit-imagenet", "ViT-Base: all rows", _ROWS)
VIT_HEADS = Table(
    "vit-heads",
    "ViT-Base: one head or twelve",
    _figure(
        ("ConvNN, 1 head, all, k = 9", "78.20", None),
        ("KVT, 1 head, k = 9", "76.95", None),
        ("MHA, 1 head", "79.35", None),
        ("ConvNN, 12 heads, all, k = 9", "81.19", None),
        ("KVT, 12 heads, k = 9", "80.50", None),
        ("MHA, 12 heads", "80.94", None),
    ),
)
VIT_IMAGENET_K = Table(
    "vit-imagenet-k",
    "ViT-Base: neighbours",
    _figure(
        ("ConvNN, 12 heads, all, k = 9", "81.19", None),
        ("ConvNN, 12 heads, all, k = 16", "81.60", None),
        ("Fast-ConvNN, 12 heads, all, k = 25", "81.64", None),
        ("Fast-ConvNN, 12 heads, all, k = 36", "81.61", None),
        ("KVT, 12 heads, k = 9", "80.50", None),
        ("KVT, 12 heads, k = 16", "81.04", None),
        ("KVT, 12 heads, k = 25", "81.28", None),
        ("KVT, 12 heads, k = 36", "81.03", None),
        ("KVT, 12 heads, k = 100", "81.04", None),
        ("MHA, 12 heads", "80.94", None),
    ),
)
VIT_IMAGENET_CANDIDATES = Table(
    "vit-imagenet-candidates",
    "ViT-Base: candidates",
    _figure(
        ("ConvNN, 12 heads, all, k = 9", "81.19", "34.43"),
        ("ConvNN, 12 heads, random, k = 9, r = 32", "76.04", "33.83"),
        ("ConvNN, 12 heads, spatial, k = 9, r = 128", "79.31", "34.18"),
        ("MHA, 12 heads", "80.94", "35.13"),
    ),
)
VIT_DYNAMICS = Table(
    "vit-dynamics",
    "ViT-Base: accuracy over the epochs",
    tuple(
        Row(
            f"{label}, epoch {epochs}",
            "imagenet",
            how | {"epochs": epochs},
            Printed(accuracy=accuracy),
            note=_BEHIND if (label, epochs) == ("ConvNN, 12 heads, k = 9", 250) else "",
        )
        for label, how, accuracies in _CURVES
        for epochs, accuracy in zip(range(50, 301, 50), accuracies, strict=True)
    ),
)

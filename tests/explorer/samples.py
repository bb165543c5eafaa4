"""Small layers of every kind the page knows, all sides different."""

from __future__ import annotations

from dataclasses import replace

import torch
from PIL import Image

from convnn_lab.explorer.layer import Layer
from convnn_lab.explorer.page import Pane, View, page
from convnn_lab.explorer.places import Map


def tokens() -> Layer:
    """Two heads with queries and keys of their own, behind a class token."""
    query, key = torch.randn(2, 2, 1 + 4 * 7, 11).unbind(0)
    allowed = torch.rand(29, 29) < 0.6
    return Layer("tokens", "attention", Map.whole(4, 7, 1), key, query, candidates=_drawn(2, 29, 12), mask=allowed)


def padded() -> Layer:
    """A map of 5 x 6 with padding, asked by a window of 3 x 3."""
    key = torch.randn(1, 7 * 8, 5)
    inner = tuple(range(1, 6)), tuple(range(1, 7))
    where = Map((7, 8), (1, 1, 5, 6), *inner, *inner, kernel=(3, 3))
    return Layer("padded", "map", where, key, candidates=_drawn(1, 56, 17), mask=torch.rand(30, 56) < 0.7)


def strided() -> Layer:
    """Windows of 2 x 4 that step over a map of 6 x 9; their middles lie between cells. The numbers are tiny."""
    key = 1e-6 * torch.randn(1, 54, 9)
    where = Map((6, 9), (0, 0, 6, 9), (0.5, 2.5, 4.5), (1.5, 4.5), (0, 2, 4), (1, 4), kernel=(2, 4), dilation=(1, 2))
    return Layer("strided", "map", where, key, candidates=_drawn(1, 54, 20), mask=torch.rand(6, 54) < 0.8)


def _drawn(rows: int, keys: int, count: int) -> torch.Tensor:
    return torch.stack([torch.randperm(keys)[:count].sort().values for _ in range(rows)])


def image(width: int = 24, height: int = 20) -> Image.Image:
    """A picture in which no two pixels are alike."""
    picture = Image.new("RGB", (width, height))
    picture.putdata(
        [(x * 255 // width, y * 255 // height, 90 + (x + y) % 40) for y in range(height) for x in range(width)]
    )
    return picture


def text(*layers: Layer, title: str = "a sample", name: str = "sample.png") -> str:
    """A page of some layers."""
    return page(title, [Pane("sample", [View(name, image(), [replace(layer) for layer in layers])])])

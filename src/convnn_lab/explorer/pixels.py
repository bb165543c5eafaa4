"""Layers for a picture alone: colours and patches of pixels as features."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from convnn_lab.explorer.layer import Choices, Layer
from convnn_lab.explorer.pictures import Picture
from convnn_lab.explorer.places import Map

PATCH = 4
"""pixels of a cell's side"""


def scaled(picture: Picture, cells: int) -> tuple[Image.Image, tuple[int, int]]:
    """The picture brought to at most so many cells of :data:`PATCH` pixels, and their rows and columns."""
    width, height = picture.image.size
    shrink = (cells / (width * height)) ** 0.5
    columns = max(1, int(width * shrink + 1e-9))
    rows = max(1, min(round(height * columns / width), cells // columns))
    return picture.image.resize((columns * PATCH, rows * PATCH), Image.Resampling.LANCZOS), (rows, columns)


def pixel_layers(picture: Picture, cells: int = 3136) -> list[Layer]:
    """The mean colour of each cell, its pixels, and its pixels with those around, each with mean 0 and deviation 1."""
    image, sides = scaled(picture, cells)
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).float()
    pixels = pixels.reshape(sides[0] * PATCH, sides[1] * PATCH, 3).permute(2, 0, 1)[None] / 255  # (1, 3, H, W)
    colours = F.avg_pool2d(pixels, PATCH)
    around = F.pad(F.avg_pool2d(pixels, 2), (2, 2, 2, 2), mode="replicate") if min(sides) > 1 else None
    maps = {"colour": colours.flatten(2), f"patch {PATCH} x {PATCH}": F.unfold(pixels, PATCH, stride=PATCH)}
    if around is not None:
        maps["patch and around"] = F.unfold(around, 6, stride=2)
    own = Choices(similarity="euclidean")
    return [_layer(name, features, sides, own) for name, features in maps.items()]


def _layer(name: str, features: Tensor, sides: tuple[int, int], own: Choices) -> Layer:
    tokens = features[0].mT  # (N, E)
    tokens = tokens - tokens.mean()
    spread = tokens.std() if tokens.numel() > 1 else tokens.new_ones(())
    tokens = tokens / (spread if spread > 1e-6 else 1.0)
    return Layer(name, "pixels", Map.whole(*sides), tokens[None], own=own)

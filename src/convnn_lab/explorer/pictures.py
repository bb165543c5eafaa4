"""Reading pictures as people have them: turned, transparent, gray, enormous."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

LARGEST = 2048
"""the longer side a picture keeps"""
PIXELS = 300_000_000
"""beyond so many it is not opened"""


@dataclass(frozen=True)
class Picture:
    """A picture as red, green and blue, and what was done to make it so."""

    name: str
    image: Image.Image
    notes: tuple[str, ...] = ()


def picture(path: Path) -> Picture:
    """Read a picture; what it shows is upright, opaque and of three colours."""
    if not path.is_file():
        raise ValueError(f"there is no picture {path}")
    notes: list[str] = []
    try:
        with _many_pixels(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(path) as opened:
                image = _upright(opened, notes)
    except (OSError, ValueError, SyntaxError, EOFError, struct.error, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} cannot be read as an image: {error}") from None
    return Picture(path.name, image, tuple(notes))


def _upright(opened: Image.Image, notes: list[str]) -> Image.Image:
    width, height = opened.size
    if max(width, height) > LARGEST:
        opened.draft("RGB", (LARGEST, LARGEST))  # a JPEG is decoded smaller at once
        notes.append(f"downscaled from {width} x {height}")
    image = _opaque(_bytes(opened), notes)
    if max(image.size) > LARGEST:
        image.thumbnail((LARGEST, LARGEST), Image.Resampling.LANCZOS, reducing_gap=2.0)
    orientation = opened.getexif().get(0x0112, 1)
    if orientation in range(2, 9):
        exif = image.getexif()
        exif[0x0112] = orientation
        image = ImageOps.exif_transpose(image)
        notes.append("turned as its camera says")
    return image


def _bytes(image: Image.Image) -> Image.Image:
    """Numbers of more than a byte as bytes."""
    if image.mode.startswith("I"):
        numbers = np.asarray(image).astype(np.int64)
        if numbers.min() < 0 or numbers.max() > 65535:
            raise ValueError(f"numbers beyond 16 bits have no brightness, got {numbers.min()} to {numbers.max()}")
        return Image.fromarray((numbers // 257).astype(np.uint8))
    if image.mode == "F":
        raise ValueError("floating point numbers have no brightness, got mode F")
    return image


def _opaque(image: Image.Image, notes: list[str]) -> Image.Image:
    if image.has_transparency_data:
        layered = image.convert("RGBA")
        if np.asarray(layered)[..., 3].min() < 255:
            notes.append("laid on white where it is transparent")
        white = Image.new("RGBA", layered.size, "white")
        return Image.alpha_composite(white, layered).convert("RGB")
    return image.convert("RGB")


@contextmanager
def _many_pixels() -> Iterator[None]:
    """Let Pillow open up to ``PIXELS``: what is downscaled at once is no attack."""
    kept, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, PIXELS // 2
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = kept

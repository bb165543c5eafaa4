"""Figures and numbers of what the layers look at, into a folder."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from PIL import Image

from convnn_lab.explorer import figures, measures
from convnn_lab.explorer.layer import Layer
from convnn_lab.explorer.networks import Network
from convnn_lab.explorer.pictures import Picture
from convnn_lab.explorer.pixels import PATCH, pixel_layers, scaled
from convnn_lab.train import store


@dataclass(frozen=True)
class Shown:
    """What is drawn.

    Args:
        place: the query, as parts of the picture's width and height.
        head: None for every head.
        dial: where on the way from a convolution to attention it is drawn too.
    """

    place: tuple[float, float] = (0.5, 0.5)
    head: int | None = 0
    dial: tuple[float, ...] = ()
    temperature: float = 1.0
    kind: str = "png"


@dataclass
class Measured:
    """How far the layers look in every picture so far."""

    names: list[str] = field(default_factory=list)
    reaches: list[list[measures.Reach]] = field(default_factory=list)

    def add(self, layers: Sequence[Layer], picture: tuple[int, int]) -> None:
        """Measure one more picture."""
        if not self.names:
            self.names, self.reaches = [layer.name for layer in layers], [[] for _ in layers]
        for kept, layer in zip(self.reaches, layers, strict=True):
            kept.append(measures.reach(layer, picture))

    def table(self) -> str:
        """The numbers, a row for every head of every layer, averaged over pictures."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["layer", "head", "pictures", "distance_px", "inside_3x3", "inside_5x5"])
        for name, seen in zip(self.names, self.reaches, strict=True):
            for head in range(len(seen[0].distance)):
                parts = ("distance", "inside3", "inside5")
                numbers = [f"{mean(getattr(each, part)[head] for each in seen):.6g}" for part in parts]
                writer.writerow([name, head, len(seen), *numbers])
        return text.getvalue()


def look(network: Network | None, seen: Picture, wanted: Sequence[str], cells: int) -> tuple[Image.Image, list[Layer]]:
    """The picture as it is seen, and the layers; None sees pixels."""
    if network is not None:
        return network.look(seen, wanted, cells)
    image, (rows, columns) = scaled(seen, cells)
    larger = max(1, 640 // (PATCH * max(rows, columns)))
    shown = seen.image.resize((image.width * larger, image.height * larger), Image.Resampling.LANCZOS)
    return shown, [layer for layer in pixel_layers(seen, cells) if not wanted or any(w in layer.name for w in wanted)]


def draw(
    pictures: Sequence[Picture],
    network: Network | None,
    folder: Path,
    shown: Shown,
    *,
    wanted: Sequence[str] = (),
    cells: int = 3136,
    samples: Sequence[Picture] = (),
) -> list[Path]:
    """Write the figures and ``neighbors.csv``; where they are.

    Args:
        samples: more pictures that are measured and not drawn.
    """
    measured, written = Measured(), list[Path]()

    def keep(name: str, figure: Any) -> None:
        path = folder / f"{name}.{shown.kind}"
        store.write(path, figures.saved(figure, shown.kind))
        written.append(path)

    first: list[Layer] = []
    for number, seen in enumerate([*pictures, *samples]):
        image, layers = look(network, seen, wanted, cells)
        if not layers:
            raise ValueError(f"no layer is called {' or '.join(wanted)}")
        measured.add(layers, image.size)
        if number >= len(pictures):
            continue
        first = first or layers
        end = "" if len(pictures) == 1 else f"-{number + 1}"
        keep(f"maps{end}", figures.maps(image, layers, shown.place, shown.head))
        if shown.dial:
            keep(f"dial{end}", figures.dialled(image, layers[-1], shown.place, shown.dial, shown.temperature))
        if layers[0].map.before and all(layer.map == layers[0].map for layer in layers):
            keep(f"rollout{end}", figures.rolled(image, measures.rollout(layers)))
    keep("distance", figures.distances(measured.names, measured.reaches))
    keep("locality", figures.localities(measured.names, measured.reaches))
    several = [layer for layer in first if layer.heads > 1]
    if several:
        keep("overlap", figures.overlaps([layer.name for layer in several], list(map(measures.overlap, several))))
    store.write(folder / "neighbors.csv", measured.table())
    return [*written, folder / "neighbors.csv"]

"""The commands that show what a layer looks at. Torch is imported when there is work to do."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from convnn_lab.parsing import require_writable

if TYPE_CHECKING:
    from convnn_lab.explorer.networks import Network


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Which network looks at the pictures; pixels alone unless told."""

    run: Path | None = None
    """the folder of a run"""
    model: str | None = None
    """the name of a model: one of convnn models, or one of timm's"""
    weights: Path | None = None
    """of --model: a file of its weights; random unless told"""
    layer: str | None = None
    """of --model: what stands where a convolution or an attention stood"""
    k: int | None = None
    """of --model: how many neighbours its layers choose"""
    ratio: float | None = None
    """of --model: share of neighbours in a hybrid layer"""
    candidates: str | None = None
    """of --model: random:R or grid:R"""
    size: int = 224
    """of --model: side of the picture"""
    layers: tuple[str, ...] = ()
    """only layers whose names contain one of these words"""
    cells: int = 3136
    """how many cells of a map are kept at most"""

    def check(self) -> None:
        """Refuse what says nothing or two things."""
        if self.run is not None and self.model is not None:
            raise ValueError("--run and --model each say who looks; give one")
        given = {"--weights": self.weights, "--layer": self.layer, "--k": self.k, "--ratio": self.ratio}
        for flag, value in {**given, "--candidates": self.candidates}.items():
            if value is not None and self.model is None:
                raise ValueError(f"{flag} is for --model, which was not given")
        for flag, number in (("--size", self.size), ("--cells", self.cells)):
            if number < 1:
                raise ValueError(f"{flag} must be at least 1, got {number}")

    def network(self) -> Network | None:
        """The network that was asked for."""
        from convnn_lab.explorer import networks
        from convnn_lab.train.build import candidates

        if self.run is not None:
            return networks.of_run(self.run)
        if self.model is None:
            return None
        options: dict[str, Any] = {"layer": self.layer, "k": self.k, "ratio": self.ratio}
        options["candidates"] = candidates(self.candidates)
        return networks.by_name(self.model, size=self.size, weights=self.weights, **options)


@dataclass(frozen=True)
class Explore(Seen):
    """Write a page on which every position of a picture shows its nearest neighbours."""

    images: tuple[Path, ...]
    """pictures"""
    compare: tuple[Path, Path] | None = None
    """two runs side by side, with the same query"""
    output: Path = Path("explore.html")
    """the page"""

    def run_it(self) -> int:
        """Write the page."""
        self.check()
        if not self.images:
            raise ValueError("name at least one picture")
        if self.compare is not None and (self.run is not None or self.model is not None):
            raise ValueError("--compare names both runs; leave out --run and --model")
        require_writable(self.output, "--output")
        from convnn_lab.explorer import networks, views

        pictures = views.pictures(self.images)
        if self.compare is None:
            who: Sequence[Network | None] = [self.network()]
        else:
            who = [networks.of_run(folder) for folder in self.compare]
        text = views.written(pictures, who, self.layers, self.cells)
        self.output.write_text(text, encoding="utf-8")
        for picture in pictures:
            for note in picture.notes:
                sys.stdout.write(f"{picture.name}: {note}\n")
        sys.stdout.write(f"{self.output}: {self.output.stat().st_size / 1e6:.1f} MB; open it in a browser\n")
        return 0


@dataclass(frozen=True)
class Neighbors(Seen):
    """Draw neighbours for a paper: maps by layer, how far and how locally each looks, what heads share."""

    images: tuple[Path, ...]
    """pictures"""
    at: tuple[float, float] = (0.5, 0.5)
    """the query, as parts of the picture's width and height"""
    head: int = 0
    """the head that is drawn; -1 for every one"""
    dial: tuple[float, ...] = ()
    """also draw the last layer on the way from a convolution, 0, to attention, 1, at these shares"""
    temperature: float = 1.0
    """of the weights on that way"""
    samples: int = 0
    """of --run: how many pictures its data set is tested on are measured too"""
    format: Literal["png", "svg", "pdf"] = "png"
    output: Path = Path("neighbors")
    """a folder"""

    def run_it(self) -> int:
        """Write the figures."""
        self.check()
        self.check_drawn()
        from convnn_lab.explorer import neighbors, networks, views

        who, seen = self.network(), views.pictures(self.images)
        more = [] if self.run is None or not self.samples else networks.tested(self.run, self.samples)
        self.output.mkdir(parents=True, exist_ok=True)
        head = None if self.head < 0 else self.head
        shown = neighbors.Shown(self.at, head, self.dial, self.temperature, self.format)
        chosen: dict[str, Any] = {"wanted": self.layers, "cells": self.cells, "samples": more}
        for path in neighbors.draw(seen, who, self.output, shown, **chosen):
            sys.stdout.write(f"{path}\n")
        return 0

    def check_drawn(self) -> None:
        """Refuse what cannot be drawn."""
        if not self.images:
            raise ValueError("name at least one picture")
        if not all(0 <= part <= 1 for part in (*self.at, *self.dial)):
            raise ValueError(f"--at and --dial must be from 0 to 1, got {self.at} and {self.dial}")
        if not self.temperature > 0:
            raise ValueError(f"--temperature must be greater than 0, got {self.temperature}")
        if self.samples < 0 or (self.samples and self.run is None):
            raise ValueError(f"--samples takes pictures of the data set of a --run, got {self.samples}")
        if self.output.exists() and not self.output.is_dir():
            raise ValueError(f"--output must name a folder, got the file {self.output}")


@dataclass(frozen=True)
class Report:
    """Write a run or a sweep as one page: curves, the thesis beside it, neighbours, kernels, configuration."""

    folder: Path
    """of a run, or of several"""
    output: Path = Path("report.html")
    """the page"""

    def run_it(self) -> int:
        """Write the page."""
        require_writable(self.output, "--output")
        if not self.folder.is_dir():
            raise ValueError(f"there is no folder {self.folder}")
        from convnn_lab.explorer.report import report

        self.output.write_text(report(self.folder), encoding="utf-8")
        sys.stdout.write(f"{self.output}\n")
        return 0


COMMANDS: dict[str, Any] = {"explore": Explore, "neighbors": Neighbors, "report": Report}


def long(arguments: Sequence[str]) -> list[str]:
    """Write out the short flag of these commands."""
    return ["--output" if word == "-o" and arguments[0] in COMMANDS else word for word in arguments]

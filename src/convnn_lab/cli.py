"""The ``convnn`` command. Nothing here imports torch before there is work to do, so that help answers at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from convnn_lab.commands import BY_RECIPE, Compare, Eval, Predict, Sweep, Train
from convnn_lab.dials import Dial
from convnn_lab.explorer import commands as explorer
from convnn_lab.parsing import parse, require_writable
from convnn_lab.rerun.commands import Reproduce
from convnn_lab.run_commands import Export, Kernels

# What a command ends with: 0, all is well; 1, what it checked does not hold; 2, it was asked for the impossible.
HOLDS, FAILS, MISUSED = 0, 1, 2


@dataclass(frozen=True)
class Verify:
    """Compare the operator and its layers with torch's own convolutions and attention."""

    cases: int = 20
    """random cases per row"""
    seed: int = 0
    """where the random cases start"""
    json: Path | None = None
    """also write the table to this file"""

    def run_it(self) -> int:
        """Print the table; 1 if any row differs."""
        if self.cases < 1:
            raise ValueError(f"--cases must be at least 1, got {self.cases}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"--seed must be from 0 to 2**63 - 1, got {self.seed}")
        if self.json is not None:
            require_writable(self.json)
        from convnn_lab import verify

        rows = verify.compare(self.cases, self.seed)
        verify.show(rows)
        if self.json is not None:
            self.json.write_text(verify.as_json(rows, self.cases, self.seed))
        return HOLDS if all(row.holds for row in rows) else FAILS


@dataclass(frozen=True)
class Models:
    """List the models there are, with their parameters."""

    def run_it(self) -> int:
        """Print them."""
        from convnn import models

        for name in models.names():
            parameters = sum(p.numel() for p in models.create(name, device="meta").parameters())
            sys.stdout.write(f"{name:12}{parameters:>14,}\n")
        return HOLDS


@dataclass(frozen=True)
class Info:
    """Say what a model costs: parameters, operations and activations, layer by layer."""

    model: str
    """its name; see convnn models"""
    layer: str | None = None
    """what stands where a convolution (conv, hybrid, convnn) or an attention (attention, kvt, convnn, ...) stood"""
    ratio: float | None = None
    """share of neighbours in a hybrid layer"""
    k: int | None = None
    """how many neighbours"""
    candidates: str | None = None
    """random:R or grid:R"""
    heads: int | None = None
    """of a ViT"""
    image: int | None = None
    """side of the image; 224 unless told"""
    classes: int = 1000
    channels: int = 3
    latency: bool = False
    """also measure the time of one image on the CPU"""
    memory: bool = False
    """also measure the memory of one image on the CPU"""
    json: Path | None = None
    """also write it to this file"""

    def run_it(self) -> int:
        """Print the table."""
        if self.json is not None:
            require_writable(self.json)
        for name, number in (("--image", 224 if self.image is None else self.image), ("--channels", self.channels)):
            if number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        from convnn_lab import info
        from convnn_lab.train import build

        options = {"layer": self.layer, "ratio": self.ratio, "k": self.k, "heads": self.heads}
        options |= {
            "candidates": build.candidates(self.candidates),
            "num_classes": self.classes,
            "in_channels": self.channels,
        }
        given = {name: value for name, value in options.items() if value is not None}
        try:
            image = 224 if self.image is None else self.image
            told = info.inspect(self.model, given, image=image, latency=self.latency, memory=self.memory)
        except TypeError as error:
            raise ValueError(f"{self.model} does not take these options: {error}") from None
        info.show(told)
        if self.json is not None:
            self.json.write_text(info.as_json(told))
        return HOLDS


@dataclass(frozen=True)
class Bench:
    """Time the operator, layers or networks against their peers, or see how far apart ways to run it are."""

    what: Literal["op", "attention", "conv", "long", "vgg", "correctness"]
    """the operator; the attention layer; layers on maps and what they run; many keys; training steps of networks: on a
    CUDA device; or the thesis's correctness test, on any"""
    models: tuple[Literal["vgg11", "resnet50"], ...] = ()
    """the networks of vgg; all unless told"""
    contenders: tuple[str, ...] = ()
    """of op, those of these names; all unless told"""
    csv: Path | None = None
    """also write the table to this file"""

    def run_it(self) -> int:
        """Print the table."""
        if self.csv is not None:
            require_writable(self.csv, "--csv")
        import torch

        from convnn_lab.bench import conv, correctness, layer, long, measure, networks, op, report

        if self.models and self.what != "vgg":
            raise ValueError(f"--models is for convnn bench vgg, got it with {self.what}")
        if self.contenders and self.what != "op":
            raise ValueError(f"--contenders is for convnn bench op, got it with {self.what}")
        unknown = [name for name in self.contenders if name not in op.NAMES]
        if unknown:
            raise ValueError(
                f"convnn bench op has {', '.join(map(repr, op.NAMES))}, got {', '.join(map(repr, unknown))}"
            )
        if self.what == "correctness":
            device = "cuda" if torch.cuda.is_available() else "cpu"
            correctness.show(correctness.differences(device=device), self.csv)
            return HOLDS
        measure.require_device()
        if self.what == "vgg":
            chosen = [networks.CASES[name] for name in self.models or networks.CASES]
            report.show(networks.networks(chosen), self.csv, measure.Training)
            return HOLDS
        tables: dict[str, Any] = {"op": op.op, "attention": layer.attention, "conv": conv.conv, "long": long.long}
        only = {"only": self.contenders} if self.contenders else {}
        report.show(tables[self.what](**only), self.csv)
        return HOLDS


COMMANDS: dict[str, Any] = {
    "verify": Verify,
    "train": Train,
    "sweep": Sweep,
    "compare": Compare,
    "eval": Eval,
    "predict": Predict,
    "kernels": Kernels,
    "export": Export,
    "dial": Dial,
    "models": Models,
    "info": Info,
    "reproduce": Reproduce,
    "bench": Bench,
    **explorer.COMMANDS,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; a wrong call is answered in one line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if list(arguments) == ["--version"]:
            from importlib.metadata import version

            sys.stdout.write(f"convnn {version('convnn')}\n")
            return HOLDS
        if list(arguments) == ["reproduce", "--list"]:
            from convnn_lab import reproduce

            reproduce.listed()
            return HOLDS
        if arguments and arguments[0] in BY_RECIPE:
            return BY_RECIPE[arguments[0]](list(arguments[1:]))
        described = "Convolution and attention as one operator over nearest neighbours."
        return int(parse(COMMANDS, explorer.long(arguments), prog="convnn", description=described).run_it())
    except (ValueError, OSError) as error:
        sys.stderr.write(f"convnn: {error}\n")
        return MISUSED
    except KeyboardInterrupt:
        sys.stderr.write("convnn: interrupted\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())

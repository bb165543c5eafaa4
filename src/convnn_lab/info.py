"""What a model costs: parameters, operations, activations, layer by layer; time and memory if asked."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from convnn import models
from convnn_lab.bench.memory import LiveTensors
from convnn_lab.tables.flops import RULES, count, example, executed


@dataclass(frozen=True)
class Layer:
    """One layer of a model on one image."""

    name: str
    kind: str
    output: tuple[int, ...]
    parameters: int
    flops: int


@dataclass(frozen=True)
class Info:
    """A model on one image."""

    model: str
    options: Mapping[str, Any]
    image: int
    parameters: int
    flops: int
    executed: int
    activations: int
    layers: tuple[Layer, ...]
    milliseconds: float | None = None
    peak_bytes: int | None = None


def inspect(name: str, options: dict[str, Any], *, image: int, latency: bool = False, memory: bool = False) -> Info:
    """Build a model on the meta device and count; on the CPU too, where time or memory is asked for."""
    sized = _sized(name, options, image)
    model = models.create(name, **sized, device="meta").eval()
    layers = tuple(_layers(model, image))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    activations = sum(_numel(layer.output) for layer in layers)
    measured = _measured(name, sized, image, latency, memory) if latency or memory else (None, None)
    flops, ours = count(model, image, published=False).true, executed(model, image)
    return Info(name, _plain(options), image, parameters, flops, ours, activations, layers, *measured)


def _sized(name: str, options: dict[str, Any], size: int) -> dict[str, Any]:
    """The options of a model for images of such a side, or for texts of so many tokens out of so many classes."""
    if name.startswith("vit"):
        return {**options, "image_size": size}
    if not name.startswith("gpt"):
        return options
    named = {"num_classes": "vocabulary"}
    return {named.get(key, key): value for key, value in options.items() if key != "in_channels"} | {"length": size}


def _layers(model: nn.Module, image: int) -> list[Layer]:
    seen: list[Layer] = []
    hooks = []
    for name, module in model.named_modules():
        rule = next(
            (rule for kind, rule in RULES.items() if isinstance(module, kind) and list(module.parameters())), None
        )
        leaf = not list(module.children())
        if rule is None and not (leaf and list(module.parameters())):
            continue

        def hook(module: Any, inputs: Any, output: Tensor, name: str = name, rule: Any = rule) -> None:
            counts = 0 if rule is None else rule(module, inputs[0], output, published=False).true
            parameters = sum(p.numel() for p in module.parameters())
            seen.append(Layer(name, type(module).__name__, tuple(output.shape), parameters, counts))

        if type(module).__name__ not in ("Block", "ViT", "GPT"):
            hooks.append(module.register_forward_hook(hook))
    with torch.no_grad():
        model(example(model, image))
    for each in hooks:
        each.remove()
    return [layer for layer in seen if not any(layer.name.startswith(f"{other.name}.") for other in seen)]


def _measured(
    name: str, options: dict[str, Any], image: int, latency: bool, memory: bool
) -> tuple[float | None, int | None]:
    model = models.create(name, **options).eval()
    x = example(model, image, "cpu")
    with torch.no_grad():
        model(x)
        times = []
        for _ in range(5 if latency else 0):
            start = time.perf_counter()
            model(x)
            times.append(1000 * (time.perf_counter() - start))
        peak = None
        if memory:
            with LiveTensors() as live:
                model(x)
            peak = live.peak
    return (median(times) if times else None), peak


def _numel(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value if isinstance(value, (int, float, str)) else repr(value) for name, value in options.items()}


def show(info: Info) -> None:
    """Print the layers and the sums."""
    drawn = Table(title=f"{info.model} on {info.image} by {info.image}", box=SIMPLE)
    for name in ("layer", "kind"):
        drawn.add_column(name)
    for name in ("output", "parameters", "MFLOPS"):
        drawn.add_column(name, justify="right")
    for layer in info.layers:
        shape = " x ".join(map(str, layer.output[1:]))
        drawn.add_row(layer.name, layer.kind, shape, f"{layer.parameters:,}", f"{layer.flops / 1e6:,.2f}")
    console = Console()
    console = console if console.is_terminal else Console(width=160)
    console.print(drawn)
    said = f"{info.parameters:,} parameters, {info.flops / 1e9:.3f} GFLOPS ({info.executed / 1e9:.3f} executed), "
    said += f"{info.activations:,} activations"
    said += "" if info.milliseconds is None else f", {info.milliseconds:.1f} ms on the CPU"
    said += "" if info.peak_bytes is None else f", {info.peak_bytes / 2**20:.1f} MiB at most beside the parameters"
    console.print(said, highlight=False)


def as_json(info: Info) -> str:
    """Write it for machines."""
    return json.dumps(asdict(info), indent=2) + "\n"

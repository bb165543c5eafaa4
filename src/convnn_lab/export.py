"""A trained run as a file for others: ONNX, torch's own program, or weights with what rebuilds their model."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from convnn_lab.recipes import from_dict
from convnn_lab.train import evaluate, store
from convnn_lab.train.build import build
from convnn_lab.train.run import Run

ABOUT = "convnn"  # what it is filed under in a file's own metadata
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
Sizes: TypeAlias = dict[str, tuple[int, int | None]]


@dataclass(frozen=True)
class Exported:
    """A file that was written.

    Args:
        sizes: the least and the most of batch and sides, by name; None for no limit.
        difference: between it and the model, on a batch and a size it was not made with; None where it does not run.
    """

    path: Path
    sizes: Sizes = field(default_factory=dict)
    difference: float | None = None


def require(packages: tuple[str, ...] = PACKAGES) -> None:
    """Say what is missing, and how to get it."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ValueError(f"this export needs {', '.join(missing)}: pip install 'convnn[export]'")


def export(folder: Path, path: Path, kind: str, which: evaluate.Which = "last") -> Exported:
    """Write the model of a run, on the CPU, as it is used for testing."""
    if kind == "onnx":
        require()
    run = Run.open(folder)
    name, recipe = run.recipe()
    about = {**store.read_json(folder / "data.json"), "recipe": name, "weights": which, "config": recipe.as_dict()}
    model = defined(evaluate.trained(run, replace(recipe, accelerator="cpu"), which, torch.device("cpu"))[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    return WRITERS[kind](model, _example(about), path, about)


def _example(about: dict[str, Any]) -> Tensor:
    """A batch as the model takes it: images, or the numbers of characters."""
    size = about["size"]
    return torch.zeros(2, about["channels"], size, size) if about["mean"] else torch.zeros(2, size, dtype=torch.int64)


def axes(given: Tensor) -> dict[str, int]:
    """The dimensions that are to stay open."""
    return {"batch": 0, "height": 2, "width": 3} if given.ndim == 4 else {"batch": 0, "tokens": 1}


def defined(model: nn.Module) -> nn.Module:
    """Let a model run as it is exported, by the definition: elsewhere keys that are equally near may change places."""
    for module in model.modules():
        if getattr(module, "backend", None) == "auto" and not getattr(module, "is_convolution", False):
            module.backend = "reference"  # type: ignore[assignment]
    return model


def program(model: nn.Module, given: Tensor) -> ExportedProgram:
    """Export a model for every batch and size it can take."""
    with _open_sizes(), torch.no_grad():
        return torch.export.export(model, (given,), dynamic_shapes=_dynamic(given), strict=False)


def limits(exported: ExportedProgram, example: Tensor) -> Sizes:
    """The least and the most of batch and sides a program takes, as far as it knows."""
    (given,) = exported.graph_signature.user_inputs
    shape = next(node for node in exported.graph.nodes if node.name == given).meta["val"].shape
    found: Sizes = {}
    for name, axis in axes(example).items():
        side = shape[axis]
        if isinstance(side, int):
            found[name] = (side, side)
            continue
        span = exported.range_constraints[side.node.expr]
        found[name] = (max(1, int(span.lower)), int(span.upper) if span.upper < 2**40 else None)
    return found


def _write_program(model: nn.Module, example: Tensor, path: Path, about: dict[str, Any]) -> Exported:
    exported = program(model, example)
    torch.export.save(exported, path, extra_files={f"{ABOUT}.json": json.dumps(_plain(about))})
    with _quietly():
        loaded: Any = torch.export.load(path).module()
    sizes = _tried(loaded, example, limits(exported, example))
    return Exported(path, sizes, _difference(model, loaded, example, sizes))


def _tried(run: Any, example: Tensor, sizes: Sizes) -> Sizes:
    """The same with the least sides a program really runs: what it requires of them is not all in its ranges."""
    if "height" not in sizes or any(least == most for least, most in sizes.values()):
        return sizes
    batch, channels, whole, _ = example.shape

    def runs(side: int) -> bool:
        try:
            for sides in ((side, side), (side, whole), (whole, side)):
                run(example.new_zeros(batch, channels, *sides))
        except (RuntimeError, AssertionError):  # what torch raises where a size is refused
            return False
        return True

    least = next((side for side in range(1, whole) if runs(side)), whole)
    return {name: (max(low, least if name != "batch" else low), most) for name, (low, most) in sizes.items()}


def _write_onnx(model: nn.Module, example: Tensor, path: Path, about: dict[str, Any]) -> Exported:
    exported = program(model, example)
    # Given the model and not the program: only then does the operator know where it is going.
    with _open_sizes(), _quietly(), torch.no_grad():
        made = torch.onnx.export(
            model,
            (example,),
            dynamo=True,
            verbose=False,
            dynamic_shapes=_dynamic(example),
            input_names=["images" if example.ndim == 4 else "tokens"],
            output_names=["logits"],
        )
    if made is None:
        raise RuntimeError("torch.onnx.export returned nothing")
    made.model.metadata_props[ABOUT] = json.dumps(_plain(about))
    made.save(str(path))
    sizes = limits(exported, example)
    return Exported(path, sizes, _difference(model, runner(path), example, sizes))


def runner(path: Path) -> Callable[[Tensor], Tensor]:
    """Run an ONNX file on the CPU."""
    require()
    import onnxruntime  # noqa: PLC0415 - not everybody has it

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    return lambda batch: torch.from_numpy(session.run(None, {given.name: batch.numpy()})[0])


def _write_weights(model: nn.Module, example: Tensor, path: Path, about: dict[str, Any]) -> Exported:  # noqa: ARG001
    weights = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, path, metadata={ABOUT: json.dumps(_plain(about))})
    return Exported(path)


def load(path: Path) -> nn.Module:
    """Build the model of a file that was exported as safetensors, with its weights, for testing."""
    with safe_open(path, "pt") as file:
        told = (file.metadata() or {}).get(ABOUT)
        if told is None:
            raise ValueError(
                f"{path} does not say which model its weights belong to; convnn export writes files that do"
            )
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    about = json.loads(told)
    model = build(from_dict(about["config"]), about["channels"], about["size"], len(about["classes"]))
    model.load_state_dict(weights)
    return model.eval()


WRITERS: dict[str, Callable[[nn.Module, Tensor, Path, dict[str, Any]], Exported]] = {
    "onnx": _write_onnx,
    "pt2": _write_program,
    "safetensors": _write_weights,
}


def _difference(model: nn.Module, other: Any, example: Tensor, sizes: Sizes) -> float:
    """The largest difference on a batch, and where they are open on sides, that were not there at export."""
    shape = list(example.shape)
    for name, axis in axes(example).items():
        least, most = sizes[name]
        shape[axis] = 3 if name == "batch" else 2 * shape[axis] if most is None else max(least, most // 2)
    seen = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    seen = seen if example.is_floating_point() else (seen > 0).long()  # the first two characters
    with torch.no_grad():
        return float((other(seen) - model(seen)).abs().max())


def _dynamic(given: Tensor) -> tuple[dict[int, Any]]:
    return (dict.fromkeys(axes(given).values(), Dim.AUTO),)


@contextmanager
def _open_sizes() -> Iterator[None]:
    """Let a side that ends as one cell stay open: VGG's five poolings make one of 32."""
    from torch.fx.experimental import _config  # noqa: PLC0415 - brings much along

    settings: Any = _config
    with settings.patch(backed_size_oblivious=True):
        yield


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the exporter's remarks on its own dependencies."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _plain(about: dict[str, Any]) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in about.items()}

"""Every layer and model as a program of torch and as ONNX, on batches and sizes that were not there at export."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import convnn
from convnn import ConvNN1d, ConvNN2d, ConvNN3d, ConvNNAttention, HybridConv1d, HybridConv2d, HybridConv3d, models
from convnn.candidates import grid, random
from convnn.layers import LinearAttention
from convnn_lab import export

# What is exported is the reference; elsewhere two neighbours that are equally near may change places.
DEFINED: dict[str, Any] = {"backend": "reference"}
FEATURES: dict[str, Any] = {"similarity": "cosine", **DEFINED}


class Attends(nn.Module):
    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.attn, self.need_weights = convnn.MultiheadConvNN(12, 3, k=4, batch_first=True), need_weights

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, x, x, need_weights=self.need_weights)[0]


def after_the_first(in_channels: int, out_channels: int, /, *, stride: int = 1, bias: bool = True) -> nn.Module:
    """A convolution where a map is too large for all its scores."""
    if in_channels == 3:
        return nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=bias)
    return ConvNN2d(in_channels, out_channels, 3, stride, 1, bias=bias, k=3, **FEATURES)


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    shown: tuple[int, ...]  # at export
    others: tuple[tuple[int, ...], ...]
    fixed: int = 1  # the dimension of channels


TOKENS: Any = ((2, 9, 12), ((1, 14, 12), (3, 5, 12)), 2)
MAPS: Any = ((2, 4, 8, 10), ((1, 4, 6, 12), (3, 4, 12, 6)))
VOLUMES: Any = ((2, 4, 3, 4, 5), ((1, 4, 4, 5, 3), (3, 4, 5, 3, 4)))
LINES: Any = ((2, 4, 9), ((1, 4, 14), (3, 4, 6)))

LAYERS: dict[str, Case] = {
    "ConvNN1d": Case(lambda: ConvNN1d(4, 6, 3, padding=1, **FEATURES), *LINES),
    "ConvNN2d": Case(lambda: ConvNN2d(4, 6, 3, padding=1, k=5, **FEATURES), *MAPS),
    "ConvNN3d": Case(lambda: ConvNN3d(4, 6, 2, **FEATURES), *VOLUMES),
    "in space": Case(lambda: ConvNN2d(4, 6, 3, stride=2, padding=1, **DEFINED), *MAPS),
    "a convolution": Case(lambda: ConvNN2d(4, 6, 3, stride=2, padding=1), *MAPS),
    "with heads": Case(lambda: ConvNN2d(4, 6, 3, heads=2, **FEATURES), *MAPS),
    "blended": Case(lambda: ConvNN2d(4, 6, 3, padding=1, blend=0.5, **DEFINED), *MAPS),
    "drawn candidates": Case(lambda: ConvNN2d(4, 6, 3, padding=1, candidates=random(16), **FEATURES), *MAPS),
    "candidates on a grid": Case(lambda: ConvNN2d(4, 6, 3, padding=1, candidates=grid(16), **FEATURES), *MAPS),
    "HybridConv1d": Case(lambda: HybridConv1d(4, 6, 3, **DEFINED), *LINES),
    "HybridConv2d": Case(lambda: HybridConv2d(4, 6, 3, patch=2, **DEFINED), *MAPS),
    "HybridConv3d": Case(lambda: HybridConv3d(4, 6, 3, k=4, **DEFINED), *VOLUMES),
    "ConvNNAttention": Case(lambda: ConvNNAttention(12, 3, k=4, **DEFINED), *TOKENS),
    "kernels by head": Case(lambda: ConvNNAttention(12, 3, k=4, shared_kernel=False, **DEFINED), *TOKENS),
    "attention among few": Case(lambda: ConvNNAttention(12, 3, k=3, candidates=random(4), **DEFINED), *TOKENS),
    "causal attention": Case(lambda: ConvNNAttention(12, 3, k=4, mask="causal", **DEFINED), *TOKENS),
    "self-attention": Case(lambda: ConvNNAttention(12, 3, k="all", kernel=None, **DEFINED), *TOKENS),
    "MultiheadConvNN": Case(lambda: Attends(False), *TOKENS),
    "with weights": Case(lambda: Attends(True), *TOKENS),
    "LinearAttention": Case(lambda: LinearAttention(12, 3), *TOKENS),
}
NETWORKS: dict[str, Case] = {
    "ViT": Case(
        lambda: models.ViT(16, 1, 2, 4, image_size=16, layer="convnn", k=4, num_classes=7),
        *((2, 3, 16, 16), ((1, 3, 8, 20), (3, 3, 16, 16))),
    ),
    "ViT that counts": Case(
        lambda: models.ViT(16, 1, 2, 4, image_size=16, layer="convnn", k=4, num_classes=7, positions="sinusoidal"),
        *((2, 3, 16, 16), ((1, 3, 8, 20), (3, 3, 16, 16))),
    ),
    "ResNet": Case(
        lambda: models.ResNet("basic", (1, 1), width=4, stem="cifar", layer="hybrid", num_classes=7, **DEFINED),
        *((2, 3, 8, 8), ((1, 3, 6, 12), (3, 3, 8, 8))),
    ),
    "VGG": Case(
        lambda: models.VGG(((24,),) * 5, layer=after_the_first, num_classes=7),
        *((2, 3, 64, 64), ((1, 3, 64, 96),)),
    ),
}
CASES = {**LAYERS, **NETWORKS}
# Each takes seconds; on the way to ONNX there is a program, too.
PROGRAMS = ("ConvNN1d", "drawn candidates", "MultiheadConvNN", "ViT")
ONNX = ("ConvNN2d", "HybridConv2d", "ConvNNAttention")


def marked(names: Any, quick: Any) -> list[Any]:
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


def dynamic(case: Case) -> tuple[dict[int, Any]]:
    return ({axis: torch.export.Dim.AUTO for axis in range(len(case.shown)) if axis != case.fixed},)


def made(case: Case) -> nn.Module:
    model = case.make().eval().requires_grad_(False)
    return export.defined(model)


def agrees(run: Callable[[Tensor], Tensor], model: nn.Module, case: Case, error: float) -> None:
    for shape in (case.shown, *case.others):
        x = torch.randn(shape, dtype=next(model.parameters()).dtype)
        torch.testing.assert_close(run(x), model(x), rtol=error, atol=error)


@pytest.mark.parametrize("name", marked(CASES, PROGRAMS))
def test_a_program_serves_every_batch_and_size(name: str) -> None:
    case = CASES[name]
    model = made(case)
    x = torch.randn(case.shown, dtype=next(model.parameters()).dtype)
    program = torch.export.export(model, (x,), dynamic_shapes=dynamic(case), strict=False)
    agrees(program.module(), model, case, 1e-5)


@contextmanager
def quietly() -> Iterator[None]:
    """Without what the exporter says of its own dependencies."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", marked(CASES, ONNX))
def test_onnx_serves_every_batch_and_size(name: str, tmp_path: Path) -> None:
    import onnxruntime  # noqa: PLC0415 - slow to import

    case = CASES[name]
    model = made(case)
    with quietly():
        x = torch.randn(case.shown, dtype=next(model.parameters()).dtype)
        torch.onnx.export(model, (x,), tmp_path / "m.onnx", dynamo=True, verbose=False, dynamic_shapes=dynamic(case))
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    agrees(lambda x: torch.from_numpy(np.asarray(session.run(None, {given.name: x.numpy()})[0])), model, case, 1e-5)


def test_of_equals_the_first_comes_first_in_onnx_too(tmp_path: Path) -> None:
    import onnxruntime  # noqa: PLC0415 - slow to import

    class Ties(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return convnn.functional.nearest(x, x, k=7, similarity="dot").index

    x = torch.randint(0, 2, (2, 40, 1)).float()
    with quietly():
        torch.onnx.export(Ties(), (x,), tmp_path / "m.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    for b in range(2):
        keys = x[b, :, 0].tolist()
        for i in range(40):
            expected = sorted(range(40), key=lambda j: (-keys[i] * keys[j], j))[:7]
            assert found[b, i].tolist() == expected

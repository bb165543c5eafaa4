"""Compiled models: the same runs, from one compiled block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from convnn import HybridConv2d
from convnn_lab.recipes import RECIPES, Recipe
from convnn_lab.train import fit
from convnn_lab.train.again import compute_again
from convnn_lab.train.build import build
from convnn_lab.train.compiled import compile_parts
from tests.train.test_runs import dead

# The compiler looks at it in what it is given, and hides the warning, which is an error here before it can.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

VIT = replace(
    RECIPES["digits"], model="vit_tiny", layer="convnn", ratio=None, patch=4, k=3, epochs=1, batch=512, lr=1e-4,
    accelerator="cpu",
)  # fmt: skip


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """Compile without writing machine code, and count what is compiled."""
    torch.compiler.reset()
    made = CompileCounterWithBackend("aot_eager")
    compiled: Callable[..., None] = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self: compiled(self, backend=made))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=made))
    return made


def test_blocks_that_are_alike_are_compiled_once(counter: CompileCounterWithBackend) -> None:
    model = build(VIT, 1, 8, 10)
    x, names = torch.randn(5, 1, 8, 8), list(model.state_dict())
    expected = model(x)
    compile_parts(model)
    torch.testing.assert_close(model(x), expected)
    assert counter.frame_count == 1
    assert list(model.state_dict()) == names


def test_a_model_without_blocks_is_compiled_as_a_whole(counter: CompileCounterWithBackend) -> None:
    model = build(replace(RECIPES["digits"], layer="conv"), 1, 8, 10).eval()
    x = torch.randn(5, 1, 8, 8)
    expected = model(x)
    compile_parts(model)
    torch.testing.assert_close(model(x), expected)
    assert counter.frame_count == 1


def test_the_inside_of_blocks_is_compiled_and_computed_again(counter: CompileCounterWithBackend) -> None:
    model = build(VIT, 1, 8, 10)
    x = torch.randn(5, 1, 8, 8)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(model(x).square().sum(), parameters)
    compute_again(model, compiled=True)
    before = counter.frame_count
    found = torch.autograd.grad(model(x).square().sum(), parameters)
    assert (before, counter.frame_count) == (0, 1)
    torch.testing.assert_close(found, expected)


def test_what_is_inside_another_block_is_not_computed_again_twice(counter: CompileCounterWithBackend) -> None:
    model = nn.Sequential(HybridConv2d(3, 4, 3, k=3), nn.ReLU(), HybridConv2d(4, 6, 3, k=5))  # each holds a ConvNN
    x, parameters = torch.randn(2, 3, 7, 8), list(model.parameters())
    expected = torch.autograd.grad(model(x).square().sum(), parameters)
    compute_again(model, compiled=True)
    found = torch.autograd.grad(model(x).square().sum(), parameters)
    assert counter.frame_count > 0
    torch.testing.assert_close(found, expected)


def test_a_compiled_run_learns_what_any_other_does_also_after_it_was_killed(
    counter: CompileCounterWithBackend, tmp_path: Path
) -> None:
    given: Recipe = replace(VIT, compile=True)
    rows: Any = partial(map, lambda row: (row["train_loss"], row["val_loss"], row["val_acc"]))
    alone = list(rows(fit.train("digits", VIT, tmp_path / "alone", quiet=True).rows()))
    assert counter.frame_count == 0
    whole = list(rows(fit.train("digits", given, tmp_path / "whole", quiet=True).rows()))
    assert counter.frame_count > 0
    resumed = fit.resume(dead(replace(given, save_steps=1), tmp_path / "run", 2).folder, quiet=True)
    assert list(rows(resumed.rows())) == whole
    before = counter.frame_count
    again = fit.train("digits", replace(given, checkpoint_activations=True), tmp_path / "again", quiet=True)
    assert counter.frame_count > before
    for mine, theirs in zip([*whole, *rows(again.rows())], [*alone, *alone], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=2e-3)

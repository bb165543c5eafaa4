"""Recorded steps on a CUDA device: what they compute, draw and decline. Run with `make test-gpu`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convnn import HybridConv2d
from convnn.candidates import random
from convnn_lab.bench.networks import multiplying
from convnn_lab.recipes import RECIPES
from convnn_lab.train import fit, graph, store
from tests.train.test_runs import dead

pytestmark = pytest.mark.gpu


def tiny() -> nn.Module:
    layers = (
        HybridConv2d(3, 16, 3, k=9), nn.BatchNorm2d(16), nn.ReLU(), HybridConv2d(16, 12, 3, candidates=random(20)),
        nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(12 * 8 * 6, 5),
    )  # fmt: skip
    return nn.Sequential(*layers).cuda()


class Net:
    """A tiny network and its loss, whose step is repeated from the same buffers and the same seed."""

    def __init__(self) -> None:
        self.model = tiny()
        self.parameters = list(self.model.parameters())

    def outcome(self, images: Tensor, labels: Tensor) -> graph.Outcome:
        logits = self.model(images)
        return logits, labels, F.cross_entropy(logits, labels)

    def eager(self, images: Tensor, labels: Tensor) -> list[Tensor]:
        """Logits, loss and gradients, nothing of their graph, and the buffers and the generator afterwards."""
        before = [buffer.clone() for buffer in self.model.buffers()]
        logits, _, loss = self.outcome(images, labels)
        with torch.autocast("cuda", enabled=False):
            gradients = torch.autograd.grad(loss, self.parameters)
        after = [buffer.clone() for buffer in self.model.buffers()]
        for buffer, kept in zip(self.model.buffers(), before, strict=True):
            buffer.copy_(kept)
        return [logits.detach(), loss.detach(), *gradients, *after, torch.cuda.get_rng_state()]

    def graphed(self, step: graph.Graphed, images: Tensor, labels: Tensor) -> list[Tensor]:
        """The same of a recorded step."""
        for parameter in self.parameters:
            parameter.grad = None
        found = step(images, labels)
        assert found is not None
        assert step.give()
        gradients: list[Any] = [parameter.grad for parameter in self.parameters]
        return [found[0], found[2], *gradients, *self.model.buffers(), torch.cuda.get_rng_state()]


@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
def test_a_recorded_step_computes_and_draws_what_any_other_does(precision: str) -> None:
    net = Net()
    step = graph.Graphed(net.outcome, net.parameters, declined=pytest.fail)
    optimizer, losses = torch.optim.SGD(net.parameters, 0.1), set()
    half = precision == "bf16"
    with multiplying(precision), torch.autocast("cuda", torch.bfloat16, enabled=half, cache_enabled=False):
        for number in range(8):
            batch = torch.randn(24, 3, 8, 6, device="cuda"), torch.randint(5, (24,), device="cuda")
            torch.cuda.manual_seed(number)
            expected = net.eager(*batch)
            torch.cuda.manual_seed(number)
            found = net.graphed(step, *batch)
            for mine, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
            losses.add(float(found[1]))
            optimizer.step()
    assert step.replay is not None
    assert len(losses) == 8


def test_replays_draw_anew() -> None:
    net = Net()
    graphed = graph.Graphed(net.outcome, net.parameters, declined=pytest.fail)
    images, labels = torch.randn(16, 3, 8, 6, device="cuda"), torch.randint(5, (16,), device="cuda")
    losses = []
    for _ in range(graph.TRIES + 4):
        found = graphed(images, labels)
        assert found is not None
        losses.append(float(found[2]))
    assert len(set(losses)) == len(losses)


def test_a_step_that_waits_is_declined() -> None:
    weight = nn.Parameter(torch.ones(3, device="cuda"))
    waited: list[str] = []

    def outcome(images: Tensor, labels: Tensor) -> graph.Outcome:
        logits = images * weight
        return logits, labels, logits.square().mean() * float(images.sum())

    graphed = graph.Graphed(outcome, [weight], declined=waited.append)
    images, labels = torch.randn(4, 3, device="cuda"), torch.zeros(4, device="cuda")
    found = [graphed(images, labels) for _ in range(graph.TRIES + 2)]
    assert [each is None for each in found] == [False] * graph.TRIES + [True] * 2
    assert "test_graph.py" in waited[0]


# The compiler looks at it in what it is given, and hides the warning, which is an error here before it can.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("given", [{"layer": "attention", "k": None}, {}, {"candidates": "random:3"}])
def test_compiled_blocks_are_recorded_and_learn_what_others_learn(given: dict[str, Any], tmp_path: Path) -> None:
    base = replace(RECIPES["digits"], model="vit_tiny", layer="convnn", ratio=None, patch=2, k=3, epochs=2, batch=64)
    base, rows = replace(base, lr=2e-4, precision="bf16", **given), {}
    for compiles in (True, False):
        run = fit.train("digits", replace(base, graph="on", compile=compiles), tmp_path / str(compiles), quiet=True)
        rows[compiles] = run.rows()
        assert store.read_json(run.folder / "environment.json")[0]["steps"] == "as a recorded graph"
    for mine, theirs in zip(rows[True], rows[False], strict=True):
        assert mine["train_loss"] == pytest.approx(theirs["train_loss"], rel=0.03)
        assert mine["val_loss"] == pytest.approx(theirs["val_loss"], rel=0.08)


@pytest.mark.parametrize("given", [{}, {"precision": "bf16"}, {"accumulate": 2, "morph_k": "9,4@1", "ema": 0.9}])
def test_recorded_runs_learn_what_others_learn(given: dict[str, Any], tmp_path: Path) -> None:
    recipe = replace(RECIPES["digits"], epochs=2, batch=64, lr=5e-4, candidates="random:16", **given)
    rows = {}
    for how in ("on", "off"):
        run = fit.train("digits", replace(recipe, graph=how), tmp_path / how, quiet=True)
        rows[how] = run.rows()
        told = store.read_json(run.folder / "environment.json")[0]["steps"]
        assert told == ("as a recorded graph" if how == "on" else "kernel by kernel: --graph off")
    for mine, theirs in zip(rows["on"], rows["off"], strict=True):
        assert mine["train_loss"] == pytest.approx(theirs["train_loss"], rel=0.02)
        assert mine["val_loss"] == pytest.approx(theirs["val_loss"], rel=0.05)


def test_a_recorded_run_goes_on_after_its_process_died(tmp_path: Path) -> None:
    given = replace(RECIPES["digits"], epochs=2, batch=128, lr=5e-4, candidates="random:16", graph="on", save_steps=1)
    whole = fit.train("digits", given, tmp_path / "whole", quiet=True)
    resumed = fit.resume(dead(given, tmp_path / "run", 7).folder, quiet=True)
    for mine, theirs in zip(resumed.rows(), whole.rows(), strict=True):
        assert mine["train_loss"] == pytest.approx(theirs["train_loss"], rel=0.02)

"""Steps that are recorded: the same runs as without, on a recorder that needs no GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from convnn_lab import cli
from convnn_lab.recipes import RECIPES, Recipe, from_dict
from convnn_lab.train import fit, graph, store, surroundings
from convnn_lab.train.build import build
from tests.train.test_runs import assert_same, dead


class Replays:
    """Records as CUDA does: nothing is computed by a recording, and a replay reads and fills the same memory."""

    model: nn.Module
    trials, recordings, replays, waits = 0, 0, 0, ()

    def tried(self, run: graph.Run) -> tuple[list[Tensor], list[str]]:
        Replays.trials += 1
        return run(), list(self.waits)

    def recorded(self, run: graph.Run) -> tuple[list[Tensor], Callable[[], object]]:
        Replays.recordings += 1
        random, buffers = torch.get_rng_state(), [buffer.clone() for buffer in self.model.buffers()]
        kept = run()
        torch.set_rng_state(random)
        for buffer, before in zip(self.model.buffers(), buffers, strict=True):
            buffer.copy_(before)
        for each in (kept[0], *kept[2:]):  # labels are what was given
            each.fill_(torch.nan)

        def replay() -> None:
            Replays.replays += 1
            for place, each in zip(kept, run(), strict=True):
                place.copy_(each)

        return kept, replay


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[Replays]:
    """Let the CPU pass for a GPU whose steps are recorded."""
    for name in ("trials", "recordings", "replays"):
        setattr(Replays, name, 0)
    monkeypatch.setattr(Replays, "waits", ())
    against = graph.against

    def built(*given: Any) -> nn.Module:
        Replays.model = build(*given)
        return Replays.model

    monkeypatch.setattr("convnn_lab.train.fit.build", built)
    monkeypatch.setattr(graph, "Graphs", Replays)
    monkeypatch.setattr(graph, "against", lambda recipe, **given: against(recipe, **{**given, "gpu": True}))
    return Replays


def both(given: Recipe, folder: Path) -> None:
    """Run a recipe with and without recordings, and compare the runs."""
    alone = fit.train("digits", replace(given, graph="off"), folder / "off", quiet=True)
    recorded = fit.train("digits", replace(given, graph="on"), folder / "on", quiet=True)
    assert_same(recorded, alone)
    told = [store.read_json(run.folder / "environment.json")[0]["steps"] for run in (recorded, alone)]
    assert told == ["as a recorded graph", "kernel by kernel: --graph off"]


RESNET = replace(RECIPES["digits"], epochs=2, batch=256, layer="conv", accelerator="cpu", save_every="1h")
TURNS = replace(
    RESNET, batch=512, layer="hybrid", width=8, candidates="random:16", ema=0.9, mixup=0.2, cutmix=0.5, erase=0.5,
    accumulate=2, warmup=0.5,
)  # fmt: skip


def test_a_recorded_run_is_the_same_run_and_the_smaller_last_batch_is_not_recorded(
    recorder: type[Replays], tmp_path: Path
) -> None:
    both(RESNET, tmp_path)
    # 1,437 images: five whole batches and a smaller one in each of two epochs.
    assert (recorder.trials, recorder.recordings, recorder.replays) == (graph.TRIES, 1, 10 - graph.TRIES)


def test_whatever_draws_numbers_draws_the_same_ones_in_a_recorded_step_also_after_a_resume(
    recorder: type[Replays], tmp_path: Path
) -> None:
    alone = fit.train("digits", replace(TURNS, graph="off"), tmp_path / "off", quiet=True)
    run = dead(replace(TURNS, graph="on", save_steps=1), tmp_path / "run", 2)
    torch.rand(3)
    assert_same(fit.resume(run.folder, quiet=True), alone)
    # Of five batches the last makes a step alone, and counts twice: it is not recorded.
    assert (recorder.trials, recorder.recordings, recorder.replays) == (2 * graph.TRIES, 2, 2)


def test_a_recorded_step_computes_in_half_precision_what_any_other_does(
    recorder: type[Replays], tmp_path: Path
) -> None:
    both(replace(RESNET, epochs=1, precision="bf16", optimizer="sgd", clip=None), tmp_path)
    assert recorder.replays == 5 - graph.TRIES


def test_a_step_is_recorded_anew_when_a_schedule_changes_it(recorder: type[Replays], tmp_path: Path) -> None:
    both(replace(RESNET, layer="hybrid", width=4, morph_k="9,4@1"), tmp_path)
    assert (recorder.recordings, recorder.replays) == (2, 10 - 2 * graph.TRIES)


def test_a_step_that_waits_for_the_gpu_is_not_recorded(
    recorder: type[Replays], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recorder, "waits", ("model.py:7", "model.py:7"))
    monkeypatch.setattr(surroundings, "on_gpu", lambda _: False)
    given = replace(RESNET, epochs=1, graph="auto")
    alone = fit.train("digits", replace(given, graph="off"), tmp_path / "off", quiet=True)
    assert_same(fit.train("digits", given, tmp_path / "auto", quiet=True), alone)
    assert (recorder.trials, recorder.recordings) == (graph.TRIES, 0)
    with pytest.raises(ValueError, match=r"--graph on: the step waits for the GPU at model.py:7; leave it out"):
        fit.train("digits", replace(RESNET, graph="on"), tmp_path / "on", quiet=True)
    capsys.readouterr()
    session = fit.Session(None, "digits", given, None, 0.0, False)  # type: ignore[arg-type]
    monkeypatch.setattr(surroundings, "on_gpu", lambda _: True)
    session._not_recorded("of what it is")
    assert capsys.readouterr().err == "convnn: note: steps are launched kernel by kernel: of what it is\n"


def test_a_recording_that_fails_says_how_to_do_without(
    recorder: type[Replays], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed(*_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(recorder, "recorded", failed)
    with pytest.raises(ValueError, match="failed: operation not permitted when stream is capturing; --graph off"):
        fit.train("digits", replace(RESNET, graph="on"), tmp_path / "run", quiet=True)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"devices": 2}, "several processes"),
        ({"fsdp": True}, "--fsdp"),
        ({"checkpoint_activations": True}, "--checkpoint-activations"),
        ({"non_finite": "skip"}, "--non-finite skip"),
        ({"blend": 0.0, "morph_share": "0..1"}, "--morph-share changes the model at every step"),
    ],
)
def test_what_cannot_be_recorded_has_a_reason(given: dict[str, Any], reason: str) -> None:
    assert reason in (graph.against(replace(RESNET, **given), gpu=True, scaled=False) or "")


def test_where_nothing_is_in_the_way_steps_are_recorded() -> None:
    assert graph.against(replace(RESNET, morph_k="9,4"), gpu=True, scaled=False) is None
    assert "fp16" in (graph.against(RESNET, gpu=True, scaled=True) or "")
    assert "needs a GPU" in (graph.against(RESNET, gpu=False, scaled=False) or "")
    with pytest.raises(ValueError, match="graph must be one of auto, on, off, got 'maybe'"):
        from_dict({"graph": "maybe"})


def test_recording_by_name_needs_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["digits", "--accelerator", "cpu", "--graph", "on", "--output", str(tmp_path / "none")]
    assert cli.main(["train", *arguments]) == cli.MISUSED
    assert "--graph on: it needs a GPU, and this run has none" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_parameters_that_take_no_part_keep_no_gradient() -> None:
    weight, idle = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    Replays.model = nn.Module()

    def loss(images: Tensor, labels: Tensor) -> graph.Outcome:
        logits = images * weight
        return logits, labels, (logits.sum(-1) - labels).square().mean()

    graphed = graph.Graphed(loss, [weight, idle], declined=pytest.fail, recorder=Replays())
    for number in range(6):
        images, labels = torch.randn(4, 3), torch.randn(4)
        weight.grad = None
        found = graphed(images, labels)
        assert found is not None
        assert graphed.give()
        assert not graphed.give()  # once
        (expected,) = torch.autograd.grad(loss(images, labels)[2], weight)
        torch.testing.assert_close(weight.grad, expected, rtol=0, atol=0)
        assert idle.grad is None, number

"""The benchmarks of maps, of many keys and of networks on a CUDA device, at small sizes."""

from __future__ import annotations

import pytest
import torch

from convnn_lab.bench import conv, long, measure, networks
from convnn_lab.bench.report import Row

pytestmark = pytest.mark.gpu


def assert_measured(rows: list[Row]) -> None:
    for row in rows:
        cost = row.cost
        assert cost is not None, f"{row.case}, {row.contender}: {row.skipped}"
        if isinstance(cost, measure.Training):
            assert 0 < cost.forward < cost.step < 1.1 * cost.update
            assert 0 < cost.memory_forward < cost.memory_step <= 1.01 * cost.memory_update
        else:
            assert 0 < cost.forward < cost.both
            assert 0 < cost.memory_backward <= 1.01 * cost.memory_both


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "ENOUGH", 0.0)  # three rounds of each


def test_layers_on_maps_are_measured() -> None:
    rows = list(conv.conv([conv.Case(3, 12, 32, 48)]))
    assert len(rows) == 13
    assert_measured(rows)


def test_many_keys_are_measured() -> None:
    cases = [long.Case(2, 100, 5000), long.Case(2, 1500, 1500, is_causal=True, back=64)]
    assert_measured(list(long.long(cases)))


def test_training_steps_are_measured() -> None:
    cases = [networks.Case("vgg11", 8, 32, classes=10), networks.Case("resnet50", 2, 96)]
    rows = list(networks.networks(cases, ["bf16"]))
    assert [row.contender for row in rows if "vgg11" in row.case] == list(networks.VARIANTS["vgg11"])
    assert_measured(rows)


@pytest.mark.parametrize("case", conv.CASES, ids=str)
def test_every_case_on_maps_passes_its_check(case: conv.Case) -> None:
    conv.checked(case, torch.randn(2, case.inputs, case.side, case.side, device="cuda").bfloat16())

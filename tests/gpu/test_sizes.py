"""Few tokens and many sizes of everything a launch depends on: nothing is too large for a device."""

from __future__ import annotations

import pytest
import torch

from convnn_lab.bench.check import check
from tests.triton.runner import Case, assert_agrees

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("k", [1, 5, 9, 16, 17, 40])
@pytest.mark.parametrize("tokens", [65, 100, 197, 228, 256, 257])
def test_a_step_runs_at_every_size(tokens: int, k: int) -> None:
    case = Case(f"{tokens} tokens, K = {k}", (tokens, tokens, 64, 64), k=k, lead=(2, 3), dtype=torch.bfloat16)
    check(case.name, case.leaves(), k)  # of half scores many are too near each other to say which comes first


@pytest.mark.parametrize("channels", [1, 3, 16, 48, 96, 160, 300])
def test_a_step_runs_at_every_width(channels: int) -> None:
    assert_agrees(Case("", (200, 210, channels, channels + 5), k=12, lead=(2,)))

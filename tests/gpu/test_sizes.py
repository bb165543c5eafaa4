"""Few tokens and many sizes of everything a launch depends on: nothing is too large for a device."""

from __future__ import annotations

import pytest
import torch

from convnn import HybridConv2d
from convnn.descriptor import scaled_concat
from convnn.functional import nearest
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


@pytest.mark.parametrize("precision", ["ieee", "tf32", "bf16"])
@pytest.mark.parametrize("channels", [96, 192, 256, 514, 1024, 2048])
@pytest.mark.parametrize(("keys", "k"), [(36, 9), (200, 9), (200, 25), (700, 9), (700, 25)])
def test_however_many_channels_are_searched(keys: int, k: int, channels: int, precision: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    query, key = (torch.randn(3, rows, channels, device="cuda").to(dtype) for rows in (50, keys))
    found = nearest(query, key, k=k, backend="triton")
    exact = nearest(query.double(), key.double(), k=k, backend="reference")
    # Near the last, products that were rounded may take one key for another: its score is near the other's.
    torch.testing.assert_close(found.scores.double(), exact.scores, rtol=0, atol=1e-5 if precision == "ieee" else 1e-2)


def test_the_narrowest_maps_with_places_beside_features_learn() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    layer = HybridConv2d(512, 512, 3, padding=1, position=scaled_concat(0.5)).cuda()
    layer(torch.randn(8, 512, 4, 4, device="cuda")).square().sum().backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in layer.parameters())

"""Models on a CUDA device: the same answers as on the CPU. Run with `make test-gpu`."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.models.test_models import FAMILIES, OPTIONS, SMALL

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("model", "layer"), FAMILIES)
def test_cuda_agrees_with_the_cpu(model: str, layer: str) -> None:
    torch.manual_seed(0)
    made = SMALL[model](layer=layer, **OPTIONS.get(layer, {})).double().eval()
    x = torch.randn(2, 3, 48, 40, dtype=torch.float64)
    there = copy.deepcopy(made).cuda()
    torch.testing.assert_close(there(x.cuda()).cpu(), made(x), rtol=1e-7, atol=1e-7)
    loss = there(x.cuda()).square().sum()
    loss.backward()
    assert all(parameter.grad is not None for parameter in there.parameters())

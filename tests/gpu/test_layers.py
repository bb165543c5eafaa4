"""Layers on a CUDA device: the same answers as on the CPU, no host synchronisation. Run with `make test-gpu`."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from convnn import ConvNN2d, recipes
from tests.layers.test_every_layer import LAYERS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", LAYERS)
def test_cuda_agrees_with_the_cpu(name: str) -> None:
    make, shapes = LAYERS[name]
    layer = make().double()
    for shape in shapes:
        x = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        results = []
        for device in ("cpu", "cuda"):
            moved, there = copy.deepcopy(layer).to(device), x.detach().to(device).requires_grad_()
            output = moved(there)
            learned = [there, *(parameter for parameter in moved.parameters() if parameter.requires_grad)]
            gradients = torch.autograd.grad(output.square().sum(), learned, allow_unused=True)
            results.append([output.cpu(), *(None if g is None else g.cpu() for g in gradients)])
        for one, other in zip(*results, strict=True):
            if one is not None:
                torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("name", LAYERS)
def test_nothing_waits_for_the_device(name: str) -> None:
    make, shapes = LAYERS[name]
    layer, x = make().cuda(), torch.randn(*shapes[0], device="cuda", requires_grad=True)
    layer(x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert x.grad is not None


@pytest.mark.parametrize("backend", ["auto", "chunked"])
def test_tf32_and_autocast_round_values_and_never_choose_other_neighbours(backend: str) -> None:
    conv = nn.Conv2d(8, 6, 5, 2, 2, 2).cuda()
    layer = recipes.from_conv(conv, backend=backend)
    x = torch.randn(2, 8, 96, 120, device="cuda")
    exact = copy.deepcopy(conv).double()(x.double())
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    try:
        torch.testing.assert_close(layer(x).double(), exact, rtol=1e-2, atol=1e-2)
        with torch.autocast("cuda", torch.bfloat16):
            ours = layer(x)
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.double(), exact, rtol=5e-2, atol=5e-2)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def test_channels_last_stays_channels_last() -> None:
    layer = ConvNN2d(4, 6, 3, padding=1, similarity="cosine").cuda()
    x = torch.randn(2, 4, 9, 12, device="cuda")
    last = layer(x.to(memory_format=torch.channels_last))
    assert last.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(last, layer(x))

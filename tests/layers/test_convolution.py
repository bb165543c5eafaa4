"""ConvNN layers in space are torch's convolutions, in every argument, by closed form and by genuine search."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import convnn
from convnn import ConvNN1d, ConvNN2d, ConvNN3d

PEERS: dict[int, tuple[Any, Any]] = {1: (nn.Conv1d, ConvNN1d), 2: (nn.Conv2d, ConvNN2d), 3: (nn.Conv3d, ConvNN3d)}


def arguments(seed: int) -> tuple[int, tuple[Any, ...], dict[str, Any], tuple[int, ...]]:
    """Axes, positional and named arguments of a random convolution, and a map it fits."""
    draw = random.Random(seed)
    axes = draw.choice([1, 1, 2, 2, 2, 3])
    top = {1: 9, 2: 4, 3: 3}[axes]
    kernel = tuple(draw.randint(1, top) for _ in range(axes))
    stride = tuple(draw.randint(1, 3) for _ in range(axes))
    dilation = tuple(draw.randint(1, 3) for _ in range(axes))
    reach = [d * (r - 1) for d, r in zip(dilation, kernel, strict=True)]
    size = tuple(reach[a] + draw.randint(1, {1: 20, 2: 7, 3: 4}[axes]) for a in range(axes))
    groups = draw.choice([1, 1, 2, 4])
    mode = draw.choice(["zeros", "zeros", "reflect", "replicate", "circular"])
    padding: Any = tuple(draw.randint(0, min(4, n - 1)) for n in size)
    kind = draw.random()
    if kind < 0.2:
        padding = "valid"
    elif kind < 0.4 and all(total - total // 2 < n for total, n in zip(reach, size, strict=True)):
        padding, stride = "same", (1,) * axes
    channels = (4 * draw.randint(1, 2), 4 * draw.randint(1, 2))
    named = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "padding_mode": mode}
    return axes, (*channels, kernel), {**named, "bias": draw.random() < 0.7}, size


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("backend", ["auto", "chunked", "reference"])
@pytest.mark.parametrize("seed", range(110))
def test_any_convolution_is_found_in_space(seed: int, backend: str) -> None:
    """330 layers, no two alike: each backend draws its own."""
    axes, channels, named, size = arguments(3 * seed + ("auto", "chunked", "reference").index(backend))
    make, ours = PEERS[axes]
    peer = make(*channels, **named, dtype=torch.float64)
    layer = ours(*channels, **named, dtype=torch.float64, backend=backend)
    layer.load_state_dict(peer.state_dict())
    x = torch.randn(2, channels[0], *size, dtype=torch.float64, requires_grad=True)
    results = []
    for module in (layer, peer):
        output = module(x)
        pull = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).reshape(output.shape)
        results.append([output, *torch.autograd.grad(output, [x, *module.parameters()], pull)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


LARGE: dict[str, tuple[Any, ...]] = {
    "7x7": (2, (3, 5, 7), {"padding": 3}, (13, 17)),
    "11x11": (2, (2, 3, 11), {"padding": 5}, (12, 15)),
    "wide": (2, (3, 4, 3), {"padding": 1}, (5, 64)),
    "wider": (2, (2, 3, (3, 5)), {"padding": (1, 2)}, (3, 200)),
    "long": (1, (2, 3, 4), {"stride": 3}, (3000,)),
}


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize("case", LARGE)
def test_large_windows_and_long_maps_are_found(case: str, backend: str) -> None:
    axes, channels, named, size = LARGE[case]
    make, ours = PEERS[axes]
    peer, layer = make(*channels, **named).double(), ours(*channels, **named, backend=backend).double()
    layer.load_state_dict(peer.state_dict())
    x = torch.randn(1, channels[0], *size, dtype=torch.float64)
    torch.testing.assert_close(layer(x), peer(x), rtol=1e-12, atol=1e-12)


def test_a_hundred_thousand_cells_take_the_closed_form() -> None:
    peer, layer = nn.Conv1d(2, 3, 5, padding=2), ConvNN1d(2, 3, 5, padding=2)
    layer.load_state_dict(peer.state_dict())
    x = torch.randn(1, 2, 100_000)
    assert layer.is_convolution
    assert torch.equal(layer(x), peer(x))


@pytest.mark.parametrize("backend", ["auto", "chunked"])
def test_half_precision_changes_values_and_never_neighbours(backend: str) -> None:
    layer = ConvNN2d(3, 4, 5, padding=2, stride=2, dilation=2, backend=backend)
    x = torch.randn(2, 3, 70, 90)
    exact = F.conv2d(x, layer.weight, layer.bias, 2, 2, 2)
    torch.testing.assert_close(layer(x), exact, rtol=1e-5, atol=1e-5)
    torch.set_float32_matmul_precision("medium")
    try:
        torch.testing.assert_close(layer(x), exact, rtol=4e-2, atol=4e-2)
    finally:
        torch.set_float32_matmul_precision("highest")
    for dtype, tolerance in ((torch.bfloat16, 4e-2), (torch.float16, 4e-3)):
        half = ConvNN2d(3, 4, 5, padding=2, stride=2, dilation=2, backend=backend, dtype=dtype)
        half.load_state_dict(layer.state_dict())
        ours = half(x.to(dtype))
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.float(), exact, rtol=tolerance, atol=tolerance)
    with torch.autocast("cpu", torch.bfloat16):
        ours = layer(x)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.float(), exact, rtol=4e-2, atol=4e-2)


@pytest.mark.parametrize("backend", ["auto", "chunked"])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_shifted_windows_stay_whole_at_the_border(axes: int, backend: str) -> None:
    size = (9, 7, 6)[:axes]
    for kernel, stride, dilation in ((3, 1, 1), (2, 2, 1), (3, 2, 2), (4, 1, 1)):
        _, ours = PEERS[axes]
        layer = ours(2, 3, kernel, stride, dilation=dilation, boundary="shift", backend=backend, dtype=torch.float64)
        x = torch.randn(2, 2, *size, dtype=torch.float64)
        y = layer(x)
        assert y.shape[2:] == tuple(-(-n // stride) for n in size)
        weight, bias = layer.weight, layer.bias
        for place in torch.cartesian_prod(*map(torch.arange, y.shape[2:])).reshape(-1, axes).tolist():
            first = [
                min(max(o * stride - dilation * (kernel - 1) // 2, 0), n - 1 - dilation * (kernel - 1))
                for o, n in zip(place, size, strict=True)
            ]
            window = x[
                (slice(None), slice(None), *(slice(f, f + dilation * (kernel - 1) + 1, dilation) for f in first))
            ]
            by_hand = torch.einsum("bc...,oc...->bo...", window, weight).flatten(2).sum(-1) + bias
            torch.testing.assert_close(y[(slice(None), slice(None), *place)], by_hand)


def test_in_one_dimension_a_shifted_window_is_the_nearest_cells() -> None:
    layer = ConvNN1d(1, 1, 5, boundary="shift", bias=False, dtype=torch.float64)
    x = torch.randn(1, 1, 12, dtype=torch.float64)
    places = torch.arange(12.0)[:, None]
    ours = layer(x)[0].mT
    found = convnn.functional.convnn(
        places,
        places,
        x[0].mT,
        layer.weight,
        k=5,
        similarity="euclidean",
        weighting="uniform",
        order="key",
        backend="reference",
    )
    torch.testing.assert_close(ours[:-2], found[:-2])  # at the far end the distances tie
    torch.testing.assert_close(ours[-1], found[-1])


def test_a_network_of_them_learns_step_by_step_what_the_convolutions_learn() -> None:
    def network(layer: Any, **options: Any) -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(
            layer(2, 6, 3, padding=1, **options),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            layer(6, 8, (3, 2), 2, padding=1, padding_mode="circular", **options),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 3),
        ).double()

    x, y = torch.randn(16, 2, 9, 11, dtype=torch.float64), torch.arange(16) % 3
    losses = []
    for model in (network(nn.Conv2d), network(ConvNN2d), network(ConvNN2d, backend="chunked")):
        step = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        seen = []
        for _ in range(8):
            loss = F.cross_entropy(model(x), y)
            step.zero_grad()
            loss.backward()
            step.step()
            seen.append(loss.item())
        losses.append(seen)
    assert losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)
    assert losses[2] == pytest.approx(losses[0], rel=1e-10)


def test_the_same_seed_starts_both_alike() -> None:
    for axes, (make, ours) in PEERS.items():
        torch.manual_seed(5)
        peer = make(4, 6, 3, groups=2)
        torch.manual_seed(5)
        layer = ours(4, 6, 3, groups=2)
        for name, weight in peer.state_dict().items():
            assert torch.equal(layer.state_dict()[name], weight), axes


def test_state_dicts_load_both_ways_and_only_where_taps_agree() -> None:
    conv, layer = nn.Conv2d(4, 6, (3, 2), groups=2), ConvNN2d(4, 6, (3, 2), groups=2, similarity="cosine")
    layer.load_state_dict(conv.state_dict())
    other = nn.Conv2d(4, 6, (3, 2), groups=2)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.weight, conv.weight)
    fewer = ConvNN2d(4, 6, 3, k=5)
    assert fewer.weight.shape == (6, 4, 5)
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        fewer.load_state_dict(nn.Conv2d(4, 6, 3).state_dict())


def test_a_convolution_is_taken_only_where_it_is_one() -> None:
    assert ConvNN2d(2, 3, 3).is_convolution
    changed: list[dict[str, Any]] = [
        {"similarity": "cosine"}, {"k": 5}, {"weighting": "softmax"}, {"candidates": torch.arange(9)}, {"blend": 0.0},
        {"mask": "causal"}, {"include_padding": False}, {"backend": "reference"},
    ]  # fmt: skip
    for options in changed:
        assert not ConvNN2d(2, 3, 3, **options).is_convolution
    assert not ConvNN1d(2, 3, 3, k=5).is_convolution


@pytest.mark.parametrize("backend", ["auto", "chunked"])
def test_channels_last_and_no_batch_are_kept(backend: str) -> None:
    layer = ConvNN2d(3, 4, 3, padding=1, backend=backend)
    x = torch.randn(2, 3, 6, 7)
    plain = layer(x)
    assert plain.is_contiguous()
    last = layer(x.to(memory_format=torch.channels_last))
    assert last.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(last, plain)
    torch.testing.assert_close(layer(x[1]), plain[1])
    assert layer(x[:0]).shape == (0, 4, 6, 7)

"""The hybrid layer: a share of neighbours by features, the rest a convolution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convnn import HybridConv1d, HybridConv2d, HybridConv3d
from convnn.candidates import grid, random
from convnn.descriptor import scaled_concat
from tests import oracle

LAYERS: dict[int, Any] = {1: HybridConv1d, 2: HybridConv2d, 3: HybridConv3d}
SIZES = {1: (9,), 2: (5, 7), 3: (3, 4, 2)}
PLAIN: dict[int, Any] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def neighbours(layer: Any, x: Tensor) -> Tensor:
    """The ConvNN branch for one sample: cosine over the zero-padded map, self first, all alike."""
    kernel = layer.convnn.weight.flatten(2)
    padded = F.pad(x, [layer.kernel_size[0] // 2] * 2 * (x.ndim - 1))
    tokens = padded.flatten(1).mT
    inside = F.pad(torch.ones(x.shape[1:]), [layer.kernel_size[0] // 2] * 2 * (x.ndim - 1)).flatten().nonzero()[:, 0]
    found = oracle.neighbors(tokens[inside], tokens, kernel.shape[-1], "cosine", own=inside.tolist())
    made = oracle.aggregate(tokens, *found, "uniform", kernel, layer.convnn.bias)
    return made.mT.unflatten(1, x.shape[1:])


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("k", [None, 4])
def test_it_is_both_branches_mixed(axes: int, ratio: float, k: int | None) -> None:
    layer = LAYERS[axes](4, 10, 3, ratio=ratio, k=k).double()
    x = torch.randn(2, 4, *SIZES[axes], dtype=torch.float64)
    found = int(10 * ratio)
    assert (layer.convnn is None) == (found == 0)
    assert (layer.conv is None) == (found == 10)
    parts = []
    if found:
        assert layer.convnn.weight.shape[0] == found
        parts.append(torch.stack([neighbours(layer, sample) for sample in x]))
    if found < 10:
        parts.append(PLAIN[axes](x, layer.conv.weight, layer.conv.bias, padding=1))
    theirs = PLAIN[axes](torch.cat(parts, 1), layer.pointwise.weight, layer.pointwise.bias)
    torch.testing.assert_close(layer(x), theirs, rtol=1e-10, atol=1e-10)


def test_a_position_is_its_own_first_neighbour_even_where_it_is_zero() -> None:
    layer = HybridConv2d(3, 4, 3, ratio=1.0, pointwise=False, convnn_bias=False)
    with torch.no_grad():
        assert layer.convnn is not None
        weight: Any = layer.convnn.weight
        weight.zero_()
        weight[:3, :, 0, 0] = torch.eye(3)
    x = torch.randn(2, 3, 5, 7).relu()
    x[:, :, 2:4, 3:5] = 0.0
    assert torch.equal(layer(x)[:, :3], x)


def test_the_published_count() -> None:
    """64 of 128 channels: a kernel of 9 taps costs the same on either side, and the 1x1 has a bias."""
    counts = {
        sum(p.numel() for p in HybridConv2d(64, 128, 3, ratio=ratio).parameters()) for ratio in (0.0, 0.125, 0.5, 1.0)
    }
    assert counts == {128 * 64 * 9 + 128 + 128 * 128 + 128}
    bare = HybridConv2d(64, 64, 3, k=16, convnn_bias=False)
    assert sum(p.numel() for p in bare.parameters()) == 32 * 64 * 16 + (32 * 64 * 9 + 32) + (64 * 64 + 64)
    patched = HybridConv2d(8, 16, 3, patch=2)
    assert patched.convnn is not None
    assert patched.convnn.weight.shape == (4 * 8, 4 * 8, 3, 3)


def test_the_share_is_counted_with_tolerance() -> None:
    layer = HybridConv2d(4, 100, 1, ratio=0.29)
    assert layer.convnn is not None
    assert layer.convnn.out_channels == 29


@pytest.mark.parametrize("branch", ["depthwise", "separable"])
def test_branches_may_be_depthwise_or_separable(branch: Any) -> None:
    layer = HybridConv2d(4, 8, 3, branch=branch, ratio=0.5)
    assert layer(torch.randn(2, 4, 5, 7)).shape == (2, 8, 5, 7)
    names = set(layer.state_dict())
    if branch == "separable":
        assert {"convnn.depthwise.weight", "convnn.pointwise.weight", "conv.depthwise.weight"} <= names
    else:
        assert layer.convnn is not None
        assert layer.convnn.weight.shape == (4, 1, 3, 3)


def test_every_option_of_the_search_reaches_the_branch() -> None:
    x = torch.randn(2, 4, 6, 8)
    plain = HybridConv2d(4, 8, 3, k=5)
    for options in (
        {"candidates": grid(9)},
        {"candidates": random(9)},
        {"position": scaled_concat(0.5)},
        {"patch": 2},
        {"weighting": "softmax"},
        {"similarity": "euclidean"},
        {"mask": "causal"},
        {"blend": 0.3},
    ):
        other = HybridConv2d(4, 8, 3, k=5, **options)
        if "patch" not in options:
            other.load_state_dict(plain.state_dict())
            assert not torch.allclose(other(x), plain(x)), options
        assert other(x).shape == (2, 8, 6, 8)
    every, inner = (HybridConv2d(4, 8, 3, k=48, include_padding=include) for include in (True, False))
    inner.load_state_dict(every.state_dict())
    assert not torch.allclose(every(x), inner(x))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_strides_dilations_and_even_kernels_keep_the_branches_together() -> None:
    x = torch.randn(2, 4, 11, 14)
    for options in ({"stride": 2}, {"dilation": 2}, {"padding": 0}, {"padding": (2, 1), "stride": (1, 2)}):
        layer = HybridConv2d(4, 8, 3, **options)
        assert layer.conv is not None
        assert layer(x).shape[2:] == layer.conv(x).shape[2:]
    assert HybridConv2d(4, 8, (2, 4))(x).shape[2:] == x.shape[2:]
    assert HybridConv2d(4, 8, 3)(x[0]).shape == (8, 11, 14)


def test_without_the_pointwise_and_with_gradients() -> None:
    layer = HybridConv1d(3, 4, 3, pointwise=False).double()
    assert layer.pointwise is None
    x = torch.randn(1, 3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, (x,))


def test_it_replaces_convolutions_in_a_network_that_learns() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(
        HybridConv2d(1, 8, 3), nn.ReLU(), HybridConv2d(8, 8, 3, k=4), nn.Flatten(), nn.Linear(192, 2)
    )
    x, y = torch.randn(12, 1, 4, 6), torch.arange(12) % 2
    step = torch.optim.Adam(network.parameters(), 0.02)
    losses = []
    for _ in range(30):
        loss = F.cross_entropy(network(x), y)
        step.zero_grad()
        loss.backward()
        step.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


def test_the_impossible_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ratio must be from 0, .*, to 1, ConvNN only, got 1.5"):
        HybridConv2d(4, 8, 3, ratio=1.5)
    with pytest.raises(ValueError, match="depthwise branch must be a multiple of the input channels, 4, got 3"):
        HybridConv2d(4, 10, 3, ratio=0.3, branch="depthwise")
    with pytest.raises(ValueError, match="branch must be one of 'standard', 'depthwise', 'separable', got 'grouped'"):
        HybridConv2d(4, 8, 3, branch="grouped")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"both branches must give maps of one size, got \(2, 2\) and \(4, 4\)"):
        HybridConv2d(4, 8, 3, patch=2, padding=0)(torch.randn(1, 4, 6, 6))

"""Tokens anywhere in space: attention with coordinates of its own, against loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from convnn import ConvNNAttention
from convnn.blend import Blend
from convnn.descriptor import Fourier, concatenated, coordinates, pixels, rotary, scaled_concat, sinusoidal
from convnn.functional import nearest
from convnn.relative import RelativeBias

DESCRIPTORS: dict[str, Any] = {
    "coordinates": coordinates,
    "concatenated": concatenated,
    "scaled_concat": scaled_concat(0.25),
    "fourier": Fourier(3, 4),
    "sinusoidal": sinusoidal,
    "blend": Blend(0.5, axes=3).descriptor,
}


def cloud(*lead: int, n: int = 13) -> Tensor:
    return torch.randn(*lead, n, 3, dtype=torch.float64)


@pytest.mark.parametrize("name", DESCRIPTORS)
def test_samples_with_their_own_coordinates_are_described_one_by_one(name: str) -> None:
    descriptor, tokens, coords = DESCRIPTORS[name], torch.randn(2, 5, 13, 6, dtype=torch.float64), cloud(2, 1)
    together = descriptor(tokens, coords).expand(2, 5, -1, -1)
    for sample in range(2):
        alone = descriptor(tokens[sample], coords[sample, 0])
        torch.testing.assert_close(together[sample], alone.expand(5, -1, -1), rtol=1e-12, atol=1e-12)


def test_rotary_takes_the_times_of_every_sample() -> None:
    tokens, times = torch.randn(2, 13, 6, dtype=torch.float64), torch.rand(2, 13, 1, dtype=torch.float64).cumsum(1)
    together = rotary(tokens, times)
    for sample in range(2):
        torch.testing.assert_close(together[sample], rotary(tokens[sample], times[sample]), rtol=1e-12, atol=1e-12)


def test_neighbours_by_coordinates_are_the_nearest_points() -> None:
    layer = ConvNNAttention(
        8, 2, k=4, kernel=None, position="coordinates", similarity="euclidean", weighting="uniform"
    ).double()
    x, coords = torch.randn(3, 13, 8, dtype=torch.float64), cloud(3)
    value = layer.qkv(x)[..., 16:]
    expected = torch.zeros_like(value)
    for sample in range(3):
        for point in range(13):
            gaps = [float((coords[sample, point] - other).norm()) for other in coords[sample]]
            for near in sorted(range(13), key=gaps.__getitem__)[:4]:
                expected[sample, point] += value[sample, near]
    torch.testing.assert_close(layer(x, coords=coords), layer.proj(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", DESCRIPTORS)
@pytest.mark.parametrize("shared", [True, False])
def test_points_in_another_order_give_the_same_in_that_order(name: str, shared: bool) -> None:
    options = {"similarity": Blend(0.5, axes=3)} if name == "blend" else {"similarity": "euclidean"}
    descriptor = Fourier(3, 4) if name == "fourier" else DESCRIPTORS[name]
    layer = ConvNNAttention(24, 2, k=5, position=descriptor, shared_kernel=shared, **options).double()
    torch.nn.init.normal_(layer.kernel.weight)  # type: ignore[union-attr]
    x, coords = torch.randn(2, 13, 24, dtype=torch.float64), cloud(2)
    order = torch.randperm(13)
    torch.testing.assert_close(
        layer(x[:, order], coords=coords[:, order]), layer(x, coords=coords)[:, order], rtol=1e-10, atol=1e-10
    )


def test_heads_with_kernels_of_their_own_share_places_in_a_sequence() -> None:
    layer = ConvNNAttention(8, 2, k=4, position="coordinates", similarity="euclidean", shared_kernel=False).double()
    x, coords = torch.randn(3, 13, 8, dtype=torch.float64), pixels((13,)).expand(3, -1, -1)
    torch.testing.assert_close(layer(x), layer(x, coords=coords))


def test_points_moved_together_keep_their_neighbours() -> None:
    layer = ConvNNAttention(8, 2, k=5, position="coordinates", similarity="euclidean").double()
    x, coords = torch.randn(2, 13, 8, dtype=torch.float64), cloud(2)
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q
    moved = coords @ turn.mT + torch.randn(3, dtype=torch.float64)
    torch.testing.assert_close(layer(x, coords=moved), layer(x, coords=coords), rtol=1e-9, atol=1e-9)


def test_a_context_has_coordinates_of_its_own() -> None:
    layer = ConvNNAttention(8, 2, k=4, position="coordinates", similarity="euclidean", kernel=None).double()
    x, context = torch.randn(2, 7, 8, dtype=torch.float64), torch.randn(2, 13, 8, dtype=torch.float64)
    here, there = cloud(2, n=7), cloud(2)
    found = nearest(here, there, k=4, similarity="euclidean")
    taken = layer.qkv(context)[..., 16:].gather(1, found.index.flatten(1)[..., None].expand(-1, -1, 8))
    mixed = (taken.unflatten(1, (7, 4)) * found.scores.softmax(-1)[..., None]).sum(-2)
    ours = layer(x, context, coords=here, context_coords=there)
    torch.testing.assert_close(ours, layer.proj(mixed), rtol=1e-10, atol=1e-10)


def test_coordinates_that_say_nothing_new_change_nothing() -> None:
    layer = ConvNNAttention(8, 2, k=4, position="rotary").double()
    x = torch.randn(2, 13, 8, dtype=torch.float64)
    torch.testing.assert_close(layer(x, coords=pixels((13,))), layer(x))


def test_coordinates_that_do_not_fit_are_refused() -> None:
    x, layer = torch.randn(2, 13, 8), ConvNNAttention(8, 2, k=4, position="coordinates", similarity="euclidean")
    with pytest.raises(ValueError, match="13 tokens and 24 coordinates"):
        layer(x, coords=torch.randn(2, 12, 3))
    with pytest.raises(ValueError, match=r"must broadcast to those of tokens, got tokens \(2, 2\) and coordinates"):
        layer(x, coords=torch.randn(5, 13, 3))
    with pytest.raises(ValueError, match="those of a context if there is one"):
        layer(x, x, coords=torch.randn(13, 3))
    with pytest.raises(ValueError, match="must be given for the tokens"):
        layer(x, context_coords=torch.randn(13, 3))
    for position in (None, RelativeBias((13,))):
        with pytest.raises(ValueError, match="need a descriptor as position"):
            ConvNNAttention(8, 2, k=4, position=position)(x, coords=torch.randn(13, 3))

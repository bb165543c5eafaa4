"""Patches as tokens: moved into the channels and back."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convnn.patches import Patches, shuffle, unshuffle

SIZES = [(12,), (6, 18), (12, 6, 18)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("patch", [1, 2, 3])
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_shuffling_back_is_the_identity(size: tuple[int, ...], patch: int, lead: tuple[int, ...]) -> None:
    axes = len(size)
    x = torch.randn(*lead, 5, *size)
    there = unshuffle(x, patch, axes=axes)
    assert there.shape == (*lead, 5 * patch**axes, *(side // patch for side in size))
    assert torch.equal(shuffle(there, patch, axes=axes), x)
    y = torch.randn(*lead, 5 * 6**axes, *size)
    assert torch.equal(unshuffle(shuffle(y, patch, axes=axes), patch, axes=axes), y)


@pytest.mark.parametrize("patch", [1, 2, 3])
def test_on_two_axes_it_is_torch_own(patch: int) -> None:
    x = torch.randn(2, 5, 6, 18)
    assert torch.equal(unshuffle(x, patch), F.pixel_unshuffle(x, patch))
    y = torch.randn(2, 36, 6, 18)
    assert torch.equal(shuffle(y, patch), F.pixel_shuffle(y, patch))


@pytest.mark.parametrize("size", SIZES)
def test_each_number_goes_where_the_formula_says(size: tuple[int, ...]) -> None:
    patch, axes = 3, len(size)
    x = torch.randn(2, *size)
    there = unshuffle(x, patch, axes=axes)
    for place in itertools.product(range(2), *map(range, size)):
        channel, cell = place[0], place[1:]
        for side in cell:
            channel = channel * patch + side % patch
        assert there[(channel, *(side // patch for side in cell))] == x[place]


def test_a_layer_sees_patches_as_cells() -> None:
    mix = nn.Conv2d(3 * 4, 5 * 4, 1).double()
    layer = Patches(2)(mix)
    x = torch.randn(2, 3, 6, 8, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    assert y.shape == (2, 5, 6, 8)
    # A patch of the output depends on that patch of the input, and on nothing else.
    (gradient,) = torch.autograd.grad(y[0, 1, 2, 5], x)
    touched = gradient.abs().sum(1)[0].nonzero().tolist()
    assert sorted(touched) == [[2, 4], [2, 5], [3, 4], [3, 5]]
    assert [name for name, _ in layer.named_parameters()] == ["layer.weight", "layer.bias"]
    assert torch.autograd.gradcheck(layer, (x[:1, :, :2, :2].detach().requires_grad_(),))


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_patches_of_one_are_the_layer_itself(axes: int) -> None:
    layer = nn.Identity()
    assert Patches(1, axes=axes)(layer) is layer


def test_any_size_after_any_size_and_without_a_batch() -> None:
    layer = Patches(2, axes=1)(nn.Conv1d(6, 4, 3, padding=1))
    for size in (8, 20, 2):
        batch: Tensor = torch.randn(2, 3, size)
        torch.testing.assert_close(layer(batch)[1], layer(batch[1]))


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"patches of 2 need sides that are multiples of it, got \(5, 6\)"):
        unshuffle(torch.randn(3, 5, 6), 2)
    with pytest.raises(ValueError, match="patches of 2 need a multiple of 4 channels, got 6"):
        shuffle(torch.randn(6, 5, 6), 2)
    with pytest.raises(ValueError, match=r"a map of 3 axes has shape \(..., C, \*size\), got \(3, 4, 4\)"):
        unshuffle(torch.randn(3, 4, 4), 2, axes=3)
    for run in (Patches, lambda p: unshuffle(torch.randn(3, 4, 4), p), lambda p: shuffle(torch.randn(4, 4, 4), p)):
        with pytest.raises(ValueError, match="patch must be a whole number of at least 1, got 0"):
            run(0)
    with pytest.raises(ValueError, match="axes must be a whole number of at least 1, got 0"):
        unshuffle(torch.randn(3, 4, 4), 2, axes=0)

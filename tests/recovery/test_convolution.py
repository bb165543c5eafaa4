"""Nearest in space is a convolution: outputs and gradients against torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from convnn.functional import convnn


def grid(*sizes: int) -> Tensor:
    axes = [torch.arange(n, dtype=torch.float64) for n in sizes]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, -2)


def as_convolution(image: Tensor, kernel: Tensor, bias: Tensor, backend: Any) -> Tensor:
    """The 'same' convolution by odd sides: keys and queries are pixels, and the padding is zeros around them."""
    radius = kernel.shape[-1] // 2
    axes = image.ndim - 2
    padded = F.pad(image, [radius] * 2 * axes)
    output = convnn(
        grid(*image.shape[2:]) + radius,
        grid(*padded.shape[2:]),
        padded.flatten(2).mT,
        kernel.flatten(2),
        bias,
        k=kernel[0, 0].numel(),
        similarity="euclidean",
        weighting="uniform",
        order="key",
        backend=backend,
    )
    return output.mT.unflatten(2, image.shape[2:])


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize(("size", "side"), [((17,), 3), ((40,), 7), ((9, 14), 3), ((8, 13), 5), ((5, 4, 6), 3)])
def test_nearest_in_space_is_a_convolution(size: tuple[int, ...], side: int, groups: int, backend: str) -> None:
    if len(size) == 3 and groups != 1:
        groups = 2
    peer: Any = (F.conv1d, F.conv2d, F.conv3d)[len(size) - 1]
    leaves = [
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 6, *size), (12, 6 // groups, *[side] * len(size)), (12,))
    ]
    ours = as_convolution(leaves[0], leaves[1], leaves[2], backend)
    theirs = peer(*leaves, padding=side // 2, groups=groups)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    pull = torch.randn_like(theirs)
    for a, b in zip(torch.autograd.grad(ours, leaves, pull), torch.autograd.grad(theirs, leaves, pull), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-11)

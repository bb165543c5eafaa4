"""A convolution and a ConvNN side by side, each giving a share of the channels."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from convnn import checks
from convnn.backends import Backend
from convnn.blend import Blend
from convnn.candidates import Candidates
from convnn.descriptor import Descriptor
from convnn.layers import shapes
from convnn.layers.configurable import Configurable
from convnn.layers.convnn import ConvNN1d, ConvNN2d, ConvNN3d
from convnn.masks import Mask
from convnn.selection import Selection
from convnn.similarity import Similarity
from convnn.weighting import Weighting


class HybridConvNd(Configurable):
    """What HybridConv1d, HybridConv2d and HybridConv3d have in common; see :class:`HybridConv2d`."""

    axes: ClassVar[int]
    plain: ClassVar[Any]
    nearest: ClassVar[Any]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        *,
        ratio: float = 0.5,
        k: int | None = None,
        pointwise: bool = True,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] | str | None = None,
        dilation: int | Sequence[int] = 1,
        padding_mode: str = "zeros",
        conv_bias: bool = True,
        convnn_bias: bool = True,
        pointwise_bias: bool = True,
        branch: Literal["standard", "depthwise", "separable"] = "standard",
        similarity: Similarity | str = "cosine",
        weighting: Weighting | str = "uniform",
        selection: Selection | str = "hard",
        candidates: Tensor | Candidates | None = None,
        position: Descriptor | str | None = None,
        blend: float | Blend | None = None,
        patch: int = 1,
        mask: Mask | str | Sequence[Mask | str] | None = None,
        include_padding: bool = True,
        backend: str | Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= ratio <= 1:
            raise ValueError(f"ratio must be from 0, convolution only, to 1, ConvNN only, got {ratio}")
        checks.one_of("branch", branch, ("standard", "depthwise", "separable"))
        checks.whole("in_channels", in_channels, 1)
        checks.whole("out_channels", out_channels, 1)
        self.in_channels, self.out_channels, self.ratio, self.branch = in_channels, out_channels, ratio, branch
        self.kernel_size = shapes.each("kernel_size", kernel_size, self.axes)
        if padding is None:
            dilations = shapes.each("dilation", dilation, self.axes)
            around = tuple(d * (r - 1) // 2 for d, r in zip(dilations, self.kernel_size, strict=True))
            padding = "same" if shapes.each("stride", stride, self.axes) == (1,) * self.axes else around
        found = math.floor(ratio * out_channels + 1e-9)  # 0.29 * 100 is 28.999999999999996
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        window: dict[str, Any] = {
            "stride": stride, "padding": padding, "dilation": dilation, "padding_mode": padding_mode, **factory
        }  # fmt: skip
        choices = {
            "similarity": similarity, "k": k, "weighting": weighting, "selection": selection, "candidates": candidates,
            "position": position, "blend": blend, "patch": patch, "mask": mask, "include_padding": include_padding,
            "backend": backend,
        }  # fmt: skip
        self.convnn = self._branch(self.nearest, found, convnn_bias, window | choices) if found else None
        rest = out_channels - found
        self.conv = self._branch(self.plain, rest, conv_bias, window) if rest else None
        mixes = {"bias": pointwise_bias, **factory}
        self.pointwise = self.plain(out_channels, out_channels, 1, **mixes) if pointwise else None

    def _branch(self, layer: Any, outputs: int, bias: bool, options: dict[str, Any]) -> nn.Module:
        """One branch, with its kind of kernel."""
        channels, size = self.in_channels, self.kernel_size
        if self.branch == "standard":
            return layer(channels, outputs, size, bias=bias, **options)
        if self.branch == "depthwise":
            shapes.divides("the channels of a depthwise branch", outputs, channels, "the input channels")
            return layer(channels, outputs, size, groups=channels, bias=bias, **options)
        factory = {name: options[name] for name in ("device", "dtype")}
        depthwise = layer(channels, channels, size, groups=channels, bias=False, **options)
        pointwise = self.plain(channels, outputs, 1, bias=bias, **factory)
        return nn.Sequential(OrderedDict(depthwise=depthwise, pointwise=pointwise))

    def forward(self, cells: Tensor) -> Tensor:
        """Map ``(B, C, *size)`` or ``(C, *size)`` to the outputs."""
        parts = [branch(cells) for branch in (self.convnn, self.conv) if branch is not None]
        sizes = [tuple(part.shape[-self.axes :]) for part in parts]
        if sizes[0] != sizes[-1]:
            came = " and ".join(map(str, sorted(sizes)))
            raise ValueError(f"both branches must give maps of one size, got {came}: padding and stride count patches")
        output = parts[0] if len(parts) == 1 else torch.cat(parts, -self.axes - 1)
        return output if self.pointwise is None else self.pointwise(output)

    def extra_repr(self) -> str:  # noqa: D102
        return f"{self.in_channels}, {self.out_channels}, ratio={self.ratio}"


class HybridConv1d(HybridConvNd):
    """:class:`HybridConv2d` on sequences ``(B, C, L)``."""

    axes, plain, nearest = 1, nn.Conv1d, ConvNN1d


class HybridConv2d(HybridConvNd):
    """A share of the channels from the most similar cells of the map, the rest from a convolution, mixed by a 1x1.

    The ConvNN branch compares the cells of the zero-padded map by cosine, lets each be its own first neighbour, and
    counts all k of them alike. A branch without channels is not built.

    Args:
        ratio: the share of the ConvNN branch, which gets the whole part of ratio times ``out_channels``.
        k: how many neighbours; None for as many as the kernel has taps. It does not change the convolution.
        pointwise: whether a 1x1 convolution mixes the branches.
        padding: None keeps the size of the map where the stride is 1.
        branch: the kernels of both branches: ``"standard"``, ``"depthwise"``, or ``"separable"`` (depthwise, then 1x1).
        patch: compare patches of so many cells along every axis, in the ConvNN branch.
        similarity, weighting, selection, candidates, position, blend, mask, include_padding, backend: see
            :class:`~convnn.ConvNN2d`; they are for the ConvNN branch.

    Example:
        >>> layer = HybridConv2d(16, 32, 3, ratio=0.25)
        >>> layer(torch.randn(2, 16, 9, 12)).shape
        torch.Size([2, 32, 9, 12])
        >>> layer.convnn.weight.shape, layer.conv.weight.shape
        (torch.Size([8, 16, 3, 3]), torch.Size([24, 16, 3, 3]))
    """

    axes, plain, nearest = 2, nn.Conv2d, ConvNN2d


class HybridConv3d(HybridConvNd):
    """:class:`HybridConv2d` on volumes ``(B, C, D, H, W)``."""

    axes, plain, nearest = 3, nn.Conv3d, ConvNN3d

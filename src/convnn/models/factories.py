"""Which layer stands where a 3x3 convolution or an attention stood."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from convnn.descriptor import sinusoids
from convnn.layers import ConvNN2d, ConvNNAttention, HybridConv2d, LinearAttention
from convnn.layers.configurable import fresh
from convnn.names import resolve
from convnn.recipes import kvt, local, self_attention, sparse


class Convolution(Protocol):
    """Makes a layer that keeps the size of a map, or halves it with a stride of 2."""

    def __call__(self, in_channels: int, out_channels: int, /, *, stride: int = 1, bias: bool = True) -> nn.Module:
        """Make the layer."""
        ...


Attention: TypeAlias = Callable[[int, int], nn.Module]
"""Makes a layer on tokens of so many channels with so many heads."""


def conv(in_channels: int, out_channels: int, /, *, stride: int = 1, bias: bool = True, **options: Any) -> nn.Module:
    """A 3x3 convolution, or one of another ``kernel_size``."""
    size = options.pop("kernel_size", 3)
    return nn.Conv2d(in_channels, out_channels, size, stride, size // 2, bias=bias, **options)


def convnn(in_channels: int, out_channels: int, /, *, stride: int = 1, bias: bool = True, **options: Any) -> nn.Module:
    """A ConvNN in the place of a 3x3 convolution: the most similar cells, unless told otherwise."""
    given = {"similarity": "cosine", "kernel_size": 3, **options}
    size = given.pop("kernel_size")
    return ConvNN2d(in_channels, out_channels, size, stride, size // 2, bias=bias, **given)


def hybrid(in_channels: int, out_channels: int, /, *, stride: int = 1, bias: bool = True, **options: Any) -> nn.Module:
    """A convolution and a ConvNN side by side, mixed by a 1x1."""
    flags = {"conv_bias": bias, "convnn_bias": bias, "pointwise_bias": bias}
    given = {"kernel_size": 3, **flags, **options}
    return HybridConv2d(in_channels, out_channels, given.pop("kernel_size"), stride=stride, **given)


class MapAttention(nn.Module):
    """Self-attention among the cells of a map; half of the channels are told the row, half the column.

    Args:
        options: of :class:`~convnn.layers.ConvNNAttention`.

    Shape:
        ``(B, C, H, W)`` to ``(B, O, H, W)``.
    """

    def __init__(self, in_channels: int, out_channels: int, *, heads: int = 1, **options: Any) -> None:
        super().__init__()
        self.attn = self_attention(in_channels, heads, **{"out_dim": out_channels, **options})

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        channels, height, width = x.shape[-3:]
        rows, columns = (torch.arange(side, device=x.device) for side in (height, width))
        down = sinusoids(rows, channels // 2)[:, None].expand(-1, width, -1)
        across = sinusoids(columns, channels - channels // 2)[None].expand(height, -1, -1)
        tokens = x.flatten(-2).mT + torch.cat([down, across], -1).flatten(0, 1).to(x.dtype)  # (B, N, C)
        return self.attn(tokens).mT.unflatten(-1, (height, width))


def map_attention(
    in_channels: int, out_channels: int, /, *, stride: int = 1, bias: bool = True, **options: Any
) -> nn.Module:
    """Self-attention among all cells in the place of a 3x3 convolution; what a stride would skip is left out after."""
    flags = {"qkv_bias": bias, "proj_bias": bias}
    attended = MapAttention(in_channels, out_channels, **{**flags, **options})
    # A pooling of 1 cell takes every stride-th of them.
    return attended if stride == 1 else nn.Sequential(attended, nn.MaxPool2d(1, stride))


CONVOLUTIONS: dict[str, Any] = {"conv": conv, "convnn": convnn, "hybrid": hybrid, "attention": map_attention}


def attention(dim: int, num_heads: int, /, **options: Any) -> nn.Module:
    """ConvNN attention to the nine nearest, unless told otherwise."""
    return ConvNNAttention(dim, num_heads, **{"k": 9, **options})


def nearest(dim: int, num_heads: int, /, **options: Any) -> nn.Module:
    """Attention to the nine nearest without a kernel, unless told otherwise."""
    return kvt(dim, num_heads, **{"k": 9, **options})


def strided(dim: int, num_heads: int, /, **options: Any) -> nn.Module:
    """The Sparse Transformer's pattern with a stride of 16, unless told otherwise."""
    return sparse(dim, num_heads, **{"stride": 16, **options})


ATTENTIONS: dict[str, Any] = {
    "attention": self_attention,
    "convnn": attention,
    "kvt": nearest,
    "local": local,
    "sparse": strided,
    "linear": LinearAttention,
}


def placed(device: torch.device | str | int | None) -> Any:
    """Where parameters are made."""
    return torch.device(torch.get_default_device() if device is None else device)


def head(channels: int, num_classes: int) -> nn.Module:
    """The last layer of a classifier; of none for 0 classes."""
    return nn.Linear(channels, num_classes) if num_classes else nn.Identity()


def initialised(model: nn.Module, kept: Iterable[nn.Module] = ()) -> None:
    """Start convolutions by the spread of their outputs, as torchvision does; biases at 0.

    Hybrid layers start as they are: there is nothing between their kernels and the 1x1 that would halve the spread.
    """
    hybrids = [module for module in model.modules() if isinstance(module, HybridConv2d)]
    left = {id(part) for module in (*hybrids, *kept) for part in module.modules()}
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, ConvNN2d)) and id(module) not in left:
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def convolution_of(layer: str | Convolution, options: dict[str, Any]) -> Convolution:
    """The factory of a name, with options, or the factory that was given."""
    return _factory(layer, options, CONVOLUTIONS)


def attention_of(layer: str | Attention, options: dict[str, Any]) -> Attention:
    """The factory of a name, with options, or the factory that was given."""
    return _factory(layer, options, ATTENTIONS)


def _factory(layer: Any, options: dict[str, Any], known: dict[str, Any]) -> Any:
    if options and not isinstance(layer, str):
        raise TypeError(f"options are for a layer by name; give {', '.join(sorted(options))} to the factory instead")
    chosen = resolve("layer", layer, known)
    if not options:
        return chosen

    def make(*arguments: Any, **named: Any) -> nn.Module:
        # What learns is each layer's own.
        return chosen(*arguments, **{**{name: fresh(option) for name, option in options.items()}, **named})

    return make

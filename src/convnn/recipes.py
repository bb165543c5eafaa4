"""The equalities as code: what a convolution, an attention, and the layers between them are here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import nn

from convnn import masks
from convnn.descriptor import rotary
from convnn.layers import ConvNN1d, ConvNN2d, ConvNN3d, ConvNNAttention, MultiheadConvNN


def from_conv(module: nn.Module, **options: Any) -> ConvNN1d | ConvNN2d | ConvNN3d:
    r"""The convolution as a search: the nearest cells in space, :math:`\rho = 1`, its own kernel.

    The parameters are copied. Options change it further: ``from_conv(conv, backend="chunked")`` runs the search, and
    ``from_conv(conv, similarity="cosine")`` keeps the weights and chooses other neighbours.

    Example:
        >>> conv = nn.Conv2d(3, 8, (3, 4), stride=2, dilation=2)
        >>> x = torch.randn(1, 3, 20, 21)
        >>> torch.allclose(from_conv(conv, backend="reference")(x), conv(x), atol=1e-5)
        True
    """
    kinds: dict[Any, Any] = {nn.Conv1d: ConvNN1d, nn.Conv2d: ConvNN2d, nn.Conv3d: ConvNN3d}
    if type(module) not in kinds:
        raise TypeError(f"from_conv takes nn.Conv1d, nn.Conv2d or nn.Conv3d, got {type(module).__name__}")
    names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
    given = {name: getattr(module, name) for name in names}
    weight: Any = module.weight
    where = {"device": weight.device, "dtype": weight.dtype, "bias": module.bias is not None}
    layer = kinds[type(module)](**{**given, **where, **options})
    if layer.weight.shape != weight.shape or layer.projected:
        came = f"one of {tuple(layer.weight.shape)}" + (" behind a projection" if layer.projected else "")
        raise ValueError(f"the layer must have the convolution's kernel of {tuple(weight.shape)}, got {came}")
    return _copied(module, layer)


def from_attention(module: nn.MultiheadAttention, **options: Any) -> MultiheadConvNN:
    r""":math:`\mathrm{softmax}(QK^\top/\sqrt{d})V`: every key, scaled dot product, softmax; with the same call.

    The parameters are copied. ``from_attention(module, k=9)`` keeps them and attends to the 9 nearest keys.

    Example:
        >>> module = nn.MultiheadAttention(16, 4, batch_first=True)
        >>> x = torch.randn(2, 10, 16)
        >>> torch.allclose(from_attention(module)(x, x, x)[0], module(x, x, x)[0], atol=1e-5)
        True
    """
    if type(module) is not nn.MultiheadAttention:
        raise TypeError(f"from_attention takes nn.MultiheadAttention, got {type(module).__name__}")
    names = ("embed_dim", "num_heads", "dropout", "add_zero_attn", "kdim", "vdim", "batch_first")
    given = {name: getattr(module, name) for name in names}
    given |= {"bias": module.in_proj_bias is not None, "add_bias_kv": module.bias_k is not None}
    weight = module.out_proj.weight
    return _copied(module, MultiheadConvNN(**{**given, "device": weight.device, "dtype": weight.dtype, **options}))


def _copied(module: nn.Module, layer: Any) -> Any:
    """Give a layer the parameters of a module: their numbers, whether they learn, and its mode."""
    layer.load_state_dict(module.state_dict(), strict=False)
    own = dict(layer.named_parameters())
    for name, parameter in module.named_parameters():
        own[name].requires_grad_(parameter.requires_grad)
    return layer.train(module.training)


def self_attention(dim: int, num_heads: int = 8, **options: Any) -> ConvNNAttention:
    r""":math:`\mathrm{softmax}(QK^\top/\sqrt{d})V`: k = N, no kernel."""
    return ConvNNAttention(dim, num_heads, **{"k": "all", "kernel": None, **options})


def kvt(dim: int, num_heads: int = 8, *, k: int, **options: Any) -> ConvNNAttention:
    r""":math:`\mathrm{softmax}` over the k largest scores of a row, 0 elsewhere: no kernel."""
    return ConvNNAttention(dim, num_heads, **{"k": k, "kernel": None, **options})


def causal(dim: int, num_heads: int = 8, **options: Any) -> ConvNNAttention:
    r"""Self-attention to j ≤ i."""
    return self_attention(dim, num_heads, **_masked("causal", options))


def local(dim: int, num_heads: int = 1, *, window: int = 128, **options: Any) -> ConvNNAttention:
    r"""Self-attention to :math:`|i - j| \le w`, in heads of 64 channels whose queries and keys are turned by place."""
    defaults = {"attn_head_dim": 64, "position": rotary, "proj_bias": False}
    return self_attention(dim, num_heads, **_masked(masks.window(window), {**defaults, **options}))


def sparse(
    dim: int,
    num_heads: int = 8,
    *,
    pattern: Literal["strided", "fixed", "band"] = "strided",
    stride: int,
    **options: Any,
) -> ConvNNAttention:
    r"""The Sparse Transformer: strided or fixed, both causal, or the band :math:`|i - j| \le l` of its local mode."""
    patterns = {
        "strided": lambda: masks.strided(stride) & masks.causal,
        "fixed": lambda: masks.fixed(stride) & masks.causal,
        "band": lambda: masks.window(stride),
    }
    if pattern not in patterns:
        raise ValueError(f"pattern must be one of {', '.join(map(repr, patterns))}, got {pattern!r}")
    return self_attention(dim, num_heads, **_masked(patterns[pattern](), options))


def bigbird(
    dim: int,
    num_heads: int = 8,
    *,
    window: int,
    globals: int,  # noqa: A002 - its own name
    random: int,
    keys: int,
    seed: int = 0,
    **options: Any,
) -> ConvNNAttention:
    r"""BigBird: a window, tokens that see and are seen by all, and random keys out of the first ``keys``."""
    rule = masks.bigbird(window, globals, random, keys=keys, seed=seed)
    return self_attention(dim, num_heads, **_masked(rule, options))


def neighborhood(
    dim: int, num_heads: int = 8, *, size: Sequence[int], kernel_size: int | Sequence[int], **options: Any
) -> ConvNNAttention:
    """Neighbourhood attention: to the window around a cell, moved inwards at the border of the map."""
    return self_attention(dim, num_heads, **_masked(masks.neighborhood(size, kernel_size), options))


def _masked(mask: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Options with one more mask."""
    others = options.get("mask")
    several = list(others) if isinstance(others, (list, tuple)) else [] if others is None else [others]
    return {**options, "mask": [mask, *several]}


def depthwise_separable(
    in_channels: int, out_channels: int, kernel_size: int | Sequence[int], *, axes: int = 2, **options: Any
) -> nn.Sequential:
    r"""A kernel for each channel, then a 1x1 convolution: :math:`y_o = \sum_c P_{oc} \sum_k W_{ck} x_{c,k}`."""
    kinds: Any = {1: ConvNN1d, 2: ConvNN2d, 3: ConvNN3d}
    if axes not in kinds:
        raise ValueError(f"axes must be 1, 2 or 3, got {axes}")
    layer, bias = kinds[axes], options.pop("bias", True)
    factory = {name: options[name] for name in ("device", "dtype") if name in options}
    first = layer(in_channels, in_channels, kernel_size, groups=in_channels, bias=False, **options)
    return nn.Sequential(first, layer(in_channels, out_channels, 1, bias=bias, **factory))

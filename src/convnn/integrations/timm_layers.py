"""The twins of timm's layers: its attention, and its convolution with TensorFlow's padding."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from timm.layers.attention import Attention
from timm.layers.conv2d_same import Conv2dSame
from timm.layers.padding import pad_same
from timm.layers.std_conv import ScaledStdConv2d, ScaledStdConv2dSame, StdConv2d, StdConv2dSame
from torch import Tensor, nn

from convnn.integrations.heads import adopted, noted, where_of
from convnn.layers import ConvNN2d, ConvNNAttention
from convnn.surgery import Refused, Twin, maps, register
from convnn.surgery.attention import why_no_attention
from convnn.surgery.carry import built, require_own, tag

# What an attention decides itself, whatever a rule says.
DECIDED = (
    "dim", "num_heads", "qk_dim", "v_dim", "out_dim", "attn_head_dim", "qkv_bias", "proj_bias", "qk_norm", "scale_norm",
    "norm_layer", "attn_drop", "proj_drop", "device", "dtype",
)  # fmt: skip
PARTS = ("qkv", "q_norm", "k_norm", "norm", "proj", "proj_drop")


def attention(module: Any, layer: Any) -> Twin:
    """The twin of timm's attention: its own projections and norms, all keys or the k nearest."""
    if getattr(module, "gate", None) is not None:
        raise Refused("its output is gated (gated=True), and ConvNNAttention has no gate")
    require_own(module, (), (*PARTS, "attn_drop"))
    chosen = ConvNNAttention.using(k="all", kernel=None) if layer is None else layer
    if not isinstance(chosen, type) or not issubclass(chosen, ConvNNAttention):
        raise Refused(f"ConvNNAttention can stand for timm's Attention, {getattr(chosen, '__name__', chosen)} cannot")
    decided = sorted(set(DECIDED) & set(chosen.given))
    if decided:
        raise Refused(f"{', '.join(decided)} of the rule's layer: the attention decides that itself")
    start = {"kernel_init": "preserving"} if "kernel_init" not in chosen.given else {}
    made = built(chosen, attn_drop=module.attn_drop.p, **_sizes(module), **start, **where_of(module.qkv))
    _move(module, made)
    if made.kernel is not None:
        made.kernel.requires_grad_(any(p.requires_grad for p in module.qkv.parameters()))
    with torch.device("meta"):
        tag(module, made, Attention(1, 1))
    reason = _why_no_attention(made)
    return Twin(made, reason is None, noted(reason, module.attn_drop.p), partial(back, fused=module.fused_attn))


def _sizes(module: Any) -> dict[str, int]:
    """The sizes of an attention; its projections are called as they are, whoever made them."""
    for name in ("qkv", "proj"):
        linear = getattr(module, name)
        if not all(isinstance(getattr(linear, size, None), int) for size in ("in_features", "out_features")):
            came = type(linear).__name__
            raise Refused(f"its {name} is {came}, which has no in_features and out_features to read its sizes from")
    sizes = {"dim": module.qkv.in_features, "out_dim": module.proj.out_features}
    return sizes | {"num_heads": module.num_heads, "attn_head_dim": module.qkv.out_features // 3 // module.num_heads}


def _move(module: Any, made: Any) -> None:
    for name in PARTS:
        setattr(made, name, getattr(module, name))


def _why_no_attention(layer: Any) -> str | None:
    told = None if layer.position is None else "queries and keys are told their places"
    dropped = "its output is dropped out before the projection" if layer.kernel_drop.p else None
    return why_no_attention(layer) or told or dropped


def back(layer: Any, fused: bool = True) -> nn.Module:
    """timm's attention with the parameters a layer has now."""
    reason = _why_no_attention(layer)
    if reason:
        raise Refused(reason)
    with torch.device("meta"):
        made: Any = Attention(layer.num_heads, layer.num_heads, attn_drop=layer.attn_drop)
    made.head_dim = layer.qk_dim // layer.num_heads
    made.attn_dim, made.scale, made.fused_attn = layer.qk_dim, made.head_dim**-0.5, fused
    _move(layer, made)
    return made


class SameConvNN2d(ConvNN2d):
    """A ConvNN2d behind TensorFlow's padding, which depends on the size of the map. Made by :func:`convnn.convert`."""

    def forward(self, cells: Tensor) -> Tensor:  # noqa: D102
        return super().forward(pad_same(cells, self.kernel_size, self.stride, self.dilation))  # type: ignore[arg-type]


def same(module: Any, layer: Any) -> Twin:
    """The twin of a convolution with TensorFlow's padding."""
    if layer is not None and not (isinstance(layer, type) and issubclass(layer, ConvNN2d)):
        raise Refused(f"ConvNN2d can stand for Conv2dSame, {getattr(layer, '__name__', layer)} cannot")
    chosen = SameConvNN2d if layer is None else SameConvNN2d.using(**layer.given)
    twin = maps.convolution(adopted(module, nn.Conv2d), chosen)
    return replace(twin, back=partial(same_back, twin.back))


def same_back(plain: Any, layer: nn.Module) -> nn.Module:
    """timm's convolution with the parameters a layer has now."""
    return adopted(plain(layer), Conv2dSame)


def standardized(module: Any, layer: Any) -> Twin:  # noqa: ARG001 - as every twin is asked for
    """No twin: a kernel of ConvNN is what its parameter says."""
    raise Refused(f"{type(module).__name__} standardises its kernel at every call, which a ConvNN layer does not")


register(Attention, attention)
register(Conv2dSame, same)
for _kind in (StdConv2d, StdConv2dSame, ScaledStdConv2d, ScaledStdConv2dSame):
    register(_kind, standardized)

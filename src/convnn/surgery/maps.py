"""The twins of convolutions."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from convnn.layers import ConvNN1d, ConvNN2d, ConvNN3d, HybridConv1d, HybridConv2d, HybridConv3d
from convnn.layers.maps import ConvNNNd
from convnn.layers.windows import Nearness
from convnn.selection import is_hard
from convnn.surgery.carry import built, require_own, tag
from convnn.surgery.twins import Refused, Twin, register
from convnn.weighting import uniform

KINDS: dict[Any, tuple[Any, Any]] = {
    nn.Conv1d: (ConvNN1d, HybridConv1d),
    nn.Conv2d: (ConvNN2d, HybridConv2d),
    nn.Conv3d: (ConvNN3d, HybridConv3d),
}
WINDOW = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "padding_mode")
TENSORS = ("weight", "bias")


def convolution(module: Any, layer: Any) -> Twin:
    """The twin of a convolution: a search that holds its kernel, or two halves that each hold their channels of it."""
    require_own(module, TENSORS)
    searches, hybrid = KINDS[type(module)]
    chosen: Any = searches if layer is None else layer
    if not isinstance(chosen, type) or not issubclass(chosen, (searches, hybrid)):
        came = getattr(chosen, "__name__", chosen)
        kinds = f"{searches.__name__} and {hybrid.__name__}"
        raise Refused(f"{kinds} can stand for {type(module).__name__}, {came} cannot")
    decided = sorted({*WINDOW, "groups", "bias", "device", "dtype"} & set(getattr(chosen, "given", {})))
    if decided:
        raise Refused(f"{', '.join(decided)} of the rule's layer: the convolution decides that itself")
    twin = _searching(module, chosen) if issubclass(chosen, searches) else _halved(module, chosen)
    tag(module, twin.module, type(module)(1, 1, 1, device="meta"))
    return twin


def _window(module: Any) -> dict[str, Any]:
    where = {"device": module.weight.device, "dtype": module.weight.dtype}
    return {name: getattr(module, name) for name in WINDOW} | where


def _searching(module: Any, chosen: Any) -> Twin:
    made = built(chosen, **_window(module), groups=module.groups, bias=module.bias is not None)
    if made.weight.shape != module.weight.shape:
        came = f"the convolution's is {tuple(module.weight.shape)}, that of the layer {tuple(made.weight.shape)}"
        raise Refused(f"the kernel must fit: {came}; leave out k, patch, heads and v_dim")
    if made.projected:
        for name in ("to_value", "to_query", "to_key"):
            _start_as_identity(getattr(made, name, None))
    made.weight, made.bias = module.weight, module.bias
    reason = why_no_convolution(made)
    note = reason or ("its share of features starts at 0" if made.by_features else "")
    return Twin(made, reason is None, note, partial(_back, biased=module.bias is not None))


def _halved(module: Any, chosen: Any) -> Twin:
    """Both halves hold their output channels; what the rule leaves open is chosen so that nothing changes."""
    given, biased = chosen.given, module.bias is not None
    depthwise = given.get("branch", "standard") == "depthwise"
    if module.groups != (module.in_channels if depthwise else 1):
        came = f"groups={module.groups}"
        raise Refused(f"both halves of a hybrid see all channels, or branch='depthwise' each one alone, got {came}")
    open_to_us: dict[str, Any] = {"pointwise": False, "pointwise_bias": False}
    open_to_us |= {"conv_bias": biased, "convnn_bias": biased}
    if not {"similarity", "blend"} & set(given):
        open_to_us["blend"] = 0.0
    made = built(chosen, **_window(module), **{n: v for n, v in open_to_us.items() if n not in given})
    halves = [half for half in (made.convnn, made.conv) if half is not None]
    if depthwise and len(halves) == 2:
        raise Refused("the outputs of a depthwise convolution go by input channel: give ratio=0.0 or ratio=1.0")
    _require_fit(module, halves)
    sizes = [half.out_channels for half in halves]
    for half, weight in zip(halves, module.weight.split(sizes), strict=True):
        half.weight = _part(weight, module.weight)
    for half, bias in zip(halves, module.bias.split(sizes) if biased else [None] * len(sizes), strict=True):
        if bias is not None:
            half.bias = _part(bias, module.bias)
        elif half.bias is not None:
            nn.init.zeros_(half.bias).requires_grad_(module.weight.requires_grad)
    _start_as_identity(made.pointwise, module.weight.requires_grad)
    reason = None if made.convnn is None else why_no_convolution(made.convnn)
    note = f"{' + '.join(map(str, sizes))} channels" + (
        "" if made.pointwise is None else ", then 1x1 from the identity"
    )
    if made.convnn is not None:
        note += f"; {reason}" if reason else "; its share of features starts at 0" if made.convnn.by_features else ""
    return Twin(made, reason is None, note, partial(_back, biased=module.bias is not None))


def _require_fit(module: Any, halves: list[Any]) -> None:
    for half in halves:
        if not hasattr(half, "weight"):
            raise Refused("a separable kernel cannot hold a convolution's: leave out branch='separable'")
        if half.weight.shape[1:] != module.weight.shape[1:]:
            came = f"{tuple(module.weight.shape[1:])} for each output, the layer {tuple(half.weight.shape[1:])}"
            raise Refused(f"the kernel must fit: the convolution has {came}; leave out k and patch")
        if module.bias is not None and half.bias is None:
            raise Refused("the convolution has a bias: leave out conv_bias=False and convnn_bias=False")


def _part(tensor: Tensor, whole: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(tensor.detach().clone(), requires_grad=whole.requires_grad)


@torch.no_grad()
def _start_as_identity(linear: Any, learns: bool | None = None) -> None:
    """Let a square map of the channels change nothing; others start as they do."""
    if not isinstance(getattr(linear, "weight", None), Tensor) or linear.weight.shape[0] != linear.weight.shape[1]:
        return
    linear.weight.copy_(_identity(linear.weight))
    if linear.bias is not None:
        linear.bias.zero_()
    if learns is not None:
        linear.requires_grad_(learns)


def _identity(weight: Tensor) -> Tensor:
    eye = torch.eye(weight.shape[0], device=weight.device, dtype=weight.dtype)
    return eye.reshape(weight.shape)


def _changes_something(linear: Any) -> bool:
    if linear is None or isinstance(linear, nn.Identity):
        return False
    return _learned(linear.bias) or not (linear.weight.is_meta or torch.equal(linear.weight, _identity(linear.weight)))


def _learned(bias: Tensor | None) -> bool:
    """Whether a bias that started at 0 is known to be something else."""
    return bias is not None and not bias.is_meta and bool(bias.detach().any())


def why_no_convolution(layer: ConvNNNd) -> str | None:
    """Why a layer on maps does not compute its kernel's convolution, or None if it does."""
    counts = layer.k, layer.patch, layer.heads
    cases = {
        _compared(layer): not _by_place(layer),
        "k, patch, heads or boundary are not a convolution's": (
            counts != (prod(layer.kernel_size), 1, 1) or layer.boundary != "pad"
        ),
        "neighbours do not all count alike": layer.weighting is not uniform,
        "its selection is not hard": not is_hard(layer.selection),
        "a mask, candidates or include_padding=False choose among the neighbours": (
            bool(layer.mask.count) or layer.candidates is not None or not layer.include_padding
        ),
        "its values are projected": layer.projected and _changes_something(layer.to_value),
    }
    return next((reason for reason, holds in cases.items() if holds), None)


def _by_place(layer: ConvNNNd) -> bool:
    blend = layer.blend
    if blend is None:
        return not layer.by_features
    return not blend.learns and blend.start == 0 and isinstance(blend.space, Nearness)


def _compared(layer: ConvNNNd) -> str:
    near = getattr(layer.similarity, "__name__", type(layer.similarity).__name__)
    return f"neighbours by {near}" + ("" if layer.blend is None else f" of {layer.blend.extra_repr()}")


def _back(layer: Any, biased: bool | None = None) -> nn.Module:
    """The convolution a layer still is, with a bias, without, or as the layer is."""
    whole = isinstance(layer, ConvNNNd)
    halves = [layer] if whole else [half for half in (layer.convnn, layer.conv) if half is not None]
    biased = halves[0].bias is not None if biased is None else biased
    reasons = [why_no_convolution(half) for half in halves if isinstance(half, ConvNNNd)]
    if not whole and _changes_something(layer.pointwise):
        reasons.append("its 1x1 is no longer the identity")
    if not biased and any(_learned(half.bias) for half in halves):
        reasons.append("it has learned a bias, which the convolution had not")
    for reason in filter(None, reasons):
        raise Refused(reason)
    kind = next(kind for kind, layers in KINDS.items() if isinstance(layer, layers))
    first = halves[0]
    window = {name: getattr(first, name) for name in WINDOW} | {"out_channels": layer.out_channels}
    made = kind(**window, groups=first.groups, bias=biased, device="meta", dtype=first.weight.dtype)
    made.weight = _joined([half.weight for half in halves])
    made.bias = _joined([half.bias for half in halves]) if biased else None
    return made


def _joined(parts: list[nn.Parameter]) -> nn.Parameter:
    if len(parts) == 1:
        return parts[0]
    return nn.Parameter(torch.cat([part.detach() for part in parts]), requires_grad=any(p.requires_grad for p in parts))


for _kind in KINDS:
    register(_kind, convolution)

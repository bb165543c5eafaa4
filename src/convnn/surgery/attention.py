"""The twin of torch's multi-head attention."""

from __future__ import annotations

from typing import Any

from torch import nn

from convnn.layers import MultiheadConvNN
from convnn.similarity import scaled_dot
from convnn.surgery.carry import built, require_own, tag
from convnn.surgery.twins import Refused, Twin, register
from convnn.weighting import softmax

ARGUMENTS = ("embed_dim", "num_heads", "dropout", "add_zero_attn", "kdim", "vdim", "batch_first")
TENSORS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias", "bias_k", "bias_v")


def attention(module: nn.MultiheadAttention, layer: Any) -> Twin:
    """The twin of torch's attention: the same call, the same parameters, all keys or the k nearest."""
    _require_plain(module)
    chosen = MultiheadConvNN if layer is None else layer
    if not isinstance(chosen, type) or not issubclass(chosen, MultiheadConvNN):
        came = getattr(chosen, "__name__", chosen)
        raise Refused(f"MultiheadConvNN can stand for MultiheadAttention, which takes queries and keys; {came} cannot")
    decided = sorted({*ARGUMENTS, "bias", "add_bias_kv", "device", "dtype"} & set(chosen.given))
    if decided:
        raise Refused(f"{', '.join(decided)} of the rule's layer: the attention decides that itself")
    made = built(chosen, **_arguments(module), device=module.out_proj.weight.device, dtype=module.out_proj.weight.dtype)
    _move(module, made)
    if made.kernel is not None:
        made.kernel.init = "preserving"
        made.kernel.reset_parameters()
        made.kernel.requires_grad_(module.out_proj.weight.requires_grad)
    tag(module, made, nn.MultiheadAttention(1, 1, device="meta"))
    reason = why_no_attention(made)
    notes = [reason] if reason else []
    notes += ["its dropout draws other numbers"] if module.dropout else []
    return Twin(made, reason is None, "; ".join(notes), back)


def _arguments(module: Any) -> dict[str, Any]:
    added = {"bias": module.in_proj_bias is not None, "add_bias_kv": module.bias_k is not None}
    return {name: getattr(module, name) for name in ARGUMENTS} | added


def _move(module: Any, made: Any) -> None:
    for name in TENSORS:
        setattr(made, name, getattr(module, name))
    made.out_proj = module.out_proj


def _require_plain(module: Any) -> None:
    """Refuse what was changed inside: torch's layer never calls its ``out_proj``, the twin does."""
    require_own(module, TENSORS, ("out_proj",))
    plain = nn.MultiheadAttention(1, 1, device="meta").out_proj
    if type(module.out_proj) not in (type(plain), nn.Linear):
        raise Refused(f"its out_proj is {type(module.out_proj).__name__}, of which torch's layer reads the weight only")
    require_own(module.out_proj, ("weight", "bias"))
    if module.out_proj._forward_hooks or module.out_proj._forward_pre_hooks:
        raise Refused("its out_proj has hooks, which torch's layer never runs and its twin would")


def why_no_attention(layer: MultiheadConvNN) -> str | None:
    """Why a layer does not compute torch's attention, or None if it does."""
    if layer.similarity is not scaled_dot or layer.weighting is not softmax:
        return "another similarity or weighting than the softmax of scaled dot products"
    if layer.mask.count or layer.candidates is not None:
        return "a mask or candidates choose among the keys"
    return None if layer.k == "all" else f"attends to the {layer.k} nearest keys, not to all"


def back(layer: Any) -> nn.Module:
    """The attention a layer still is."""
    reason = why_no_attention(layer)
    if reason:
        raise Refused(reason)
    made = nn.MultiheadAttention(**_arguments(layer), device="meta", dtype=layer.out_proj.weight.dtype)
    _move(layer, made)
    return made


register(nn.MultiheadAttention, attention)

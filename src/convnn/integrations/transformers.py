"""Hugging Face's transformers: ``attn_implementation="convnn"``, and the twins of its attentions.

After ``import convnn.integrations.transformers`` every model that asks transformers' registry for its attention (almost
all do: ViT, BERT, CLIP, Llama, ...) can be told ``model.set_attn_implementation("convnn")``, or be built with
``attn_implementation="convnn"``. How it attends stands in its configuration::

    configure(model, k=9)

which is saved and loaded with it as ``config.convnn``, or in a name of one's own, see :func:`register_attention`.
:func:`convnn.convert` replaces attentions one by one instead, where a rule may give each its own.
"""

from __future__ import annotations

import copy
import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

try:
    from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
    from transformers.masking_utils import sdpa_mask
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "convnn.integrations.transformers needs transformers: pip install transformers"
    ) from missing

from convnn.integrations.heads import OPTIONS, Heads, adopted, options_of, where_of
from convnn.surgery import Refused, Twin, register
from convnn.surgery.attention import why_no_attention
from convnn.surgery.carry import built
from convnn.weighting import softmax

__all__ = ["NAME", "configure", "register_attention"]

NAME = "convnn"

NO_SELF = "self_score is for tokens that are their own neighbours, and transformers does not say which these are"

# What some models ask of an attention and this one does not do.
UNKNOWN = ("softcap", "s_aux", "indices", "block_indices", "cache", "block_mask", "head_mask")


def register_attention(name: str, **options: Any) -> None:
    """Add a name for ``attn_implementation`` and ``set_attn_implementation``.

    Args:
        options: what :class:`~convnn.ConvNNAttention` takes beside sizes: k, similarity, weighting, candidates, mask,
            backend. Nothing that learns: a name belongs to no model. Where there are fewer keys than k, all of them
            count, as at the start of a generated text.

    Example:
        >>> register_attention("convnn-9", k=9)
        >>> from transformers import ViTConfig, ViTModel
        >>> sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 20}
        >>> model = ViTModel(ViTConfig(image_size=24, patch_size=4, **sizes, attn_implementation="convnn-9")).eval()
        >>> model(torch.randn(1, 3, 24, 24)).last_hidden_state.shape
        torch.Size([1, 37, 16])
    """
    if options.get("kernel") is not None:
        raise ValueError("a kernel learns and a name belongs to no model: convert the model with convnn.convert")
    heads = _built(options)
    if any(True for _ in heads.parameters()):
        raise ValueError("what learns belongs to a model and a name to none: convert the model with convnn.convert")
    AttentionInterface.register(name, partial(attend, heads))
    AttentionMaskInterface.register(name, sdpa_mask)


def configure(model: nn.Module, **options: Any) -> None:
    """Say in all configurations of a model how it attends: ``config.convnn``, of its parts and of their copies too.

    A model of several parts, as CLIP, has a configuration for each, and attentions look into their own.

    Args:
        options: as for :func:`register_attention`, but what a JSON file can hold.
    """
    _built(options)
    found = [
        config for part in model.modules() if isinstance(config := getattr(part, "config", None), PretrainedConfig)
    ]
    if not found:
        raise ValueError(f"{type(model).__name__} has no configuration of transformers")
    for config in found:
        config.convnn = dict(options)


def _built(options: dict[str, Any]) -> Heads:
    """The search that options mean."""
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise ValueError(f"convnn knows {', '.join(OPTIONS)}, got {', '.join(unknown)}")
    if options.get("self_score", "true") != "true":
        raise ValueError(
            "self_score is for tokens that are their own neighbours, which transformers does not tell apart"
        )
    return Heads(1, 1, **options)


def attend(
    heads: Heads | None,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool | None = False,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls between the projections of an attention, ``(B, H, N, d)`` to ``(B, N, H, d)``.

    Masks are honoured, keys and values shared by several heads too. Weights are given where ``output_attentions`` asks
    for them: of all keys, 0 for who is no neighbour. Where a row may choose nobody the output is 0.
    """
    asked = [name for name in UNKNOWN if others.get(name) is not None]
    if asked:
        raise ValueError(f"attention 'convnn' does not know {', '.join(asked)}, which {type(module).__name__} asks for")
    if attention_mask is not None and (not isinstance(attention_mask, Tensor) or attention_mask.ndim != 4):
        came = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise ValueError(f"attention 'convnn' needs masks of shape (B, 1 or H, N, M) as 'sdpa' and 'eager', got {came}")
    window = others.get("sliding_window")
    if attention_mask is None and window is not None and key.shape[2] > window:
        size = f"a window of {window} for {key.shape[2]} keys and no mask: let the model use 'sdpa' or 'eager' masks"
        raise ValueError(f"attention 'convnn' needs the mask of a sliding window, got {size}")
    heads = heads if heads is not None else _heads_of(module)
    if heads.training != module.training:
        heads.train(module.training)  # one that belongs to no model
    if attention_mask is not None and attention_mask.is_floating_point() and heads.weighting is not softmax:
        # By any other weighting the lowest number, which "eager" masks forbid with, would count.
        least = torch.finfo(attention_mask.dtype).min
        attention_mask = attention_mask.masked_fill(attention_mask <= least, -torch.inf)
    groups = getattr(module, "num_key_value_groups", 1)
    if groups > 1 and key.shape[1] != query.shape[1]:
        key, value = (tokens.repeat_interleave(groups, 1) for tokens in (key, value))
    masks: list[Any] = [mask for mask in (_fitting(attention_mask, key), position_bias) if mask is not None]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if causal and attention_mask is None and query.shape[2] > 1:
        masks.append("causal")
    said: dict[str, Any] = {"scale": scaling, "dropout_p": dropout, "need_weights": bool(output_attentions)}
    output, weights = heads(query, key, value, masks, **said)
    return output.transpose(1, 2).contiguous(), weights


def _fitting(mask: Tensor | None, key: Tensor) -> Tensor | None:
    """A mask as long as there are keys: a cache may be told of more."""
    return mask if mask is None else mask[..., : key.shape[2]]


def _heads_of(module: Any) -> Heads:
    """The search a module was given by its twin, or by the configuration of its model."""
    own = module._modules.get(NAME)
    if own is not None:
        return own
    said = getattr(module.config, NAME, None) or {}
    if not isinstance(said, dict) or said.get("kernel") is not None:
        raise ValueError(f"config.convnn must be a dictionary such as {{'k': 9}}, without a kernel, got {said!r}")
    return _built(said)


def asks_the_registry(module: nn.Module) -> bool:
    """Whether a module is an attention of transformers that looks in its registry, and is not a twin already."""
    if type(module).__module__.partition(".")[0] != "transformers" or NAME in module._modules:
        return False
    return "ALL_ATTENTION_FUNCTIONS" in _code(module).co_names and hasattr(module, "config")


def _code(module: nn.Module) -> Any:
    return inspect.unwrap(type(module).forward).__code__


def attention(module: Any, layer: Any) -> Twin:
    """The twin of an attention: the same module, which asks for "convnn" and holds its own search."""
    words = {word for const in _code(module).co_consts for word in (const if isinstance(const, tuple) else (const,))}
    asked = sorted(words & {"softcap", "s_aux", "indices", "block_indices"})
    if asked:
        raise Refused(f"it asks its attention for {', '.join(asked)}, which the operator does not know")
    options = options_of(layer)
    if options.get("self_score", "true") != "true":
        raise Refused(NO_SELF)
    made = adopted(module, type(module))
    channels, heads = _sizes(module) if options.get("kernel") is not None else (1, 1)
    made.convnn = built(Heads, channels=channels, heads=heads, **options, **where_of(module))
    # The configuration belongs to the whole model, and this is said of one attention.
    made.config = copy.copy(module.config)
    made.config._attn_implementation_internal = NAME
    reason = why_no_attention(made.convnn)
    note = reason or "the same module, which attends through convnn"
    return Twin(made, reason is None, note, partial(back, module.config))


def _sizes(module: Any) -> tuple[int, int]:
    """The channels of a head's values, and how many heads there are: what a kernel has to know."""
    heads = _said(module, "num_heads", "num_attention_heads", "n_heads")
    width = _said(module.config, "hidden_size", "d_model")
    channels = _said(module, "v_head_dim", "head_dim", "attention_head_size", "key_value_proj_dim")
    channels = channels or (width // heads if width and heads else None)
    if channels is None or heads is None:
        raise Refused("it does not say how many heads of how many channels it has, which a kernel has to know")
    return channels, heads


def _said(owner: Any, *names: str) -> int | None:
    """The first of these numbers that a module, or its configuration, has."""
    for one in filter(None, (owner, getattr(owner, "config", None))):
        for name in names:
            if isinstance(getattr(one, name, None), int):
                return int(getattr(one, name))
    return None


def back(config: Any, twin: Any) -> nn.Module:
    """The attention as it was, with the parameters its twin has now."""
    reason = why_no_attention(twin.convnn)
    if reason:
        raise Refused(reason)
    made = adopted(twin, type(twin))
    del made._modules[NAME]
    made.config = config
    return made


AttentionInterface.register(NAME, partial(attend, None))
AttentionMaskInterface.register(NAME, sdpa_mask)
register(asks_the_registry, attention)

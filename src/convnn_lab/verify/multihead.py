"""The multi-head layer against torch's, with its masks and its additions to the keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from convnn import recipes
from convnn_lab.verify.drawing import Case, Problem, between, call, coin, one_of


def multihead(*, masked: bool) -> Case:
    """Make a case of torch's layer, with or without masks."""

    def case() -> Problem:
        heads, options = between(1, 4), _options()
        channels = heads * between(1, 5)
        module = nn.MultiheadAttention(channels, heads, **options)
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.5)  # torch starts the biases at 0, where nothing would show
        batch = None if coin(0.2) else between(1, 3)
        queries, keys = between(1, 12), between(1, 12)
        given = _masks(batch, heads, queries, keys) if masked else {}
        if masked and not options["add_bias_kv"] and not options["add_zero_attn"] and coin(0.2):
            # Beside additional keys torch would take the hint for a mask, and forbid them.
            given = {"attn_mask": torch.ones(queries, keys).tril() == 0, "is_causal": True}
        given |= {"need_weights": coin(), "average_attn_weights": coin()}
        sizes = ((queries, channels), (keys, module.kdim), (keys, module.vdim))
        tokens = [torch.randn(_laid(batch, *size, first=options["batch_first"])) for size in sizes]

        layer = call("MultiheadAttention", channels, heads, **options)
        said = f"from_attention({layer}) on {call('', *tokens, **given)}"
        return Problem(
            lambda backend: recipes.from_attention(module, backend=backend)(*tokens, **given),
            lambda: module(*tokens, **given),
            said,
        )

    return case


def _options() -> dict[str, Any]:
    return {
        "bias": coin(),
        "add_bias_kv": coin(0.3),
        "add_zero_attn": coin(0.3),
        "kdim": between(1, 9) if coin(0.3) else None,
        "vdim": between(1, 9) if coin(0.3) else None,
        "batch_first": coin(),
    }


def _masks(batch: int | None, heads: int, queries: int, keys: int) -> dict[str, Any]:
    """Draw a mask, a mask of padding, or both; True or -inf forbids, and one key is open to every query."""
    lead = one_of((), (heads * (batch or 1),))
    whole = torch.rand(*lead, queries, keys) < 0.5
    padding = torch.rand(*(() if batch is None else (batch,)), keys) < 0.3
    whole[..., 0], padding[..., 0] = False, False
    masks = {"attn_mask": whole, "key_padding_mask": padding}
    if coin():
        masks = {name: torch.randn(mask.shape).masked_fill(mask, -torch.inf) for name, mask in masks.items()}
    names = one_of(("attn_mask",), ("key_padding_mask",), tuple(masks))
    return {name: masks[name] for name in names}


def _laid(batch: int | None, tokens: int, channels: int, *, first: bool) -> tuple[int, ...]:
    if batch is None:
        return tokens, channels
    return (batch, tokens, channels) if first else (tokens, batch, channels)

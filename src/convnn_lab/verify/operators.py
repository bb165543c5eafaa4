"""The operator itself against torch's scaled dot product attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from convnn.functional import convnn
from convnn_lab.verify.drawing import Problem, between, call, one_of


def attention() -> Problem:
    """All keys, softmax."""
    return _attention(*_tokens(), {})


def masked_attention() -> Problem:
    """A bool mask; some queries may be left with nothing."""
    tokens = _tokens()
    allowed = torch.rand(_mask_shape(tokens)) < 0.5
    return _attention(*tokens, {"attn_mask": allowed}, mask=allowed)


def biased_attention() -> Problem:
    """A float mask: added, or forbidding; some queries may be left with nothing."""
    tokens = _tokens()
    bias = torch.randn(_mask_shape(tokens))
    bias = bias.masked_fill(torch.rand(bias.shape) < 0.3, -torch.inf)
    return _attention(*tokens, {"attn_mask": bias}, mask=bias)


def causal_attention() -> Problem:
    """All keys up to one's own."""
    return _attention(*_tokens(), {"is_causal": True}, mask="causal")


def nearest_attention() -> Problem:
    """The k nearest keys only; torch is told by a mask which they are."""
    query, key, value = _tokens()
    k = between(1, key.shape[-2])
    weakest = (query @ key.mT).sort(dim=-1, descending=True).values[..., k - 1, None]
    return _attention(query, key, value, {"attn_mask": query @ key.mT >= weakest}, k=k)


def _attention(query: Tensor, key: Tensor, value: Tensor, told: dict[str, Any], **options: Any) -> Problem:
    given: dict[str, Any] = {"k": "all", **options}
    return Problem(
        lambda backend: convnn(query, key, value, **given, backend=backend),
        lambda: F.scaled_dot_product_attention(query, key, value, **told),
        call("convnn", query, key, value, **given),
    )


def _tokens() -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, queries, keys, compared, channels = (between(1, top) for top in (3, 4, 20, 20, 8, 16))
    lead = (batch, heads)
    return torch.randn(*lead, queries, compared), torch.randn(*lead, keys, compared), torch.randn(*lead, keys, channels)


def _mask_shape(tokens: tuple[Tensor, Tensor, Tensor]) -> tuple[int, ...]:
    query, key, _ = tokens
    batch, heads, queries, _ = query.shape
    lead: tuple[int, ...] = one_of((), (heads,), (batch, 1), (batch, heads))
    return (*lead, queries, key.shape[-2])

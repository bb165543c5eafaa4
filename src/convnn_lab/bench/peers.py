"""What torch has to offer for the same heads: attention by each of its backends, and flex_attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from convnn_lab.bench.measure import Function

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def sdpa(backend: SDPBackend) -> Function:
    """Attention by one of torch's backends, which raises where that cannot run."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value)

    return attend


def flex() -> Function:
    """Attention by flex_attention, compiled."""
    return _compiled(flex_attention)


def flex_kvt(k: int) -> Function:
    """KVT attention by flex_attention: who is among the K nearest is found first, and looked up pair by pair.

    Every block of pairs has some neighbours in it, so that a block mask would skip nothing; and flex_attention's own
    scores, rounded otherwise, would not meet a threshold found from these.
    """

    looked_up = _compiled(_allowed_only)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch.no_grad():
            scores = query @ key.mT
            allowed = scores >= scores.topk(k, dim=-1).values[..., -1:]
        return looked_up(query, key, value, allowed)

    return attend


def _allowed_only(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Any:
    def chosen(score: Tensor, entry: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return torch.where(allowed[entry, head, row, column], score, -torch.inf)

    return flex_attention(query, key, value, score_mod=chosen)


def _compiled(function: Any) -> Function:
    # A whole graph or none: falling back to eager would be measured under the wrong name.
    return torch.compile(function, fullgraph=True, dynamic=False)

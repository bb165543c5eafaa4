"""Linear attention: a baseline the operator does not cover, because it never looks at a single score."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from convnn import checks
from convnn.arguments import autocast_off
from convnn.layers import shapes
from convnn.layers.configurable import Configurable
from convnn.neighbors import wide


class LinearAttention(Configurable):
    r"""Attention by sums instead of scores: with :math:`\phi = \mathrm{elu} + 1`,

    .. math::
        y_i = \frac{\phi(q_i)^\top \sum_j \phi(k_j) v_j^\top}{\phi(q_i)^\top \sum_j \phi(k_j)}

    Time and memory grow with the number of tokens. Parameters are named as in timm's ``Attention``.

    Args:
        causal: let a token see itself and those before it only.

    Shape:
        ``(..., N, dim)`` to ``(..., N, dim)``.

    Example:
        >>> LinearAttention(32, 4)(torch.randn(2, 50, 32)).shape
        torch.Size([2, 50, 32])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        qkv_bias: bool = False,
        proj_bias: bool = True,
        proj_drop: float = 0.0,
        causal: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.whole("num_heads", num_heads, 1)
        shapes.divides("dim", dim, num_heads, "num_heads")
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_heads, self.causal = num_heads, causal
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias, **factory)
        self.proj = nn.Linear(dim, dim, bias=proj_bias, **factory)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(
        self,
        x: Tensor,
        attn_mask: None = None,
        key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Attend to the tokens; ``key_padding_mask`` ``(..., N)`` is True for what is padding."""
        if attn_mask is not None:
            raise ValueError("linear attention sees no pairs and takes no mask of pairs; use is_causal, or none")
        query, key, value = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(-2, -3) for part in self.qkv(x).chunk(3, -1)
        )
        with autocast_off(x.device):
            # In float32: sums over all tokens leave the range of float16.
            output = self._attended(wide(query), wide(key), wide(value), key_padding_mask, is_causal).to(query.dtype)
        return self.proj_drop(self.proj(output.transpose(-2, -3).flatten(-2)))

    def _attended(self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, is_causal: bool) -> Tensor:
        query, key = _positive(query), _positive(key)
        if padding is not None:
            hidden = padding[..., None, :, None]
            key, value = key.masked_fill(hidden, 0.0), value.masked_fill(hidden, 0.0)
        attend = causal_sums if self.causal or is_causal else sums
        counted = torch.cat([value, torch.ones_like(value[..., :1])], -1)
        numbers, weight = attend(query, key, counted).split([value.shape[-1], 1], -1)
        return numbers / weight.clamp(min=torch.finfo(weight.dtype).tiny)


def _positive(numbers: Tensor) -> Tensor:
    """elu + 1, without the digits that adding 1 to a small number loses."""
    return numbers.clamp(max=0).exp() + numbers.relu()


def sums(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Every query on the sum of all :math:`k_j v_j^\\top`."""
    return query @ (key.mT @ value)


def causal_sums(query: Tensor, key: Tensor, value: Tensor, block: int = 128) -> Tensor:
    """Every query on the sum up to its own place: exactly inside a block of tokens, by a running sum before it."""
    before = key.new_zeros(*key.shape[:-2], key.shape[-1], value.shape[-1])
    parts = []
    for q, k, v in zip(*(tokens.split(block, -2) for tokens in (query, key, value)), strict=True):
        parts.append(q @ before + (q @ k.mT).tril() @ v)
        before = before + k.mT @ v
    return torch.cat(parts, -2)

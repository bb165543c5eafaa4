"""GPT: blocks of causal attention and two linear layers that say, after every token, what comes next."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from convnn import checks
from convnn.descriptor import sinusoids
from convnn.layers import Cache
from convnn.models import vit
from convnn.models.factories import Attention, attention_of, placed

# Channels, blocks, heads.
CONFIGURATIONS: dict[str, tuple[int, int, int]] = {
    "gpt_tiny": (128, 4, 4),
    "gpt_mini": (384, 6, 6),
    "gpt_small": (768, 12, 12),
}

Caches: TypeAlias = tuple[Cache, ...]


class Block(vit.Block):
    """A block whose attention sees a token and those before it."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        x = x + self.drop(self.attn(self.norm1(x), is_causal=True))
        return x + self.mlp(self.norm2(x))

    def step(self, x: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        """The same of the next tokens alone."""
        step: Any = getattr(self.attn, "step", None)
        if step is None:
            raise TypeError(f"{type(self.attn).__name__} keeps nothing of the tokens before: it has no step(x, cache)")
        attended, cache = step(self.norm1(x), cache)
        x = x + self.drop(attended)
        return x + self.mlp(self.norm2(x)), cache


class GPT(nn.Module):
    """A causal model of text whose attention may be any layer.

    Args:
        vocabulary: how many different tokens there are.
        length: how many places are learned; no limit where positions are not.
        layer: what stands where the attention stood: a name of :mod:`convnn.models.factories` or a factory
            ``(dim, num_heads)``. It is called with ``is_causal=True``, and to write it needs ``step(x, cache)``.
        positions: ``"learned"``, ``"sinusoidal"``, or None where the layer knows them, as with ``position="rotary"``.
        dropout: of the embedded tokens, after attention and in the linear layers.
        options: of the layer, where it is given by name.

    Shape:
        tokens ``(B, N)`` of whole numbers to ``(B, N, vocabulary)``. Where the layer searches for k neighbours, N must
        be at least k, but for :meth:`step`.

    Example:
        >>> model = GPT(32, 2, 4, vocabulary=65, length=64, layer="convnn", k=8).eval()
        >>> text = torch.randint(65, (2, 20))
        >>> model(text).shape
        torch.Size([2, 20, 65])
        >>> model.generate(text[:, :3], 10).shape
        torch.Size([2, 13])
    """

    def __init__(
        self,
        dim: int,
        depth: int,
        heads: int,
        *,
        vocabulary: int = 256,
        length: int = 256,
        layer: str | Attention = "attention",
        positions: Literal["learned", "sinusoidal"] | None = "learned",
        dropout: float = 0.0,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        checks.whole("vocabulary", vocabulary, 1)
        checks.whole("length", length, 1)
        checks.one_of("positions", positions, ("learned", "sinusoidal", None))  # type: ignore[arg-type]
        make = attention_of(layer, options)
        with placed(device):
            self.token_embed = nn.Embedding(vocabulary, dim)
            self.pos_embed = nn.Parameter(torch.empty(length, dim)) if positions == "learned" else None
            self.drop = nn.Dropout(dropout)
            blocks = [Block(dim, make(dim, heads), 4 * dim, nn.LayerNorm, dropout) for _ in range(depth)]
            self.blocks = nn.ModuleList(blocks)
            self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)
        self.positions, self.depth, self.named = positions, depth, isinstance(layer, str)
        self.reset_parameters()
        self.to(dtype=dtype)

    def reset_parameters(self) -> None:
        """Start small, and what is added to the tokens smaller the more blocks add to them; not a factory's layers."""
        start = partial(nn.init.normal_, std=0.02)
        kept = set() if self.named else {id(part) for block in self.blocks for part in block.attn.modules()}  # type: ignore[union-attr]
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)) and id(module) not in kept:
                added = name.endswith(("attn.proj", "mlp.fc2"))
                nn.init.normal_(module.weight, std=0.02 / (2 * self.depth) ** 0.5 if added else 0.02)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)  # type: ignore[arg-type]
        if self.pos_embed is not None:
            start(self.pos_embed)

    def embedded(self, tokens: Tensor, start: int = 0) -> Tensor:
        """The tokens from place ``start`` on, as they enter the first block, ``(B, N, dim)``."""
        if tokens.ndim != 2 or tokens.is_floating_point():
            came = f"{tuple(tokens.shape)} of {tokens.dtype}"
            raise ValueError(f"tokens must be whole numbers of shape (B, N), got {came}")
        x, stop = self.token_embed(tokens), start + tokens.shape[1]
        if self.pos_embed is not None:
            if stop > len(self.pos_embed):
                raise ValueError(f"this model has learned {len(self.pos_embed)} places, got {stop} tokens")
            x = x + self.pos_embed[start:stop]
        elif self.positions == "sinusoidal":
            x = x + sinusoids(torch.arange(float(start), float(stop), device=x.device), x.shape[-1]).to(x.dtype)
        return self.drop(x)

    def forward(self, tokens: Tensor) -> Tensor:  # noqa: D102
        x = self.embedded(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def cache(self, room: int) -> Caches:
        """What :meth:`step` begins with: a cache for so many tokens in every block."""
        return tuple(Cache(room) for _ in self.blocks)

    @torch.no_grad()
    def step(self, tokens: Tensor, caches: Caches) -> tuple[Tensor, Caches]:
        """What comes after each of the next tokens ``(B, n)``: the forward of the whole, of these tokens alone."""
        x, kept = self.embedded(tokens, caches[0].length), []
        for block, cache in zip(self.blocks, caches, strict=True):
            x, cache = block.step(x, cache)  # type: ignore[operator] # noqa: PLW2901
            kept.append(cache)
        return self.head(self.norm(x)), tuple(kept)

    @torch.no_grad()
    def stream(
        self,
        tokens: Tensor,
        count: int,
        *,
        temperature: float = 1.0,
        top: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Iterator[Tensor]:
        """Write after a beginning ``(B, N)``, one token ``(B, 1)`` at a time.

        Where the learned places end, it goes on with the last half of them as the beginning.

        Args:
            temperature: 0 for the likeliest token always.
            top: draw among so many of the likeliest; None for all.
        """
        checks.whole("count", count, 0)
        if not temperature >= 0:
            raise ValueError(f"temperature must be at least 0, got {temperature}")
        if tokens.shape[-1] == 0:
            raise ValueError("there must be a token to begin with, got none")
        whole = tokens.shape[-1] + count
        room = whole if self.pos_embed is None else min(whole, len(self.pos_embed))
        caches, fresh, seen = self.cache(room), tokens[:, -room:], tokens
        for _ in range(count):
            if caches[0].length + fresh.shape[1] > room:
                caches, fresh = self.cache(room), seen[:, -max(1, room // 2) :]
            logits, caches = self.step(fresh, caches)
            fresh = drawn(logits[:, -1], temperature, top, generator)
            seen = torch.cat([seen[:, -room:], fresh], 1)
            yield fresh

    def generate(self, tokens: Tensor, count: int, **options: Any) -> Tensor:
        """Write ``count`` tokens after a beginning: ``(B, N)`` gives ``(B, N + count)``; see :meth:`stream`."""
        return torch.cat([tokens, *self.stream(tokens, count, **options)], 1)


def drawn(logits: Tensor, temperature: float, top: int | None, generator: torch.Generator | None) -> Tensor:
    """Draw a token from logits ``(B, V)``: ``(B, 1)``."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = logits.float() / temperature
    if top is not None:
        checks.whole("top", top, 1)
        least = logits.topk(min(top, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)

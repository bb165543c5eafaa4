"""Attention layers and published patterns, against torch's attention with a mask made key by key."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from convnn import ConvNNAttention, recipes
from convnn.backends import Backend
from convnn_lab.verify.drawing import Case, Problem, between, call, coin, one_of

# The options of a recipe, the number of tokens, and the keys that query i may choose.
Pattern: TypeAlias = tuple[dict[str, Any], int, Callable[[int], Iterable[int]]]


class Projections(NamedTuple):
    """The parameters of an attention layer, and the layer spelt out with torch's own functions."""

    parameters: dict[str, Tensor]
    heads: int
    turns: bool = False

    @classmethod
    def drawn(cls, dim: int, heads: int, *, per_head: int, qkv_bias: bool, proj_bias: bool, turns: bool) -> Projections:
        """Draw the parameters."""
        inner = heads * per_head
        drawn = {"qkv.weight": torch.randn(3 * inner, dim), "proj.weight": torch.randn(dim, inner)}
        drawn |= {"qkv.bias": torch.randn(3 * inner)} if qkv_bias else {}
        drawn |= {"proj.bias": torch.randn(dim)} if proj_bias else {}
        return cls({name: parameter / dim**0.5 for name, parameter in drawn.items()}, heads, turns)

    def into(self, layer: ConvNNAttention) -> ConvNNAttention:
        """Copy them into a layer."""
        layer.load_state_dict(self.parameters)
        return layer

    def projected(self, tokens: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of each head."""
        weights, biases = self.parameters["qkv.weight"].chunk(3), (None,) * 3
        if "qkv.bias" in self.parameters:
            biases = self.parameters["qkv.bias"].chunk(3)  # type: ignore[assignment]
        rows = zip((tokens, context, context), weights, biases, strict=True)
        query, key, value = (F.linear(*row).unflatten(-1, (self.heads, -1)).transpose(1, 2) for row in rows)
        return (_turned(query), _turned(key), value) if self.turns else (query, key, value)

    def attended(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Torch's attention, and the last projection."""
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return F.linear(
            output.transpose(1, 2).flatten(2), self.parameters["proj.weight"], self.parameters.get("proj.bias")
        )


def layer() -> Problem:
    """The layer alone: on itself or a context, to all keys or the k nearest, with any of its masks."""
    options: dict[str, Any] = {"qkv_bias": coin(), "proj_bias": coin()}
    dim, heads, batch, queries = between(3, 9), between(1, 4), between(1, 3), between(1, 12)
    projections = Projections.drawn(dim, heads, per_head=between(2, 6), turns=False, **options)
    options["attn_head_dim"] = projections.parameters["proj.weight"].shape[1] // heads
    tokens, context = torch.randn(batch, queries, dim), torch.randn(batch, between(1, 12), dim) if coin() else None
    keys = tokens if context is None else context
    k = "all" if coin() else between(1, keys.shape[1])
    given = _masks(batch, heads, queries, keys.shape[1])

    def ours(backend: str | Backend) -> Tensor:
        made = ConvNNAttention(dim, heads, k=k, kernel=None, **options, backend=backend)  # type: ignore[arg-type]
        return projections.into(made)(tokens, context, **given)

    def theirs() -> Tensor:
        query, key, value = projections.projected(tokens, keys)
        bias = _added(given, queries, keys.shape[1])
        if k != "all":
            scores = query @ key.mT / query.shape[-1] ** 0.5 + bias
            weakest = scores.sort(dim=-1, descending=True).values[..., k - 1, None]  # type: ignore[operator]
            bias = bias.masked_fill(scores < weakest, -torch.inf)
        return projections.attended(query, key, value, bias)

    said = call("ConvNNAttention", dim, heads, k=k, kernel=None, **options)
    return Problem(ours, theirs, f"{said} on {call('', tokens, context, **given)}")


def _masks(batch: int, heads: int, queries: int, keys: int) -> dict[str, Any]:
    allowed = torch.rand(*one_of((), (heads,), (batch, 1)), queries, keys) < 0.7
    bias = torch.randn(allowed.shape).masked_fill(~allowed, -torch.inf)
    padding = torch.rand(batch, keys) < 0.3
    drawn = {"attn_mask": one_of(None, allowed, bias), "key_padding_mask": one_of(None, padding), "is_causal": coin()}
    return {name: mask for name, mask in drawn.items() if mask is not None}


def _added(given: dict[str, Any], queries: int, keys: int) -> Tensor:
    """All masks as one that is added, ``(B or 1, H or 1, N, M)``."""
    bias = torch.zeros(1, 1, queries, keys)
    mask = given.get("attn_mask")
    if mask is not None:
        bias = bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask
    if "key_padding_mask" in given:
        bias = bias.masked_fill(given["key_padding_mask"][:, None, None, :], -torch.inf)
    return bias.masked_fill(torch.ones(queries, keys).triu(1) > 0, -torch.inf) if given["is_causal"] else bias


def pattern(recipe: str, draw: Callable[[], Pattern], *, turns: bool = False) -> Case:
    """Make a case of a recipe whose keys are known; ``turns`` where it turns queries and keys by place."""

    def case() -> Problem:
        own, number, keys_of = draw()
        # Turning by place is for an even number of channels.
        dim, heads, per_head = between(3, 9), between(1, 4), 2 * between(1, 4)
        options: dict[str, Any] = {**own, "qkv_bias": coin(), "proj_bias": coin(), "attn_head_dim": per_head}
        biases = {name: options[name] for name in ("qkv_bias", "proj_bias")}
        projections = Projections.drawn(dim, heads, per_head=per_head, turns=turns, **biases)
        tokens = torch.randn(between(1, 3), number, dim)

        def ours(backend: str | Backend) -> Tensor:
            made = getattr(recipes, recipe)(dim, heads, **options, backend=backend)
            return projections.into(made)(tokens)

        def theirs() -> Tensor:
            chosen = [set(keys_of(i)) for i in range(number)]
            mask = torch.tensor([[j in keys for j in range(number)] for keys in chosen])
            return projections.attended(*projections.projected(tokens, tokens), mask)

        return Problem(ours, theirs, f"{call(recipe, dim, heads, **options)} on {tuple(tokens.shape)}")

    return case


def _turned(tokens: Tensor) -> Tensor:
    """Channels i and i + C/2 as a complex number, times e^(ip / 10000^(2i/C)) at place p."""
    number, channels = tokens.shape[-2:]
    angles = [[place / 10000 ** (2 * i / channels) for i in range(channels // 2)] for place in range(number)]
    turns = torch.polar(torch.ones(number, channels // 2), torch.tensor(angles))
    turned = torch.complex(*tokens.chunk(2, -1)) * turns
    return torch.cat([turned.real, turned.imag], -1)


def local() -> Pattern:
    """The keys at most so many places away."""
    reach = between(0, 6)
    return {"window": reach}, between(1, 20), lambda i: range(i - reach, i + reach + 1)


def strided() -> Pattern:
    """The last l keys, and every l-th before."""
    stride = between(1, 6)
    return (
        {"pattern": "strided", "stride": stride},
        between(1, 20),
        lambda i: {*range(max(0, i - stride), i + 1), *(j for j in range(i + 1) if (i - j) % stride == 0)},
    )


def fixed() -> Pattern:
    """One's own block of l up to oneself, and the last key of every block before."""
    stride = between(1, 6)
    return (
        {"pattern": "fixed", "stride": stride},
        between(1, 20),
        lambda i: {*range(i - i % stride, i + 1), *range(stride - 1, i + 1, stride)},
    )


def bigbird() -> Pattern:
    """A window, the first tokens for all and all for them, and keys drawn by a hash."""
    tokens, reach, first, random, seed = between(1, 20), between(0, 3), between(0, 3), between(0, 3), between(0, 99)

    def keys_of(i: int) -> Iterable[int]:
        drawn = [_mixed(i + _mixed(number + 7919 * seed)) % tokens for number in range(random)]
        return range(tokens) if i < first else {*range(first), *range(i - reach, i + reach + 1), *drawn}

    given = {"window": reach, "globals": first, "random": random, "keys": tokens, "seed": seed}
    return given, tokens, keys_of


def _mixed(number: int) -> int:
    """The hash that stands for chance, in Python's numbers."""
    for _ in range(2):
        number = ((number ^ number >> 16) * 0x45D9F3B) % 2**32
    return number ^ number >> 16


def neighborhood() -> Pattern:
    """The window around a cell of a map, moved inwards at the border."""
    axes = between(1, 3)
    size = [between(1, (20, 6, 4)[axes - 1]) for _ in range(axes)]
    kernel = [2 * between(0, (side - 1) // 2) + 1 for side in size]
    cells = list(product(*map(range, size)))

    def keys_of(i: int) -> Iterable[int]:
        sides = zip(cells[i], kernel, size, strict=True)
        starts = [min(max(place - r // 2, 0), n - r) for place, r, n in sides]
        return [cells.index(cell) for cell in product(*(range(s, s + r) for s, r in zip(starts, kernel, strict=True)))]

    return {"size": size, "kernel_size": kernel}, len(cells), keys_of

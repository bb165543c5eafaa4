"""What attention keeps of the tokens before: their keys and values, so that each is computed once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from convnn import checks
from convnn.masks import Entry, Lookup, Mask, Rule
from convnn.relative import RelativeBias


@dataclass(frozen=True, eq=False)
class Cache:
    """Keys and values of the tokens so far, in buffers that are made once, by the first tokens.

    A step writes into the buffers and returns a record with another length. An earlier record can be gone back to:
    what was written after it is written over. For two ways on from one place, :meth:`copy` it.

    Args:
        room: for how many tokens there is place.
        length: how many there are.

    Shape:
        key ``(..., H, room, E)``, value ``(..., H, room, C)``; there are more rows than that where k asks for them.

    Example:
        >>> from convnn import ConvNNAttention
        >>> layer, x = ConvNNAttention(32, 4, k=9).eval(), torch.randn(2, 12, 32)
        >>> prompt, cache = layer.step(x[:, :5], Cache(12))
        >>> rest, cache = layer.step(x[:, 5:], cache)
        >>> torch.allclose(torch.cat([prompt, rest], 1), layer(x, is_causal=True), atol=1e-5)
        True
    """

    room: int
    length: int = 0
    key: Tensor | None = None
    value: Tensor | None = None

    def __post_init__(self) -> None:
        checks.whole("room", self.room, 1)

    def copy(self) -> Cache:
        """The same tokens, in buffers of their own."""
        key, value = (None if each is None else each.clone() for each in (self.key, self.value))
        return replace(self, key=key, value=value)

    def extended(self, key: Tensor, value: Tensor, least: int = 1) -> Cache:
        """Write the next tokens ``(..., H, n, E)`` and ``(..., H, n, C)`` behind those before.

        Args:
            least: how many rows the buffers must have.
        """
        stop = self.length + key.shape[-2]
        if stop > self.room:
            came = f"{self.length} and {key.shape[-2]} more"
            raise ValueError(f"the cache has room for {self.room} tokens, got {came}")
        held = [
            _written(buffer, rows, self.length, max(self.room, least))
            for buffer, rows in ((self.key, key), (self.value, value))
        ]
        return Cache(self.room, stop, *held)


def _written(buffer: Tensor | None, rows: Tensor, start: int, size: int) -> Tensor:
    if buffer is None:
        # Zeros: rows without a token yet are looked at, and not chosen.
        buffer = rows.new_zeros(*rows.shape[:-2], size, rows.shape[-1])
    expected = (*buffer.shape[:-2], rows.shape[-2], buffer.shape[-1])
    if rows.shape != expected or buffer.shape[-2] < size:
        came = f"{tuple(rows.shape)} for a buffer of {tuple(buffer.shape)}"
        raise ValueError(f"the next tokens must be like those in the cache, got {came}")
    buffer[..., start : start + rows.shape[-2], :] = rows
    return buffer


def following(mask: Mask, start: int, stop: int, keys: int) -> Any:
    """A mask of whole sequences, for the queries from ``start`` up to ``stop`` and the first ``keys`` keys."""
    if isinstance(mask, RelativeBias):
        if len(mask.size) != 1:
            raise ValueError(f"a sequence that grows needs a bias of one side, got one of {mask.size}")
        return mask.on((keys - mask.class_tokens,), torch.arange(start, stop, device=mask.table.device))
    if isinstance(mask, Tensor):
        whole = mask if mask.ndim > 1 else mask.expand(1, *mask.shape or (1,))
        rows = whole if whole.shape[-2] == 1 else whole[..., start:stop, :]
        return rows if whole.shape[-1] == 1 else rows[..., :keys]
    sizes = mask.sizes if isinstance(mask, (Lookup, Rule)) else None
    if sizes is not None:
        raise ValueError(f"a mask for {sizes} queries and keys does not fit a sequence that grows")
    if start == 0:
        return mask
    moved = partial(_from, entry=mask, start=start)
    return Rule(moved) if isinstance(mask, Rule) else moved


def _from(i: Tensor, j: Tensor, *, entry: Entry, start: int) -> Tensor:
    return entry(i + start, j)

"""Where the tokens of an attention layer are: in a sequence, or wherever they are said to be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from convnn.descriptor import COORDINATES, Coordinates, Descriptor, pixels
from convnn.masks import Lookup
from convnn.relative import RelativeBias


def require(position: Any, coords: Tensor | None, context_coords: Tensor | None, has_context: bool) -> None:
    """Require coordinates of all tokens, or of none, and a descriptor that makes use of them."""
    if coords is None and context_coords is None:
        return
    if position is None or isinstance(position, RelativeBias):
        raise ValueError(f"coordinates need a descriptor as position to compare them, got {position}")
    if coords is None or (context_coords is not None) != has_context:
        raise ValueError("coordinates must be given for the tokens, and for those of a context if there is one")


def made_by(position: Any) -> Coordinates:
    """What makes the coordinates a descriptor is meant for, of tokens that are a sequence."""
    return getattr(position, "coordinates", COORDINATES["-1..1"])


def counted(position: Any, start: int, stop: int, device: torch.device) -> Tensor:
    """The coordinates of a part of a sequence whose end nobody knows yet, ``(n, 1)``."""
    if made_by(position) is not pixels:
        came = getattr(position, "__name__", type(position).__name__)
        needed = "positions in a sequence that grows must be counted in pixels, as for rotary and sinusoidal"
        raise ValueError(f"{needed}, got {came}, whose coordinates depend on how many tokens there are")
    return pixels((stop,), device=device)[start:]


def biased(bias: RelativeBias, tokens: int, has_context: bool) -> RelativeBias | Lookup:
    """A bias for so many tokens: a sequence may have any length, a map has the size it was made for."""
    if len(bias.size) > 1 or has_context or tokens <= bias.class_tokens:
        return bias
    return bias.on((tokens - bias.class_tokens,))


def described(position: Descriptor, tokens: Tensor, coords: Tensor | None) -> Tensor:
    """What is compared of the tokens ``(..., H, N, d)`` of every head; the heads share their coordinates."""
    if coords is None:
        coords = made_by(position)(tokens.shape[-2:-1], device=tokens.device)
    elif coords.ndim > 2 and coords.shape[-2] == tokens.shape[-2]:
        coords = coords[..., None, :, :]
    return position(tokens, coords)

"""Where the tokens of an attention layer are: in a sequence, or wherever they are said to be."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from convnn.descriptor import COORDINATES, Coordinates, Descriptor
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


def described(position: Descriptor, tokens: Tensor, coords: Tensor | None) -> Tensor:
    """What is compared of the tokens ``(..., H, N, d)`` of every head; the heads share their coordinates."""
    if coords is None:
        coords = made_by(position)(tokens.shape[-2:-1], device=tokens.device)
    elif coords.ndim > 2 and coords.shape[-2] == tokens.shape[-2]:
        coords = coords[..., None, :, :]
    return position(tokens, coords)

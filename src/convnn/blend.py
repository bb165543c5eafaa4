"""Between space and features: a similarity that is a share of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from convnn import checks
from convnn.descriptor import Coordinates, pixels, placed
from convnn.names import resolve
from convnn.neighbors import wide
from convnn.similarity import SIMILARITIES, Similarity


@dataclass(frozen=True)
class cells:  # noqa: N801 - used as the function it is
    """The places of tokens that are the cells of a map, row by row; class tokens come first and stand in its middle.

    Example:
        >>> cells((3, 5), class_tokens=1)((16,))[:3]
        tensor([[1., 2.],
                [0., 0.],
                [0., 1.]])
    """

    size: tuple[int, ...]
    class_tokens: int = 0

    def __call__(self, size: Sequence[int], *, device: torch.device | str | None = None) -> Tensor:
        """Make the coordinates of so many tokens."""
        if prod(size) != prod(self.size) + self.class_tokens:
            known = f"{prod(self.size)} cells and {self.class_tokens} class tokens"
            raise ValueError(f"there must be a place for every token, got {prod(size)} tokens for {known}")
        places = pixels(self.size, device=device).flatten(0, -2)
        return torch.cat([places.mean(0, keepdim=True).expand(self.class_tokens, -1), places])


class Blend(nn.Module):
    r""":math:`(1 - b) \, s_{\text{space}} + b \, s_{\text{features}}`, blended score by score.

    At b = 0 the neighbours are those nearest in space, in pixels and Chebyshev distance exactly a convolution's; at
    b = 1 those most alike. It compares what ``descriptor`` makes of tokens and coordinates: the D coordinates, then the
    features.

    A learned share moves by the gradient of its scores, so it needs a weighting that depends on scores, or a selection
    with a gradient; it is a number in [0, 1] whatever an optimiser does to ``raw``.

    Args:
        share: b, or where it starts.
        axes: D, the number of coordinates.
        space: the similarity of coordinates.
        features: the similarity of features.
        learned: whether the share is a parameter.
        heads: how many shares are learned, one for each head: tokens ``(..., heads, N, C)``; None for one.
        coordinates: where an attention's tokens stand, from their number; along a line, unless told.

    Example:
        >>> from convnn.descriptor import pixels
        >>> from convnn.functional import nearest
        >>> blend = Blend(0.0)
        >>> x = blend.descriptor(torch.randn(5 * 7, 16), pixels((5, 7)))
        >>> nearest(x[8:9], x, k=9, similarity=blend, order="key").index
        tensor([[ 0,  1,  2,  7,  8,  9, 14, 15, 16]])
    """

    def __init__(
        self,
        share: float,
        *,
        axes: int = 2,
        space: Similarity | str = "chebyshev",
        features: Similarity | str = "cosine",
        learned: bool = False,
        heads: int | None = None,
        coordinates: Coordinates = pixels,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= share <= 1:
            raise ValueError(f"share must be from 0, space only, to 1, features only, got {share}")
        checks.whole("axes", axes, 1)
        if heads is not None:
            checks.whole("heads", heads, 1)
            if not learned:
                raise ValueError("a share for every head is a learned one: say learned=True")
        self.axes, self.learns, self.start, self.heads = axes, learned, float(share), heads
        self.coordinates = coordinates
        self.space = resolve("similarity", space, SIMILARITIES)
        self.features = resolve("similarity", features, SIMILARITIES)
        # A fixed share is a choice, not something learned: a convolution's weights load beside it.
        shape = () if heads is None else (heads, 1, 1)
        self.raw = nn.Parameter(torch.empty(shape, device=device)) if learned else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Go back to where it started."""
        if self.raw is not None:
            nn.init.constant_(self.raw, self.start)

    @property
    def share(self) -> Tensor | float:
        """b, as it is now; a fixed one can be set by ``start``."""
        if self.raw is None:
            return self.start
        # Beyond an end the value stays there and the gradient still passes, so that it can come back.
        return self.raw.detach().clamp(0, 1) + (self.raw - self.raw.detach())

    @property
    def shares(self) -> list[float]:
        """b as numbers: one, or one for each head."""
        share = self.share
        return share.detach().flatten().tolist() if isinstance(share, Tensor) else [share]

    @property
    def needs_scores(self) -> str | None:
        """Why weights must depend on scores, or None if they need not."""
        inner = (getattr(part, "needs_scores", None) for part in (self.space, self.features))
        return "a learned share" if self.learns else next(filter(None, inner), None)

    def descriptor(self, tokens: Tensor, coords: Tensor) -> Tensor:
        """The channels :math:`[p, X]`, in float32 at least: ``(..., N, C)`` gives ``(..., N, D + C)``.

        With a share for every head, it comes first: strategies see blocks of heads, and queries know their own.
        """
        places = placed(tokens, coords, self.axes)
        tokens = wide(tokens)
        parts = [places.to(tokens.dtype), tokens]
        if self.heads is not None:
            if tokens.ndim < 3 or tokens.shape[-3] != self.heads:
                raise ValueError(f"tokens must have shape (..., {self.heads}, N, C), got {tuple(tokens.shape)}")
            parts.insert(0, torch.as_tensor(self.share).to(tokens.dtype))
        return torch.cat([part.expand(*tokens.shape[:-1], -1) for part in parts], -1)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:  # noqa: D102
        first = 0 if self.heads is None else 1
        if query.shape[-1] <= self.axes + first:
            raise ValueError(f"a blend compares {self.axes} coordinates and features, got {query.shape[-1]} channels")
        share = self.share.to(query.dtype) if isinstance(self.share, Tensor) else self.share
        share = share if self.heads is None else query[..., :1]
        # Of a fixed share of nothing, nothing is seen: 0 times infinity is no number.
        parts = [
            part * similarity(query[..., channels], key[..., channels])
            for part, similarity, channels in (
                (1 - share, self.space, slice(first, first + self.axes)),
                (share, self.features, slice(first + self.axes, None)),
            )
            if isinstance(part, Tensor) or part != 0
        ]
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    def extra_repr(self) -> str:  # noqa: D102
        return f"{self.start}, axes={self.axes}, learned={self.learns}"


@dataclass(frozen=True, eq=False)
class Placed:
    """A blend's descriptor as an attention takes one, with the coordinates it is meant for."""

    blend: Blend

    @property
    def coordinates(self) -> Coordinates:
        """Where tokens stand, from their number."""
        return self.blend.coordinates

    def __call__(self, tokens: Tensor, coords: Tensor) -> Tensor:
        """Make what is compared."""
        return self.blend.descriptor(tokens, coords)


def instead(blend: Blend, similarity: Any, position: Any) -> tuple[Blend, Placed]:
    """What stands in an attention where a similarity and a position would: a blend is both."""
    if similarity != "scaled_dot" or position is not None:
        raise ValueError("a blend has places and a similarity of features of its own: give it as Blend(features=...)")
    return blend, Placed(blend)

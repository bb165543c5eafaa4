"""Between space and features: a similarity that is a share of each."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from convnn import checks
from convnn.descriptor import placed
from convnn.names import resolve
from convnn.neighbors import wide
from convnn.similarity import SIMILARITIES, Similarity


class Blend(nn.Module):
    r""":math:`(1 - b) \, s_{\text{space}} + b \, s_{\text{features}}`, blended score by score.

    At b = 0 the neighbours are those nearest in space, in pixels and Chebyshev distance exactly a convolution's; at
    b = 1 those most alike. It compares what ``descriptor`` makes of tokens and coordinates: the D coordinates, then the
    features.

    A learned share moves by the gradient of its scores, so it needs a weighting that depends on scores; it is a number
    in [0, 1] whatever an optimiser does to ``raw``.

    Args:
        share: b, or where it starts.
        axes: D, the number of coordinates.
        space: the similarity of coordinates.
        features: the similarity of features.
        learned: whether the share is a parameter.

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
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= share <= 1:
            raise ValueError(f"share must be from 0, space only, to 1, features only, got {share}")
        checks.whole("axes", axes, 1)
        self.axes, self.learns, self.start = axes, learned, float(share)
        self.space = resolve("similarity", space, SIMILARITIES)
        self.features = resolve("similarity", features, SIMILARITIES)
        # A fixed share is a choice, not something learned: a convolution's weights load beside it.
        self.raw = nn.Parameter(torch.empty((), device=device)) if learned else None
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
    def needs_scores(self) -> str | None:
        """Why weights must depend on scores, or None if they need not."""
        inner = (getattr(part, "needs_scores", None) for part in (self.space, self.features))
        return "a learned share" if self.learns else next(filter(None, inner), None)

    def descriptor(self, tokens: Tensor, coords: Tensor) -> Tensor:
        """The channels :math:`[p, X]`, in float32 at least: ``(..., N, C)`` gives ``(..., N, D + C)``."""
        places = placed(tokens, coords, self.axes)
        tokens = wide(tokens)
        return torch.cat([places.to(tokens.dtype).expand(*tokens.shape[:-1], -1), tokens], -1)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:  # noqa: D102
        if query.shape[-1] <= self.axes:
            raise ValueError(f"a blend compares {self.axes} coordinates and features, got {query.shape[-1]} channels")
        share = self.share.to(query.dtype) if isinstance(self.share, Tensor) else self.share
        # Of a fixed share of nothing, nothing is seen: 0 times infinity is no number.
        parts = [
            part * similarity(query[..., channels], key[..., channels])
            for part, similarity, channels in (
                (1 - share, self.space, slice(self.axes)),
                (share, self.features, slice(self.axes, None)),
            )
            if isinstance(part, Tensor) or part != 0
        ]
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    def extra_repr(self) -> str:  # noqa: D102
        return f"{self.start}, axes={self.axes}, learned={self.learns}"

"""What a backend is: a record of functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from convnn.cost import Held
from convnn.neighbors import Neighbors
from convnn.search import Search
from convnn.weighting import Weigh


@dataclass(frozen=True, eq=False)
class Backend:
    """One way to run the operator.

    Args:
        select: finds the neighbours: ``(search) -> Neighbors``.
        aggregate: combines them: ``(value, index, weights, kernel) -> (..., N, O)``.
        declines: says why it will not run these inputs, or None: ``(search, value, kernel) -> str | None``;
            one half alone comes without the search or without the value.
        fused: both halves at once, keeping only what its backward needs: ``(search, value, kernel, weigh)``.
        about: what it is for, in a few words.
        waits: like ``declines``, but heeded by ``"auto"`` only: why it should be asked for by name.
        relaxed: like ``fused``, for a search with a selection that is not hard; None where there is no such way.
        held: the most bytes it holds beside the inputs, forward and in training, from the sizes of a problem.
    """

    select: Callable[[Search], Neighbors]
    aggregate: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    declines: Callable[[Search | None, Tensor | None, Tensor | None], str | None]
    fused: Callable[[Search, Tensor, Tensor | None, Weigh], Tensor] | None = None
    about: str = ""
    waits: Callable[[Search | None, Tensor | None, Tensor | None], str | None] | None = None
    held: Held | None = None
    relaxed: Callable[[Search, Tensor, Tensor | None, Weigh], Tensor] | None = None

    def run(self, search: Search, value: Tensor, kernel: Tensor | None, weigh: Weigh) -> Tensor:
        """Run the whole operator."""
        if search.selection is not None and self.relaxed is not None:
            return self.relaxed(search, value, kernel, weigh)
        if self.fused is not None:
            return self.fused(search, value, kernel, weigh)
        neighbors = self.select(search)
        return self.aggregate(value, neighbors.index, weigh(neighbors.scores, neighbors.filled), kernel)

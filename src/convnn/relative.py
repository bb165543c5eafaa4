"""A learned number for every offset: the relative positional bias."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn

from convnn import checks
from convnn.masks import Lookup


class RelativeBias(nn.Module):
    r""":math:`S_{ij} + B[\Delta_{ij}]`: a learned number for every offset from a query's cell to a key's cell.

    The table starts at 0, where it changes nothing. On another map than it was made for (see :meth:`on`), an offset is
    still counted in cells; one beyond the table takes the number at its edge.

    Args:
        size: the sides of the map, row-major, whose cells the tokens are.
        heads: how many tables there are, one for each entry of the last leading dimension; None for one for all.
        class_tokens: how many tokens without a place come before the cells. They share three numbers: for a class
            token looking at a cell, a cell looking at a class token, and class tokens looking at each other.

    Shape:
        table ``(*sides)`` or ``(heads, *sides)`` with a side of 2n - 1 for n cells; class_table ``(3,)`` or
        ``(heads, 3)``.

    Example:
        >>> bias = RelativeBias((4, 6), heads=2)
        >>> bias.table.shape
        torch.Size([2, 7, 11])
        >>> from convnn.functional import convnn
        >>> x = torch.randn(3, 2, 24, 5)
        >>> torch.equal(convnn(x, x, x, k=7, mask=bias), convnn(x, x, x, k=7))
        True
    """

    def __init__(
        self,
        size: Sequence[int],
        *,
        heads: int | None = None,
        class_tokens: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _sides(size)
        checks.whole("class_tokens", class_tokens, 0)
        checks.whole("heads", 1 if heads is None else heads, 1)
        self.size, self.class_tokens = tuple(size), class_tokens
        lead = () if heads is None else (heads,)
        sides = [2 * side - 1 for side in size]
        self.table = nn.Parameter(torch.empty(*lead, *sides, device=device, dtype=dtype))
        classes = torch.empty(*lead, 3, device=device, dtype=dtype) if class_tokens else None
        self.class_table = None if classes is None else nn.Parameter(classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start at 0."""
        for table in self.parameters():
            nn.init.zeros_(table)

    def on(self, size: Sequence[int], queries: Tensor | None = None) -> Lookup:
        """Make the mask for keys that are the cells of a map of this size.

        Args:
            queries: the number of each query's token among the keys, ``(N,)``; None where queries and keys are the same
                tokens.
        """
        if len(size) != len(self.size):
            raise ValueError(f"a bias for maps of {len(self.size)} sides was given one of {tuple(size)}")
        _sides(size)
        tokens = prod(size) + self.class_tokens
        if queries is not None:
            checks.places("queries", queries, "(N,)", tokens, every=True)
        table = self.table.flatten(-len(self.size))
        table = table if self.class_table is None else torch.cat([table, self.class_table], -1)

        def place(i: Tensor, j: Tensor) -> Tensor:
            return self._place(i if queries is None else queries[i], j, tuple(size))

        return Lookup(place, table[..., None, :], (tokens if queries is None else queries.shape[0], tokens))

    def forward(self, i: Tensor, j: Tensor) -> Tensor:
        """The numbers of tokens i looking at tokens j."""
        return self.on(self.size)(i, j)

    def _place(self, i: Tensor, j: Tensor, size: tuple[int, ...]) -> Tensor:
        here, there = i - self.class_tokens, j - self.class_tokens
        place, length = torch.zeros_like(i + j), 1
        for side, own in zip(reversed(size), reversed(self.size), strict=True):
            offset = (there % side - here % side).clamp(1 - own, own - 1) + own - 1
            place, length = place + length * offset, length * (2 * own - 1)
            here, there = here // side, there // side
        if not self.class_tokens:
            return place
        looking, looked_at = (i < self.class_tokens).long(), (j < self.class_tokens).long()
        return torch.where((looking + looked_at) > 0, length + looking + 2 * looked_at - 1, place)


def _sides(size: Sequence[int]) -> None:
    if not size:
        raise ValueError("a map must have at least one side, got none")
    for side in size:
        checks.whole("a side of the map", side, 1)

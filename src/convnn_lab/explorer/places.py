"""Where on a picture the queries and keys of a layer lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Map:
    """Where on the picture queries and keys lie.

    Keys are ``before`` class tokens, then the cells of a map, padding included, row by row; queries are as many class
    tokens, then places on that map, row by row.

    Args:
        cells: rows and columns of the keys.
        inner: the part of them the picture lies under: first row, first column, rows, columns.
        rows, columns: where the queries are, in cells; halves where a window has an even side.
        own_rows, own_columns: the cell in the place of a query.
        kernel, dilation: of the layer's own window, where it has one.
    """

    cells: tuple[int, int]
    inner: tuple[int, int, int, int]
    rows: tuple[float, ...]
    columns: tuple[float, ...]
    own_rows: tuple[int, ...]
    own_columns: tuple[int, ...]
    before: int = 0
    kernel: tuple[int, int] | None = None
    dilation: tuple[int, int] = (1, 1)

    @classmethod
    def whole(cls, rows: int, columns: int, before: int = 0) -> Map:
        """Every cell of a map asks and is asked."""
        down, across = tuple(range(rows)), tuple(range(columns))
        return cls((rows, columns), (0, 0, rows, columns), down, across, down, across, before)

    @property
    def keys(self) -> int:
        """M."""
        return self.before + self.cells[0] * self.cells[1]

    @property
    def queries(self) -> int:
        """N."""
        return self.before + len(self.rows) * len(self.columns)

    def centres(self) -> Tensor:
        """The place of every query that has one, ``(N - before, 2)``."""
        return _pairs(self.rows, self.columns)

    def places(self) -> Tensor:
        """The place of every cell, ``(M - before, 2)``."""
        return _pairs(range(self.cells[0]), range(self.cells[1]))

    def own_keys(self) -> Tensor:
        """The key in the place of each query, ``(N,)``."""
        rows, columns = _pairs(self.own_rows, self.own_columns).long().unbind(-1)
        return torch.cat([torch.arange(self.before), self.before + rows * self.cells[1] + columns])


def _pairs(rows: Sequence[float], columns: Sequence[float]) -> Tensor:
    axes = [torch.tensor(list(axis), dtype=torch.float64) for axis in (rows, columns)]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, 1)

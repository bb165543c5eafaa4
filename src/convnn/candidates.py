"""Among whom does a query search? Candidates narrow M keys down to r of them.

Candidates are an index ``(..., r)`` into the keys, or something called as ``candidates(lead, cells, device)`` that
returns such an index, or None where every key is a candidate. With r candidates a search costs N times r scores.
"""

from __future__ import annotations

from math import prod
from typing import Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from convnn import checks
from convnn.hashing import drawn
from convnn.neighbors import ranked

Per: TypeAlias = Literal["batch", "sample", "head"]
Placement: TypeAlias = Literal["linspace", "stride"]


class Cells(NamedTuple):
    """The keys as cells of a map, in row-major order.

    Args:
        size: the sides of the map, padding included; a sequence of M keys is ``(M,)``.
        padding: for every side, how many cells at its start and at its end are padding; ``()`` means none.
    """

    size: tuple[int, ...]
    padding: tuple[tuple[int, int], ...] = ()

    def inner(self) -> list[tuple[int, int]]:
        """Where the cells that are not padding begin on every side, and how many there are."""
        ends = self.padding or ((0, 0),) * len(self.size)
        return [(start, side - start - stop) for side, (start, stop) in zip(self.size, ends, strict=True)]

    def numbers(self, places: list[Tensor]) -> Tensor:
        """Number the cells at all combinations of ``places`` on the sides, in rising order."""
        index = places[0]
        for side, place in zip(self.size[1:], places[1:], strict=True):
            index = (index[:, None] * side + place).flatten()
        return index


class Candidates(Protocol):
    """Anything called as ``candidates(lead, cells, device)``; a module if training and evaluation differ."""

    def __call__(self, lead: torch.Size, cells: Cells, device: torch.device, /) -> Tensor | None:
        """Choose candidates ``(..., r)`` that broadcast with the leading dimensions, or None for all."""
        ...


class Random(nn.Module):
    """Draw r different keys: new ones at every call in training, always the same in evaluation.

    In training the draw comes from torch's own generator, so that ``torch.manual_seed`` repeats it; in evaluation it is
    a hash of the seed.

    Args:
        count: r; where there are not more keys than that, all are candidates.
        size: the sides of the map of keys, if a layer does not say so; needed where there is padding.
        padding: how many cells at every end of a side are padding, which is not drawn.
        per: one draw for the whole ``"batch"``, one for each ``"sample"`` (the first leading dimension) or one for each
            ``"head"`` (every leading index).
        seed: of the draw in evaluation, which for ``"sample"`` and ``"head"`` also depends on the place in the batch.
        eval: ``"fixed"``, or ``"redraw"`` for new keys at every call in evaluation too.

    Example:
        >>> among = random(3, seed=1).eval()
        >>> first = among(torch.Size(), Cells((10,)), torch.device("cpu"))
        >>> torch.equal(first, among(torch.Size(), Cells((10,)), torch.device("cpu")))
        True
    """

    def __init__(
        self,
        count: int,
        *,
        size: tuple[int, ...] | None = None,
        padding: int | tuple[int, ...] = 0,
        per: Per = "batch",
        seed: int = 0,
        eval: Literal["fixed", "redraw"] = "fixed",  # noqa: A002 - the mode it is for
    ) -> None:
        super().__init__()
        checks.whole("count", count, 1)
        checks.whole("seed", seed, 0)
        checks.one_of("per", per, ("batch", "sample", "head"))
        checks.one_of("eval", eval, ("fixed", "redraw"))
        self.count, self.per, self.seed, self.redraws = count, per, seed, eval == "redraw"
        self.cells = _given(size, padding)

    def extra_repr(self) -> str:  # noqa: D102
        redraw = ", eval='redraw'" if self.redraws else f", seed={self.seed}"
        return f"{self.count}, per={self.per!r}{redraw}"

    def forward(self, lead: torch.Size, cells: Cells, device: torch.device) -> Tensor | None:  # noqa: D102
        cells = _agreed(self.cells, cells)
        inner = cells.inner()
        among = prod([side for _, side in inner])
        places = _all(cells, inner, device)
        if among <= self.count:
            return places
        lead = {"batch": lead[:0], "sample": lead[:1] + (1,) * len(lead[1:]), "head": lead}[self.per]
        if self.training or self.redraws:
            ranks = torch.rand(*lead, among, device=device)
        else:
            ranks = drawn(torch.arange(prod(lead) * among, device=device), self.seed).unflatten(0, (*lead, among))
        # Sorted, so that of equally near candidates the first is the one of smaller number.
        chosen = ranked(ranks)[1][..., : self.count].sort(dim=-1).values
        return chosen if places is None else places[chosen]


random = Random


class Grid:
    r"""Take keys on a regular grid, the same number on every side of the map.

    On a side of n cells, s of them are taken: ``torch.linspace(0, n - 1, s)`` cut to whole numbers, from the first to
    the last, or with ``"stride"`` :math:`\lfloor i n / s \rfloor`. A side with fewer than s cells gives all of them.

    Args:
        count: :math:`r = s^D` for a map of D sides; where there are not more keys than that, all are candidates.
        size: the sides of the map of keys, if a layer does not say so; otherwise they are a sequence.
        padding: how many cells at every end of a side are padding, on which the grid does not stand.
        margin: how many more cells at every end the grid leaves out.

    Example:
        >>> grid(4, size=(3, 8))(torch.Size(), Cells((24,)), torch.device("cpu"))
        tensor([ 0,  7, 16, 23])
    """

    def __init__(
        self,
        count: int,
        *,
        size: tuple[int, ...] | None = None,
        padding: int | tuple[int, ...] = 0,
        margin: int = 0,
        placement: Placement = "linspace",
    ) -> None:
        checks.whole("count", count, 1)
        checks.whole("margin", margin, 0)
        checks.one_of("placement", placement, ("linspace", "stride"))
        self.count, self.margin, self.placement = count, margin, placement
        self.cells = _given(size, padding)

    def __repr__(self) -> str:
        return f"grid({self.count}, margin={self.margin}, placement={self.placement!r})"

    def __call__(self, lead: torch.Size, cells: Cells, device: torch.device) -> Tensor | None:  # noqa: ARG002
        """Choose the candidates, ``(r,)``, or None for all."""
        cells, count, margin = _agreed(self.cells, cells), self.count, self.margin
        axes = len(cells.size)
        steps = round(count ** (1 / axes))
        if steps**axes != count:
            raise ValueError(f"a grid of {axes} axes needs a count that is a whole number to the {axes}, got {count}")
        inner = [(start + margin, side - 2 * margin) for start, side in cells.inner()]
        if any(side < 1 for _, side in inner):
            raise ValueError(f"a margin of {margin} at both ends leaves nothing of a map of {cells.size}")
        if count >= prod([side for _, side in inner]):
            return _all(cells, inner, device)
        return cells.numbers([start + _places(side, steps, self.placement, device) for start, side in inner])


grid = Grid


def _places(side: int, steps: int, placement: Placement, device: torch.device) -> Tensor:
    """Choose ``steps`` cells of a side, or all if there are fewer."""
    if side <= steps:
        return torch.arange(side, device=device)
    if placement == "stride":
        return torch.arange(steps, device=device) * side // steps
    return torch.linspace(0, side - 1, steps, device=device).long()


def _all(cells: Cells, inner: list[tuple[int, int]], device: torch.device) -> Tensor | None:
    """All cells from where the inner ones begin on every side, as many as there are; None for every cell."""
    if prod([side for _, side in inner]) == prod(cells.size):
        return None
    return cells.numbers([torch.arange(start, start + side, device=device) for start, side in inner])


def _given(size: tuple[int, ...] | None, padding: int | tuple[int, ...]) -> Cells | None:
    """The map a user describes; None leaves it to the layer."""
    if size is None:
        if padding != 0:
            raise ValueError(f"padding of a map needs the size of the map, got padding {padding} and no size")
        return None
    if not isinstance(size, (tuple, list)) or not size:
        raise ValueError(f"size must be the sides of a map, got {size!r}")
    for side in size:
        checks.whole("a side of the map", side, 1)
    ends = tuple(padding) if isinstance(padding, (tuple, list)) else (padding,) * len(size)
    for end in ends:
        checks.whole("padding", end, 0)
    if len(ends) != len(size) or any(side <= 2 * end for side, end in zip(size, ends, strict=False)):
        raise ValueError(f"padding must leave cells on every side of a map of {tuple(size)}, got {padding}")
    return Cells(tuple(size), tuple((end, end) for end in ends) if any(ends) else ())


def _agreed(own: Cells | None, cells: Cells) -> Cells:
    if own is None:
        return cells
    if prod(own.size) != prod(cells.size):
        raise ValueError(f"candidates for a map of {own.size} were given {prod(cells.size)} keys")
    if len(cells.size) > 1 and own.size != cells.size:
        raise ValueError(f"candidates for a map of {own.size} were given a map of {cells.size}")
    return own if own.padding else Cells(own.size, cells.padding if len(cells.size) > 1 else ())

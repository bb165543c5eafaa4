"""Patches as tokens: move p cells along every axis into the channels, operate, and move them back."""

from __future__ import annotations

from torch import Tensor, nn

from convnn import checks


def unshuffle(cells: Tensor, patch: int, *, axes: int = 2) -> Tensor:
    """Move every patch of cells into the channels: ``F.pixel_unshuffle`` on any number of axes.

    Shape:
        ``(..., C, *size)`` gives ``(..., C * p^D, *size / p)``.
    """
    size = _sides(cells, patch, axes)
    if any(side % patch for side in size):
        raise ValueError(f"patches of {patch} need sides that are multiples of it, got {tuple(size)}")
    lead = cells.ndim - axes - 1
    for axis in range(axes):
        cells = cells.unflatten(lead + 1 + 2 * axis, (size[axis] // patch, patch))  # (..., C, H / p, p, W / p, p)
    inner = [lead + 2 + 2 * axis for axis in range(axes)]
    cells = cells.permute(*range(lead + 1), *inner, *(axis - 1 for axis in inner))
    return cells.flatten(lead, lead + axes)


def shuffle(cells: Tensor, patch: int, *, axes: int = 2) -> Tensor:
    """Undo :func:`unshuffle`: ``F.pixel_shuffle`` on any number of axes.

    Shape:
        ``(..., C * p^D, *size)`` gives ``(..., C, *size * p)``.
    """
    _sides(cells, patch, axes)
    lead = cells.ndim - axes - 1
    if cells.shape[lead] % patch**axes:
        raise ValueError(f"patches of {patch} need a multiple of {patch**axes} channels, got {cells.shape[lead]}")
    cells = cells.unflatten(lead, (-1, *(patch,) * axes))  # (..., C, p, p, H, W)
    pairs = [place for axis in range(axes) for place in (lead + 1 + axes + axis, lead + 1 + axis)]
    cells = cells.permute(*range(lead + 1), *pairs)  # (..., C, H, p, W, p)
    for axis in range(axes):
        cells = cells.flatten(lead + 1 + axis, lead + 2 + axis)
    return cells


class PatchLevel(nn.Module):
    """A layer on maps, applied to patches as its cells: see :class:`Patches`."""

    def __init__(self, layer: nn.Module, patch: int, *, axes: int = 2) -> None:
        super().__init__()
        self.layer, self.patch, self.axes = layer, patch, axes

    def forward(self, cells: Tensor) -> Tensor:  # noqa: D102
        return shuffle(self.layer(unshuffle(cells, self.patch, axes=self.axes)), self.patch, axes=self.axes)

    def extra_repr(self) -> str:  # noqa: D102
        return f"patch={self.patch}, axes={self.axes}"


class Patches:
    """Let a layer on maps compare patches of p cells along every axis: unshuffle, operate, shuffle back.

    The layer sees :math:`C p^D` channels and must return :math:`C' p^D`. With p = 1 it is the layer itself.

    Example:
        >>> layer = Patches(2)(torch.nn.Conv2d(3 * 4, 5 * 4, 3, padding=1))
        >>> layer(torch.randn(1, 3, 6, 8)).shape
        torch.Size([1, 5, 6, 8])
    """

    def __init__(self, patch: int, *, axes: int = 2) -> None:
        checks.whole("patch", patch, 1)
        checks.whole("axes", axes, 1)
        self.patch, self.axes = patch, axes

    def __call__(self, layer: nn.Module) -> nn.Module:
        """Wrap a layer."""
        return layer if self.patch == 1 else PatchLevel(layer, self.patch, axes=self.axes)


def _sides(cells: Tensor, patch: int, axes: int) -> tuple[int, ...]:
    checks.whole("patch", patch, 1)
    checks.whole("axes", axes, 1)
    if cells.ndim < axes + 1:
        raise ValueError(f"a map of {axes} axes has shape (..., C, *size), got {tuple(cells.shape)}")
    return tuple(cells.shape[-axes:])

"""What is compared? A descriptor makes of tokens and their coordinates what a search compares.

It is called with tokens ``(..., N, C)`` and coordinates ``(N, D)``, ``(*size, D)`` for the N cells of a map, or
``(..., N, D)`` where every sample has its own, and returns ``(..., N, E)``. Coordinates are float32 whatever the tokens
are; beside them, half types are lifted to float32, since not every coordinate beyond 256 is a number of bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn

from convnn import checks
from convnn.neighbors import wide

Coordinates: TypeAlias = Callable[..., Tensor]


class Descriptor(Protocol):
    """Anything called as ``descriptor(tokens, coords)``; a function, or a module if it has something to keep."""

    def __call__(self, tokens: Tensor, coords: Tensor, /) -> Tensor:
        """Make what is compared."""
        ...


def pixels(size: Sequence[int], *, device: torch.device | str | None = None) -> Tensor:
    """Number the cells of a map along every axis: whole numbers, one scale for all axes.

    Shape:
        ``(*size, D)``, row-major.

    Example:
        >>> pixels((2, 3))[1, 2]
        tensor([1., 2.])
    """
    return _grid([torch.arange(_side(side), device=device, dtype=torch.float32) for side in size])


@dataclass(frozen=True)
class between:  # noqa: N801 - used as the function it is
    r""":math:`p = \alpha + (\beta - \alpha) \, i / (n - 1)` along every axis; :math:`\alpha` where n = 1.

    On a map that is not square the axes have different scales, so that nearest cells are not those nearest in pixels.

    Example:
        >>> between(-1, 1)((5,))[:, 0]
        tensor([-1.0000, -0.5000,  0.0000,  0.5000,  1.0000])
    """

    low: float
    high: float

    def __call__(self, size: Sequence[int], *, device: torch.device | str | None = None) -> Tensor:
        """Make the coordinates of a map, ``(*size, D)``."""
        steps = [torch.arange(_side(side), device=device, dtype=torch.float32) / max(side - 1, 1) for side in size]
        return _grid([self.low + (self.high - self.low) * step for step in steps])


def _side(side: int) -> int:
    checks.whole("a side of the map", side, 0)
    return side


def _grid(axes: list[Tensor]) -> Tensor:
    if not axes:
        raise ValueError("a map must have at least one side, got none")
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1)


COORDINATES: dict[str, Coordinates] = {"pixels": pixels, "0..1": between(0, 1), "-1..1": between(-1, 1)}


def features(tokens: Tensor, coords: Tensor) -> Tensor:  # noqa: ARG001
    """The tokens: nearest is most alike, wherever it is."""
    return tokens


def coordinates(tokens: Tensor, coords: Tensor) -> Tensor:
    """The coordinates: nearest is nearest in space, the same for all leading dimensions that share them."""
    return placed(tokens, coords)


def concatenated(tokens: Tensor, coords: Tensor) -> Tensor:
    """The channels :math:`[X, p]`. How much the coordinates count depends on their range."""
    return _beside(tokens, placed(tokens, coords))


@dataclass(frozen=True)
class scaled_concat:  # noqa: N801 - used as the function it is
    r""":math:`[\lambda X / \sigma(X), (1 - \lambda) p]`, with the standard deviation of all numbers of a sample.

    Args:
        share: :math:`\lambda`, from 0 (coordinates only) to 1 (features only).
    """

    share: float

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"share must be from 0, coordinates only, to 1, features only, got {self.share}")

    def __call__(self, tokens: Tensor, coords: Tensor) -> Tensor:
        """Make what is compared."""
        places, tokens = placed(tokens, coords), wide(tokens)
        if tokens.shape[-2] * tokens.shape[-1] > 1:
            spread = tokens.std((-2, -1), keepdim=True)
            # Constant tokens have no spread but that of rounding: they are left as they are.
            rounding = 16 * torch.finfo(tokens.dtype).eps * tokens.detach().abs().amax((-2, -1), keepdim=True)
            tokens = tokens / torch.where(spread <= rounding, 1, spread)
        return _beside(self.share * tokens, (1 - self.share) * places)


class Fourier(nn.Module):
    r""":math:`[X, \sin 2 \pi B p, \cos 2 \pi B p]` with a random Gaussian B that is drawn once and never learned.

    Args:
        axes: D.
        width: how many frequencies, rows of B; they give 2 * width channels.
        sigma: the standard deviation of B; larger tells nearer places apart. Meant for coordinates in [-1, 1].

    Shape:
        frequencies ``(width, D)``.
    """

    frequencies: Tensor

    def __init__(self, axes: int, width: int, *, sigma: float = 1.0, device: torch.device | str | None = None) -> None:
        super().__init__()
        checks.whole("axes", axes, 1)
        checks.whole("width", width, 1)
        if not 0 < sigma < inf:
            raise ValueError(f"sigma must be greater than 0 and finite, got {sigma}")
        self.axes, self.sigma = axes, sigma
        self.register_buffer("frequencies", torch.empty(width, axes, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw other frequencies."""
        nn.init.normal_(self.frequencies, std=self.sigma)

    def encoded(self, coords: Tensor) -> Tensor:
        """The coordinates ``(..., D)`` alone, as ``(..., 2 * width)``."""
        coords = wide(coords) if coords.is_floating_point() else coords.float()
        # Not a matrix product: autocast would round places and frequencies to 8 bits.
        angles = 2 * torch.pi * (coords[..., None, :] * self.frequencies.to(coords.dtype)).sum(-1)
        return torch.cat([angles.sin(), angles.cos()], -1)

    def forward(self, tokens: Tensor, coords: Tensor) -> Tensor:  # noqa: D102
        return _beside(tokens, self.encoded(placed(tokens, coords, self.axes)))


def sinusoidal(tokens: Tensor, coords: Tensor) -> Tensor:
    r""":math:`X + PE(p)`, with :math:`\sin(p / 10000^{2i/c})` and the cosine of it in channels 2i and 2i + 1.

    With several axes, each has its own c = C / D channels. Meant for coordinates in pixels.
    """
    axes, channels = placed(tokens, coords).shape[-1], tokens.shape[-1]
    if channels % axes:
        raise ValueError(f"{axes} axes need a multiple of as many channels, got {channels}")
    encoded = [sinusoids(places, channels // axes) for places in placed(tokens, coords).unbind(-1)]
    return wide(tokens) + torch.cat(encoded, -1)


def sinusoids(places: Tensor, channels: int) -> Tensor:
    r""":math:`\sin(p / 10000^{2i/c})` and :math:`\cos` of it in channels 2i, 2i + 1: ``(...)`` gives ``(..., c)``."""
    pair = torch.arange(channels, device=places.device) // 2
    angles = places[..., None] / 10000 ** (2 * pair / channels)
    even = torch.arange(channels, device=places.device) % 2 == 0
    return torch.where(even, angles.sin(), angles.cos())


def rotary(tokens: Tensor, coords: Tensor) -> Tensor:
    r"""Turn channels i and i + C/2 as a plane by :math:`p / 10000^{2i/C}`: a dot product then depends on offsets alone.

    For one axis, in pixels.
    """
    half = tokens.shape[-1] // 2
    if tokens.shape[-1] % 2 or coords.shape[-1] != 1:
        came = f"{tokens.shape[-1]} channels and {coords.shape[-1]} axes"
        raise ValueError(f"turning planes needs an even number of channels and one axis, got {came}")
    tokens = wide(tokens)
    pace = 10000 ** (-torch.arange(half, device=tokens.device) / half)
    angles = (placed(tokens, coords) * pace).to(tokens.dtype)  # (N, C / 2)
    first, second = tokens[..., :half], tokens[..., half:]
    turned = first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()
    return torch.cat(turned, -1)


class ConditionalEncoding(nn.Module):
    r""":math:`X + \operatorname{DWConv}(X)`, zero-padded, so that a cell knows how near it is to the border.

    It is a descriptor for tokens that are the cells of a map, whose size it reads from the coordinates ``(*size, D)``;
    ``map`` takes a map ``(B, C, *size)`` instead.

    Args:
        channels: C.
        axes: D, from 1 to 3.
        kernel_size: an odd number.
    """

    def __init__(
        self,
        channels: int,
        *,
        axes: int = 2,
        kernel_size: int = 3,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if axes not in (1, 2, 3):
            raise ValueError(f"axes must be 1, 2 or 3, got {axes}")
        checks.whole("kernel_size", kernel_size, 1)
        if kernel_size % 2 == 0:
            raise ValueError(f"kernel_size must be odd, so that a cell is in the middle, got {kernel_size}")
        convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
        self.axes = axes
        self.conv = convolution(
            channels, channels, kernel_size, padding=kernel_size // 2, groups=channels, device=device, dtype=dtype
        )

    def map(self, tokens: Tensor) -> Tensor:
        """Encode a map ``(B, C, *size)``."""
        return tokens + self.conv(tokens)

    def forward(self, tokens: Tensor, coords: Tensor) -> Tensor:  # noqa: D102
        size = coords.shape[:-1]
        if len(size) != self.axes or prod(size) != tokens.shape[-2]:
            came = f"{tokens.shape[-2]} tokens with coordinates of shape {tuple(coords.shape)}"
            raise ValueError(f"the tokens must be the cells of a map of {self.axes} axes, got {came}")
        lead, channels = tokens.shape[:-2], tokens.shape[-1]
        if channels != self.conv.in_channels:
            raise ValueError(f"tokens must have {self.conv.in_channels} channels, got {channels}")
        cells = tokens.mT.reshape(prod(lead), channels, *size)
        return self.map(cells).flatten(2).mT.reshape(tokens.shape)


def placed(tokens: Tensor, coords: Tensor, axes: int | None = None) -> Tensor:
    """The coordinates as ``(N, D)`` or ``(..., N, D)``, one for each token, in float32 at least."""
    if tokens.ndim < 2 or not tokens.is_floating_point():
        came = f"{tuple(tokens.shape)} of {tokens.dtype}"
        raise ValueError(f"tokens must be floating point of shape (..., N, C), got {came}")
    if coords.ndim < 2 or (axes is not None and coords.shape[-1] != axes):
        required = "(*size, D)" if axes is None else f"(*size, {axes})"
        raise ValueError(f"coordinates must have shape {required}, got {tuple(coords.shape)}")
    places = coords.flatten(0, -2)
    if places.shape[0] != tokens.shape[-2]:
        places = _own(tokens, coords)
    return wide(places) if places.is_floating_point() else places.float()


def _own(tokens: Tensor, coords: Tensor) -> Tensor:
    """Require coordinates for the tokens of every sample; samples may share them."""
    if coords.shape[-2] != tokens.shape[-2]:
        came = f"{tokens.shape[-2]} tokens and {prod(coords.shape[:-1])} coordinates"
        raise ValueError(f"there must be coordinates for every token, got {came}")
    lead, theirs = tokens.shape[:-2], coords.shape[:-2]
    missing = len(lead) - len(theirs)
    if missing < 0 or any(side not in (1, whole) for side, whole in zip(theirs, lead[missing:], strict=True)):
        came = f"tokens {tuple(lead)} and coordinates {tuple(theirs)}"
        raise ValueError(f"the leading dimensions of coordinates must broadcast to those of tokens, got {came}")
    return coords


def _beside(tokens: Tensor, places: Tensor) -> Tensor:
    """Put the channels of the places behind those of the tokens."""
    tokens = wide(tokens)
    return torch.cat([tokens, places.to(tokens.dtype).expand(*tokens.shape[:-1], -1)], -1)


# Which coordinates these are meant for, where a layer makes them.
sinusoidal.coordinates = pixels  # type: ignore[attr-defined]
rotary.coordinates = pixels  # type: ignore[attr-defined]
coordinates.coordinates = pixels  # type: ignore[attr-defined]

DESCRIPTORS: dict[str, Descriptor] = {
    "features": features,
    "coordinates": coordinates,
    "concatenated": concatenated,
    "sinusoidal": sinusoidal,
    "rotary": rotary,
}

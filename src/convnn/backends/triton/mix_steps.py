"""Run what mixes channels, forwards: matrix products of rows that are looked up, or laid out for torch's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from convnn.backends.triton.kernels.mix import mix_rows
from convnn.backends.triton.kernels.mix_backward import take_slots
from convnn.backends.triton.mix_sizes import mix_tile, take_tile
from convnn.backends.triton.sizes import ahead, interpreted, of, over, precision, rolled

# So many bytes of rows, one per slot, are laid out at a time, if a single channel of a single entry needs no more.
BUDGET = 2**28


@dataclass(frozen=True, eq=False)
class Mix:
    """Values, the slots that take them, and the kernel that mixes them.

    Args:
        distinct: whether no row names a key twice.

    Shape:
        value ``(B, H, M, C)`` with its channels side by side, index and weights ``(B, H, N, K)`` contiguous, kernel
        ``(O, C/groups, K)``.
    """

    value: Tensor
    index: Tensor
    weights: Tensor | None
    kernel: Tensor
    distinct: bool = False

    @property
    def entries(self) -> int:
        """Batch and heads together."""
        return self.index.shape[0] * self.index.shape[1]

    @property
    def edges(self) -> int:
        """The slots of an entry."""
        return self.index.shape[2] * self.index.shape[3]

    @property
    def groups(self) -> int:
        """How many parts of the channels are mixed apart."""
        return self.value.shape[-1] // self.kernel.shape[1]

    @property
    def outputs(self) -> int:
        """The outputs of a group."""
        return self.kernel.shape[0] // self.groups

    @cached_property
    def taps(self) -> Tensor:
        """The kernel with the channels of a slot side by side, ``(O, K, C/groups)``."""
        return self.kernel.mT.contiguous()

    @property
    def sizes(self) -> dict[str, int]:
        """Of a group, and how many there are."""
        return {"C": self.kernel.shape[1], "G": self.groups}


@dataclass(frozen=True)
class Piece:
    """The entries and, in every group, the channels that are laid out together."""

    first: int
    last: int
    channel: int
    until: int

    @property
    def width(self) -> int:
        """How many channels."""
        return self.until - self.channel


def pieces(mix: Mix, budget: int) -> Iterator[Piece]:
    """Cut entries, and channels if one entry is too much."""
    channels, per_channel = mix.kernel.shape[1], mix.edges * mix.groups * mix.value.element_size()
    width, count = channels, budget // max(1, per_channel * channels)
    if count == 0:
        width = max(1, min(channels, budget // per_channel // 16 * 16))
    # Alike, instead of a small rest.
    step = over(mix.entries, over(mix.entries, max(1, count)))
    for first in range(0, mix.entries, step):
        for channel in range(0, channels, width):
            yield Piece(first, min(first + step, mix.entries), channel, min(channel + width, channels))


def forward(mix: Mix, shift: Tensor | None, output: Tensor) -> None:
    """Fill ``output`` ``(B, H, N, O)``; ``shift`` ``(B, H, N)`` is added to all of a row."""
    if output.numel() == 0:
        return
    rows = output.shape[:-1].numel()
    tile = mix_tile(rows, mix.outputs, mix.groups, mix.kernel.shape[1], mix.value)
    if tile is None:
        _laid_out(mix, output)
        if shift is not None:
            output += shift[..., None].to(output.dtype)
        return
    grid = (over(rows, tile["BM"]) * over(mix.outputs, tile["BN"]), mix.groups)
    # Of a slot that is weighed, all channels are on their way at once; behind an index of 64 bits of fewer slots.
    channels = over(mix.kernel.shape[1], tile["BC"]) * tile["BC"]
    held = ahead(mix.value, tile["num_stages"]) * (tile["BM"] + tile["BN"]) * channels
    mix_rows[grid](
        *(mix.value, mix.index, of(mix.weights, mix.value), mix.taps, of(shift, mix.value), output),
        *(rows, mix.index.shape[2], mix.index.shape[1], *mix.value.stride()[:3]),
        **mix.sizes,
        **tile,
        O=mix.outputs,
        KK=mix.index.shape[3],
        WEIGHTED=mix.weights is not None,
        SHIFTED=shift is not None,
        ROLLED=mix.weights is not None and rolled(mix.value, held),
        PRECISION=precision(mix.value),
        INTERPRETED=interpreted(),
    )


def _laid_out(mix: Mix, output: Tensor) -> None:
    """The same by torch's matrix products, which single precision without rounding and few rows are better off with."""
    into = output.view(mix.entries, -1, mix.groups, mix.outputs)
    for piece in pieces(mix, BUDGET):
        taken, taps = take(mix, piece), taps_of(mix, piece).mT  # (G, rows, K piece), (G, K piece, O)
        here = into[piece.first : piece.last]
        if mix.groups == 1 and piece.width == mix.kernel.shape[1] and output.dtype == torch.float32:
            torch.mm(taken[0], taps[0], out=here.view(-1, mix.outputs))
        else:
            part = product(taken, taps, whole=True).transpose(0, 1).reshape(here.shape)
            here.copy_(part if piece.channel == 0 else here + part)


def product(one: Tensor, other: Tensor, *, whole: bool = False) -> Tensor:
    """Matrix products of groups; ``whole`` gives float32 sums of half types."""
    if whole and one.dtype != torch.float32:
        if not one.is_cuda:
            return one.float() @ other.float()
        return torch.bmm(one, other, out_dtype=torch.float32)
    return torch.mm(one[0], other[0])[None] if one.shape[0] == 1 else torch.bmm(one, other)


def taps_of(mix: Mix, piece: Piece) -> Tensor:
    """The taps of a piece, ``(G, O, K piece)``."""
    return mix.taps[..., piece.channel : piece.until].reshape(mix.groups, mix.outputs, -1)


def take(
    mix: Mix, piece: Piece, spread: Tensor | None = None, pull: Tensor | None = None, *, takes: bool = True
) -> Tensor:
    """The weighted values of all slots, ``(G, rows, K piece)``; and the gradients of weights from that of each slot."""
    edges = (piece.last - piece.first) * mix.edges
    count = mix.groups * edges * piece.width if takes else 0
    taken = mix.value.new_empty(count)
    if takes or pull is not None:
        per, channels, warps = take_tile(mix.groups * piece.width)
        take_slots[(over(edges, per),)](
            *(mix.value, mix.index, of(mix.weights, mix.value), of(spread, taken), taken, of(pull, taken)),
            *(edges, piece.first * mix.edges, mix.edges, mix.index.shape[1], *mix.value.stride()[:3], piece.channel),
            **mix.sizes,
            CN=piece.width,
            BE=per,
            BC=channels,
            WEIGHTED=mix.weights is not None,
            TAKES=takes,
            PULLS=pull is not None,
            ADDS=piece.channel > 0,
            num_warps=warps,
        )
    return taken.view(mix.groups, -1, mix.index.shape[3] * piece.width) if takes else taken

"""The twins of torchvision's own attentions: the shifted windows of Swin, both versions.

Its other networks are made of torch's convolutions and torch's attention, whose twins :mod:`convnn.surgery` has.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    from torchvision.models.swin_transformer import (  # type: ignore[import-untyped]
        ShiftedWindowAttention,
        ShiftedWindowAttentionV2,
    )
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError("convnn.integrations.torchvision needs torchvision: pip install torchvision") from missing

from convnn.integrations.heads import Heads, adopted, noted, options_of
from convnn.layers import shapes
from convnn.surgery import Refused, Twin, register
from convnn.surgery.attention import why_no_attention
from convnn.surgery.carry import built

__all__ = ["WindowConvNN", "WindowConvNNV2"]

# What torchvision adds to a score between cells that are neighbours only because the map was rolled.
APART = -100.0


class WindowConvNN(ShiftedWindowAttention):  # type: ignore[misc] # torchvision has no types
    """Swin's attention inside shifted windows, to all cells of the window or to the k nearest of them.

    It has torchvision's parameters under torchvision's names, and the search as ``convnn``. Made by
    :func:`convnn.convert`.

    Shape:
        ``(B, H, W, C)`` to ``(B, H, W, C)``.
    """

    convnn: Heads

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        height, width = x.shape[1:3]
        size, shift = self.window_size, list(self.shift_size)
        padded = F.pad(x, (0, 0, 0, -width % size[1], 0, -height % size[0]))
        sides = padded.shape[1:3]
        # A window that is the whole map has nothing to be shifted over.
        shift = [0 if window >= side else step for window, side, step in zip(size, sides, shift, strict=True)]
        rolled = torch.roll(padded, (-shift[0], -shift[1]), (1, 2)) if sum(shift) else padded
        masks = [self.get_relative_position_bias()[0]]  # (H, N, N)
        if sum(shift):
            masks.append(_apart(tuple(sides), size, shift, x)[:, None])  # (windows, 1, N, N)
        windows = _split(rolled, size)  # (B, windows, N, C)
        dropout = self.attention_dropout if self.training else 0.0
        output, _ = self.convnn(*self._projected(windows), masks, scale=self._scale(), dropout_p=dropout, own=True)
        output = F.dropout(self.proj(output.transpose(-2, -3).flatten(-2)), self.dropout, self.training)
        output = _joined(output, size, tuple(sides))
        output = torch.roll(output, (shift[0], shift[1]), (1, 2)) if sum(shift) else output
        return output[:, :height, :width].contiguous()

    def _scale(self) -> float | None:
        return None

    def _projected(self, windows: Tensor) -> list[Tensor]:
        """Queries, keys and values of each head, ``(B, windows, heads, N, d)``."""
        parts = self.qkv(windows).chunk(3, -1)
        return [part.unflatten(-1, (self.num_heads, -1)).transpose(-2, -3) for part in parts]


class WindowConvNNV2(WindowConvNN, ShiftedWindowAttentionV2):  # type: ignore[misc] # likewise
    """The second version's: cosines at a learned scale for each head, and a bias computed from the offset.

    Queries and keys are brought to length 1 and queries to the scale, so that their dot product is that cosine.
    """

    def _scale(self) -> float:
        return 1.0

    def _projected(self, windows: Tensor) -> list[Tensor]:
        bias = self.qkv.bias
        if bias is not None:  # keys have none, whatever the parameter holds
            query, key, value = bias.chunk(3)
            bias = torch.cat([query, torch.zeros_like(key), value])
        parts = F.linear(windows, self.qkv.weight, bias).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.num_heads, -1)).transpose(-2, -3) for part in parts)
        scale = self.logit_scale.clamp(max=math.log(100.0)).exp()
        return [F.normalize(query, dim=-1) * scale, F.normalize(key, dim=-1), value]


def _split(cells: Tensor, size: list[int]) -> Tensor:
    """A map ``(B, H, W, ...)`` as windows ``(B, windows, N, ...)``."""
    split = cells.unflatten(1, (-1, size[0])).unflatten(3, (-1, size[1]))
    return split.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def _joined(windows: Tensor, size: list[int], sides: tuple[int, ...]) -> Tensor:
    """Windows ``(B, windows, N, C)`` as the map they are of."""
    rows, columns = (side // window for side, window in zip(sides, size, strict=True))
    split = windows.unflatten(1, (rows, columns)).unflatten(3, (size[0], size[1]))
    return split.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def _apart(sides: tuple[int, ...], size: list[int], shift: list[int], like: Tensor) -> Tensor:
    """What is added between cells of a window that stood apart before the map was rolled, ``(windows, N, N)``."""
    # The cut of an axis, where its two ends meet, lies inside the last window.
    ends = [torch.arange(side, device=like.device) >= side - step for side, step in zip(sides, shift, strict=True)]
    region = _split((2 * ends[0][:, None] + 1 * ends[1])[None, ..., None], size)[0, ..., 0]  # (windows, N)
    differ = region[:, None, :] != region[:, :, None]
    return torch.zeros_like(differ, dtype=like.dtype).masked_fill(differ, APART)


KINDS: dict[Any, Any] = {ShiftedWindowAttention: WindowConvNN, ShiftedWindowAttentionV2: WindowConvNNV2}


def windowed(module: Any, layer: Any) -> Twin:
    """The twin of Swin's attention: the same parameters, bias and windows, all cells or the k nearest."""
    options = options_of(layer)
    for name in ("qkv", "proj"):
        if not shapes.is_plain(getattr(module, name)):
            came = f"its {name} is {type(getattr(module, name)).__name__} or has hooks"
            raise Refused(f"{came}: torchvision's layer reads the weights of a Linear only, its twin would call it")
    second = type(module) is ShiftedWindowAttentionV2
    if second and "similarity" in options:
        raise Refused("its scores are cosines at a learned scale: a rule cannot say another similarity")
    made = adopted(module, KINDS[type(module)])
    weight = module.qkv.weight
    channels = weight.shape[0] // 3 // module.num_heads
    where = {"device": weight.device, "dtype": weight.dtype}
    made.convnn = built(Heads, channels=channels, heads=module.num_heads, **options, **where)
    reason = why_no_attention(made.convnn)
    return Twin(made, reason is None, noted(reason, module.attention_dropout), back)


def back(twin: Any) -> nn.Module:
    """Torchvision's attention with the parameters the twin has now."""
    reason = why_no_attention(twin.convnn)
    if reason:
        raise Refused(reason)
    kind = ShiftedWindowAttentionV2 if isinstance(twin, ShiftedWindowAttentionV2) else ShiftedWindowAttention
    made = adopted(twin, kind)
    del made._modules["convnn"]
    return made


for _kind in KINDS:
    register(_kind, windowed)

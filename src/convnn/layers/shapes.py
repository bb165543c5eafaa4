"""What layers on maps require of their arguments, and what they keep of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from convnn import arguments, checks, watching
from convnn.backends import Backend
from convnn.candidates import Candidates, Cells
from convnn.masks import MASKS, Mask
from convnn.names import resolve
from convnn.neighbors import Neighbors
from convnn.weighting import Weigh


def factory(device: torch.device | str | None, dtype: torch.dtype | None) -> dict[str, Any]:
    """Where and as what parameters are made, as far as it was said."""
    return {name: given for name, given in (("device", device), ("dtype", dtype)) if given is not None}


def is_plain(module: nn.Module) -> bool:
    """Whether a linear layer does nothing but its weights, so that parts of them may stand for it."""
    return type(module) is nn.Linear and not module._forward_hooks and not module._forward_pre_hooks


def each(name: str, number: int | Sequence[int], axes: int, least: int = 1) -> tuple[int, ...]:
    """One number for every axis."""
    numbers = tuple(number) if isinstance(number, (tuple, list)) else (number,) * axes
    if len(numbers) != axes:
        raise ValueError(f"{name} must be a number or {axes} of them, got {number!r}")
    for one in numbers:
        checks.whole(name, one, least)  # type: ignore[arg-type]
    return tuple(int(one) for one in numbers)  # type: ignore[arg-type]


def ends(
    padding: int | Sequence[int] | str, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """How many cells of padding stand before and after, for every axis."""
    if not isinstance(padding, str):
        return tuple((amount, amount) for amount in each("padding", padding, len(kernel), least=0))
    checks.one_of("padding", padding, ("same", "valid"))
    if padding == "valid":
        return ((0, 0),) * len(kernel)
    if any(s != 1 for s in stride):
        raise ValueError(f"padding='same' is for a stride of 1, got {tuple(stride)}")
    totals = [d * (r - 1) for d, r in zip(dilation, kernel, strict=True)]
    return tuple((total // 2, total - total // 2) for total in totals)


def divides(name: str, channels: int, parts: int, of: str) -> None:
    """Require channels that can be split."""
    if channels % parts:
        raise ValueError(f"{name} must be a multiple of {of}, {parts}, got {channels}")


class Kept(nn.Module):
    """Masks a layer was given: tensors go where the layer goes, modules learn with it, rules stay what they are."""

    def __init__(
        self, given: Mask | str | Sequence[Mask | str] | None, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        several = given if isinstance(given, (list, tuple)) else () if given is None else (given,)
        self.count = len(several)
        for number, mask in enumerate(several):
            if isinstance(mask, nn.Parameter):
                setattr(self, f"mask{number}", mask)
            elif isinstance(mask, Tensor):
                self.register_buffer(f"mask{number}", mask.to(device or mask.device), persistent=False)
            else:
                setattr(self, f"mask{number}", resolve("mask", mask, MASKS))

    def all(self) -> list[Any]:
        """The masks."""
        return [getattr(self, f"mask{number}") for number in range(self.count)]


class Given(nn.Module):
    """Candidates that were given as an index, which goes where the layer goes."""

    def __init__(self, index: Tensor) -> None:
        super().__init__()
        self.register_buffer("index", index, persistent=False)

    def forward(self, lead: torch.Size, cells: Cells, device: torch.device) -> Tensor:  # noqa: ARG002, D102
        return self.index  # type: ignore[return-value]


def kept(candidates: Tensor | Candidates | None, device: torch.device | str | None = None) -> Candidates | None:
    """Candidates as a layer keeps them."""
    if isinstance(candidates, Tensor):
        return Given(candidates.to(device or candidates.device))
    if candidates is not None and not callable(candidates):
        raise TypeError(f"candidates must be None, an index or a callable, got {candidates!r}")
    return candidates


def by_head(
    values: Sequence[Tensor], found: Neighbors, kernels: Sequence[Tensor], *, weigh: Weigh, backend: str | Backend
) -> list[Tensor]:
    """Combine each head's values at its own neighbours, ``(..., heads, N, K)``, with its own kernel."""
    heads = zip(values, found.scores.unbind(-3), found.index.unbind(-3), kernels, strict=True)
    outputs = [
        arguments.aggregate(value, Neighbors(scores, index), kernel, weigh=weigh, backend=backend)
        for value, scores, index, kernel in heads
    ]
    if watching.anyone():
        watching.show(values[0].shape[-2], found.index.shape, lambda: found, weigh)
    return outputs


def laid_out_like(given: Tensor, output: Tensor) -> Tensor:
    """Lay the output out in memory as torch's convolutions do: channels last where the input was."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(given.ndim)
    if torch.compiler._is_exporting_flag:
        return output.contiguous()  # which layout it was depends on sizes, and they are to stay open
    if last is not None and not given.is_contiguous() and given.is_contiguous(memory_format=last):
        return output.contiguous(memory_format=last)
    return output.contiguous()


def asked(attn_mask: Any, key_padding_mask: Tensor | None, is_causal: bool) -> list[Any]:
    """The masks a call of attention asks for; padding ``(..., M)`` is the same for all heads and queries."""
    masks = list(attn_mask) if isinstance(attn_mask, (list, tuple)) else [] if attn_mask is None else [attn_mask]
    masks += ["causal"] if is_causal else []
    if key_padding_mask is not None:
        if key_padding_mask.dtype != torch.bool:
            raise ValueError(f"key_padding_mask must be bool, True for padding, got {key_padding_mask.dtype}")
        masks.append(~key_padding_mask[..., None, None, :])
    return masks


def check_subset(subset: str, self_score: str, all_keys: bool) -> None:
    """Require a way to project candidates that gives what the search needs."""
    checks.one_of("subset", subset, ("before", "after"))
    checks.one_of("self_score", self_score, ("true", "one"))
    if subset == "before" and (all_keys or self_score == "true"):
        raise ValueError("subset='before' needs candidates, and self_score='one': other keys are not projected")

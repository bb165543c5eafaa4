"""The learned kernel of an attention layer."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from convnn import arguments, checks, functional
from convnn.layers import shapes
from convnn.neighbors import Neighbors
from convnn.selection import hard, is_hard
from convnn.weighting import Weigh

Kind: TypeAlias = Literal["depthwise", "separable", "standard"]


class Kernel(nn.Module):
    """A weight for every rank: of each channel, or of each pair of channels.

    Depthwise weights start at 1, where they change nothing. The others start as torch's convolutions do, or with
    ``init="preserving"`` where they change nothing either.

    Args:
        channels: d, the channels of one head.
        k: how many ranks there are.
        kind: ``"depthwise"``; ``"separable"``, depthwise and then a linear map of the channels; ``"standard"``.
        heads: how many kernels there are, one for each head; None for one they share.

    Shape:
        weight ``(d, 1, k)``, or ``(d, d, k)`` if standard; ``(heads, ...)`` if heads have their own.
    """

    def __init__(
        self,
        channels: int,
        k: int,
        kind: Kind = "depthwise",
        *,
        heads: int | None = None,
        init: Literal["default", "preserving"] = "default",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.one_of("kernel", kind, ("depthwise", "separable", "standard"))
        checks.one_of("kernel_init", init, ("default", "preserving"))
        checks.whole("k", k, 1)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.kind, self.init = kind, init
        lead = () if heads is None else (heads,)
        per_group = channels if kind == "standard" else 1
        self.weight = nn.Parameter(torch.empty(*lead, channels, per_group, k, **factory))
        self.pointwise = Pointwise(channels, heads, **factory) if kind == "separable" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Go back to where it started."""
        if self.kind == "depthwise" or self.init == "preserving":
            nn.init.ones_(self.weight)
        else:
            bound = 1 / math.sqrt(self.weight.shape[-2] * self.weight.shape[-1])
            nn.init.uniform_(self.weight, -bound, bound)
        if self.pointwise is not None:
            self.pointwise.reset_parameters()
        if self.init == "preserving":
            eye = torch.eye(self.weight.shape[-3], device=self.weight.device, dtype=self.weight.dtype)
            with torch.no_grad():
                if self.kind == "standard":
                    self.weight.copy_(eye[..., None].expand_as(self.weight))
                if self.pointwise is not None:
                    self.pointwise.weight.copy_(eye.expand_as(self.pointwise.weight))

    def taps(self, k: int) -> Tensor:
        """The weights of the first k ranks: with fewer neighbours the others rest, and keep their place."""
        return first_taps(self.weight, k)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Run the operator with this kernel: ``(..., H, N, d)``."""
        if self.weight.ndim == 4:
            if not is_hard(options.pop("selection", hard)):
                raise ValueError("a selection that is not hard needs one kernel for all heads: shared_kernel=True")
            combined = {name: options.pop(name) for name in ("weighting", "dropout_p")}
            found = functional.nearest(query, key, **options)
            return self.combine(value, found, **combined, backend=options["backend"])
        output = functional.convnn(query, key, value, self.taps(options["k"]), **options)
        return output if self.pointwise is None else self.pointwise(output)

    def combine(self, value: Tensor, found: Neighbors, **options: Any) -> Tensor:
        """Combine neighbours that were found already."""
        weight = self.taps(found.index.shape[-1])
        if weight.ndim == 3:
            output = functional.aggregate(value, found, weight, **options)
        else:
            # Neighbours found by what all heads share are found once.
            every = torch.broadcast_shapes(found.index.shape[:-2], (len(weight),))
            found = Neighbors(*(each.expand(*every, -1, -1) for each in found))
            weigh = arguments.weigh(options["weighting"], options.get("dropout_p", 0.0))
            kernels = weight.unbind()
            parts = shapes.by_head(value.unbind(-3), found, kernels, weigh=weigh, backend=options["backend"])
            output = torch.stack(parts, -3)
        return output if self.pointwise is None else self.pointwise(output)

    def extra_repr(self) -> str:  # noqa: D102
        return f"{self.kind}, {tuple(self.weight.shape)}"


def first_taps(weight: Tensor, k: int) -> Tensor:
    """The first k taps of a kernel, its last axis."""
    return weight if weight.shape[-1] == k else weight[..., :k]


class Pointwise(nn.Module):
    """A linear map of the channels of a head, one for all or one for each.

    Shape:
        weight ``(d, d)`` or ``(heads, d, d)``.
    """

    def __init__(self, channels: int, heads: int | None, **factory: Any) -> None:
        super().__init__()
        lead = () if heads is None else (heads,)
        self.weight = nn.Parameter(torch.empty(*lead, channels, channels, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start as torch's 1x1 convolutions do."""
        bound = 1 / math.sqrt(self.weight.shape[-1])
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, tokens: Tensor) -> Tensor:  # noqa: D102
        return tokens @ self.weight.mT


def with_weights(
    kernel: Kernel | None, tokens: tuple[Tensor, Tensor, Tensor], weigh: Weigh, **options: Any
) -> tuple[Tensor, Tensor]:
    """The output of a search of query, key and value, and the weights of all M keys, 0 for who is no neighbour."""
    query, key, value = tokens
    found = functional.nearest(query, key, **options)
    weights = weigh(found.scores, found.filled)
    combine = functional.aggregate if kernel is None else kernel.combine
    output = combine(value, found, weighting=lambda scores, filled: weights, backend=options["backend"])  # noqa: ARG005
    whole = weights.new_zeros(*weights.shape[:-1], key.shape[-2])
    return output, whole.scatter_add(-1, found.index.clamp(min=0), weights).to(output.dtype)

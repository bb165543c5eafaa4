"""Weigh and combine the chosen rows one slot at a time, forward and backward: (..., N, K, C) is never built."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class Combine(torch.autograd.Function):
    r""":math:`y_o = \sum_k \sum_c w_k \, V[I_k, c] \, W_{o,c,k}`, with the sum over k as a loop.

    Shape:
        value ``(..., M, C)``, index and weights ``(..., N, K)``, taps ``(G, O/G, C/G, K)`` or None; all have one
        type and the same leading dimensions. The result is ``(..., N, O)``. Every index is one of a row: an empty slot
        has a row of its own, see :func:`with_nobody`.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, index: Tensor, weights: Tensor, taps: Tensor | None) -> Tensor:  # noqa: D102
        ctx.save_for_backward(value, index, weights, taps)
        channels = value.shape[-1] if taps is None else taps.shape[0] * taps.shape[1]
        total = torch.zeros(*index.shape[:-1], channels, dtype=weights.dtype, device=value.device)
        for slot in range(index.shape[-1]):
            taken = _taken(value, index, slot) * weights[..., slot, None]
            # Not in place: torch.compile in 2.11 then takes the output for a constant and its gradients for 0.
            total = total + (taken if taps is None else _mix(taken, taps[..., slot]))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        value, index, weights, taps = ctx.saved_tensors
        wants_value, _, wants_weights, wants_taps = ctx.needs_input_grad
        # Made from grad: where gradients come in batches, so do these.
        into_value, into_weights = grad.new_zeros(value.shape), grad.new_zeros(weights.shape)
        into_taps = None if taps is None else grad.new_zeros(taps.shape)
        for slot in range(index.shape[-1]):
            weight = weights[..., slot, None]
            back = grad if taps is None else _mix_back(grad, taps[..., slot])  # (..., N, C)
            if wants_value:
                into_value.scatter_add_(-2, index[..., slot, None].expand(back.shape), back * weight)
            if wants_weights or wants_taps:
                taken = _taken(value, index, slot)
                into_weights[..., slot] = (back * taken).sum(-1)
                if into_taps is not None:
                    into_taps[..., slot] = _mix_taps(grad, taken * weight, taps[..., slot])
        return into_value, None, into_weights, into_taps


def with_nobody(value: Tensor) -> Tensor:
    """Add a row of 0 for slots nobody won; ``(..., M, C)`` becomes ``(..., M + 1, C)``."""
    return F.pad(value, (0, 0, 0, 1))


def _taken(value: Tensor, index: Tensor, slot: int) -> Tensor:
    """Gather the rows of one slot, ``(..., N, C)``."""
    return value.gather(-2, index[..., slot, None].expand(*index.shape[:-1], value.shape[-1]))


# One tap (G, O/G, C/G) maps the C channels of a slot to O outputs. These are that map, its transpose, and the gradient
# of the tap. With one channel per group (depthwise) all are products by element; einsum would make tiny matrices of it.


def _mix(taken: Tensor, tap: Tensor) -> Tensor:
    taken = taken.unflatten(-1, (tap.shape[0], tap.shape[2]))  # (..., N, G, C/G)
    mixed = taken * tap[..., 0] if tap.shape[2] == 1 else torch.einsum("...gc,goc->...go", taken, tap)
    return mixed.flatten(-2)


def _mix_back(grad: Tensor, tap: Tensor) -> Tensor:
    grad = grad.unflatten(-1, tap.shape[:2])  # (..., N, G, O/G)
    if tap.shape[2] == 1:
        return (grad * tap[..., 0]).sum(-1)
    return torch.einsum("...go,goc->...gc", grad, tap).flatten(-2)


def _mix_taps(grad: Tensor, taken: Tensor, tap: Tensor) -> Tensor:
    grad = grad.unflatten(-1, tap.shape[:2])  # (..., N, G, O/G)
    taken = taken.unflatten(-1, (tap.shape[0], tap.shape[2]))  # (..., N, G, C/G)
    if tap.shape[2] == 1:
        return (grad * taken).flatten(0, -3).sum(0)[..., None]
    return torch.einsum("...go,...gc->goc", grad, taken)

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
        rows, flat, weights = _rows(value, index), value.flatten(0, -2), weights.flatten(0, -2)
        channels = value.shape[-1] if taps is None else taps.shape[0] * taps.shape[1]
        total = torch.zeros(rows.shape[0], channels, dtype=weights.dtype, device=value.device)
        early = _mixes_early(flat, rows, taps)
        for slot in range(index.shape[-1]):
            tap = None if taps is None else taps[..., slot]
            taken = (_mix(flat, tap) if early else flat).index_select(0, rows[:, slot]) * weights[:, slot, None]
            # Not in place: torch.compile in 2.11 then takes the output for a constant and its gradients for 0.
            total = total + (taken if early else _mix(taken, tap))
        return total.reshape(*index.shape[:-1], channels)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        value, index, weights, taps = ctx.saved_tensors
        wants_value, _, wants_weights, wants_taps = ctx.needs_input_grad
        rows, flat, weight = _rows(value, index), value.flatten(0, -2), weights.flatten(0, -2)
        grad = grad.reshape(rows.shape[0], grad.shape[-1])
        # Made from grad: where gradients come in batches, so do these.
        into_value, into_weights = grad.new_zeros(flat.shape), grad.new_zeros(weight.shape)
        into_taps = None if taps is None else grad.new_zeros(taps.shape)
        early = _mixes_early(flat, rows, taps)
        for slot in range(index.shape[-1]):
            row, tap = rows[:, slot], None if taps is None else taps[..., slot]
            # What is gathered: rows of values, or what the tap makes of them.
            back = grad if early else _mix_back(grad, tap)
            if wants_weights:
                taken = (_mix(flat, tap) if early else flat).index_select(0, row)
                into_weights[:, slot] = (back * taken).sum(-1)
            back = back * weight[:, slot, None]
            if early:
                mixed = grad.new_zeros(flat.shape[0], grad.shape[-1]).index_add_(0, row, back)
                into_value += _mix_back(mixed, tap)
            elif wants_value:
                into_value.index_add_(0, row, back)
            if into_taps is not None and wants_taps:
                pulled, taken = (mixed, flat) if early else (grad * weight[:, slot, None], flat.index_select(0, row))
                into_taps[..., slot] = _mix_taps(pulled, taken, taps[..., slot])
        return into_value.reshape(value.shape), None, into_weights.reshape(weights.shape), into_taps


def with_nobody(value: Tensor) -> Tensor:
    """Add a row of 0 for slots nobody won; ``(..., M, C)`` becomes ``(..., M + 1, C)``."""
    return F.pad(value, (0, 0, 0, 1))


def _rows(value: Tensor, index: Tensor) -> Tensor:
    """Number the rows of all leading entries through, so that whole rows are copied: ``(L * N, K)``."""
    if index.ndim == 2:
        return index
    index = index.flatten(0, -3)  # (L, N, K)
    first = torch.arange(index.shape[0], device=index.device) * value.shape[-2]
    return (index + first[:, None, None]).flatten(0, 1)


def _mixes_early(flat: Tensor, rows: Tensor, taps: Tensor | None) -> bool:
    """Whether to apply a tap to all keys and gather its outputs, because these are fewer than the channels.

    What it makes of the keys is then no larger than the gathered rows would be.
    """
    # Under torch.compile the question would tie the graph to these sizes.
    if taps is None or taps.shape[0] > 1 or torch.compiler.is_compiling():
        return False
    keys, queries, (outputs, channels) = flat.shape[0], rows.shape[0], taps.shape[1:3]
    products, moved = (keys - queries) * channels * outputs, queries * (channels - outputs)
    return keys * outputs <= queries * channels and products <= WORTH * moved


WORTH = 32  # multiply-adds in the time a number is gathered


# One tap (G, O/G, C/G) maps the C channels of a slot to O outputs. These are that map, its transpose, and the gradient
# of the tap. With one channel per group (depthwise) all are products by element; einsum would make tiny matrices of it.


def _mix(taken: Tensor, tap: Tensor | None) -> Tensor:
    if tap is None:
        return taken
    if tap.shape[0] == 1:
        return taken @ tap[0].mT
    taken = taken.unflatten(-1, (tap.shape[0], tap.shape[2]))  # (N, G, C/G)
    mixed = taken * tap[..., 0] if tap.shape[2] == 1 else torch.einsum("ngc,goc->ngo", taken, tap)
    return mixed.flatten(-2)


def _mix_back(grad: Tensor, tap: Tensor | None) -> Tensor:
    if tap is None:
        return grad
    if tap.shape[0] == 1:
        return grad @ tap[0]
    grad = grad.unflatten(-1, tap.shape[:2])  # (N, G, O/G)
    if tap.shape[2] == 1:
        return (grad * tap[..., 0]).sum(-1)
    return torch.einsum("ngo,goc->ngc", grad, tap).flatten(-2)


def _mix_taps(grad: Tensor, taken: Tensor, tap: Tensor) -> Tensor:
    if tap.shape[0] == 1:
        return (grad.transpose(0, 1) @ taken)[None]
    grad = grad.unflatten(-1, tap.shape[:2])  # (N, G, O/G)
    taken = taken.unflatten(-1, (tap.shape[0], tap.shape[2]))  # (N, G, C/G)
    if tap.shape[2] == 1:
        return (grad * taken).sum(0)[..., None]
    return torch.einsum("ngo,ngc->goc", grad, taken)

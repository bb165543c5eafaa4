"""Kernels that mix channels, standard and grouped, as operators of torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from convnn.backends.triton.ops import _on
from convnn.backends.triton.register import operator

# Triton is imported where a kernel runs, not where it is named.


@operator("mix")
def mix(
    value: Tensor,
    index: Tensor,
    weights: Tensor | None,
    kernel: Tensor,
    by_row: Tensor | None,
    by_key: Tensor | None,
    distinct: bool,
) -> Tensor:
    r""":math:`y_{i,o} = \sum_k (a_i + b_{I_{i,k}} + p_{i,k} \sum_c V[I_{i,k}, c] \, W_{o,c,k})`, with p = 1 for None.

    Sums are kept in float32; what float32 is rounded to before it is multiplied is what torch is told about matrix
    products, ``torch.backends.cuda.matmul.fp32_precision``, and not what it is told about convolutions.

    Args:
        distinct: whether no row names a key twice.

    Shape:
        value ``(B, H, M, C)``, index ``(B, H, N, K)`` with -1 in an empty slot, weights the same, kernel
        ``(O, C/groups, K)``, a ``(B, H, N)`` and b ``(B, H, M)`` without gradients, both or none; the result is
        ``(B, H, N, O)``.
    """
    from convnn.backends.triton import mix_steps, row_steps

    output = _mixed(value, index, kernel)
    with _on(value):
        shift = None if by_row is None or by_key is None else row_steps.added(by_row, by_key, index)
        mix_steps.forward(mix_steps.Mix(value, index, weights, kernel), shift, output)
    return output


def _mixed(value: Tensor, index: Tensor, kernel: Tensor) -> Tensor:
    return value.new_empty((*index.shape[:-1], kernel.shape[0]))


@mix.register_fake
def _(value: Tensor, index: Tensor, weights: Any, kernel: Tensor, *_: Any) -> Tensor:
    return _mixed(value, index, kernel)


@operator("mix_backward")
def mix_backward(
    value: Tensor,
    index: Tensor,
    weights: Tensor | None,
    kernel: Tensor,
    gradient: Tensor,
    distinct: bool,
    wants_value: bool,
    wants_weights: bool,
    wants_kernel: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of value, weights and kernel; empty where none is wanted."""
    from convnn.backends.triton import mix_grads, mix_steps

    wanted = (wants_value, wants_weights, wants_kernel)
    into = _gradients(value, index, kernel, wanted)
    named = {name: into[place] for place, name in enumerate(("value", "weights", "kernel")) if wanted[place]}
    with _on(value):
        mix_grads.backward(mix_steps.Mix(value, index, weights, kernel, distinct), gradient, named)
    return into


def _gradients(
    value: Tensor, index: Tensor, kernel: Tensor, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = [shape if wants else (0,) for shape, wants in zip((value.shape, index.shape, kernel.shape), wanted)]  # noqa: B905
    single = torch.float32
    return (
        value.new_empty(shapes[0]),
        value.new_empty(shapes[1], dtype=single),
        value.new_empty(shapes[2], dtype=single),
    )


@mix_backward.register_fake
def _(
    value: Tensor, index: Tensor, weights: Any, kernel: Tensor, gradient: Any, distinct: bool, *wanted: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(value, index, kernel, wanted)  # type: ignore[arg-type]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.distinct = inputs[6]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    value, index, weights, kernel = ctx.saved_tensors
    wanted = [ctx.needs_input_grad[place] for place in (0, 2, 3)]
    if not any(wanted):
        return (None,) * 7
    into = mix_backward(value, index, weights, kernel, gradient, ctx.distinct, *wanted)
    of_value, of_weights, of_kernel = (part if wants else None for part, wants in zip(into, wanted, strict=True))
    return of_value, None, of_weights, None if of_kernel is None else of_kernel.to(kernel.dtype), None, None, None


mix.register_autograd(_backward, _keep)


@operator("directions")
def directions(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows scaled to length 1 in float32, zero vectors left; and for each 0, or NaN where it has one.

    Shape:
        ``(..., N, E)`` to ``(..., N, E)`` and ``(..., N)``; no gradients.
    """
    from convnn.backends.triton import row_steps

    into = _scaled(rows)
    with _on(rows):
        row_steps.unit(rows, *into)
    return into


def _scaled(rows: Tensor) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape, dtype=torch.float32), rows.new_empty(rows.shape[:-1], dtype=torch.float32)


@directions.register_fake
def _(rows: Tensor) -> tuple[Tensor, Tensor]:
    return _scaled(rows)


@operator("levels")
def levels(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows scaled by powers of two to like size, what makes directions of them, and what ``directions`` says is lost.

    Half types stay what they are, which matrix units multiply many times faster.

    Shape:
        ``(..., N, E)`` to ``(..., N, E)``, ``(..., N)`` and ``(..., N)``; no gradients.
    """
    from convnn.backends.triton import row_steps

    into = _levelled(rows)
    with _on(rows):
        row_steps.level(rows, *into)
    return into


def _levelled(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    single = [rows.new_empty(rows.shape[:-1], dtype=torch.float32) for _ in range(2)]
    return rows.new_empty(rows.shape), single[0], single[1]


@levels.register_fake
def _(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _levelled(rows)

"""The kernels for few keys as operators of torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from convnn.backends.triton import shapes
from convnn.backends.triton.modes import SOFTMAX
from convnn.backends.triton.ops import _on as on_device_of
from convnn.backends.triton.register import operator


@operator("attend_few")
def attend_few(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Tensor | None,
    bias: Tensor | None,
    candidates: Tensor | None,
    mask: Tensor | None,
    shift: Tensor | None,
    beta: Tensor | None,
    k: int,
    weight: int,
    scale: float,
    factor: float,
    causal: bool,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the K best of at most 64 keys for every row, weigh and combine them.

    Returns the output, the places of the chosen among the searched keys, some packed into a number, and the logarithm
    of each row's sum of weights.

    Shape:
        query ``(B, H, N, E)``, key ``(B, H, M, E)``, value ``(B, H, M, C)``, kernel ``(C, K)``, bias ``(B, H, M)``,
        candidates ``(B, H, r)``, mask and shift ``(B, H, N, r)``, beta one number; output ``(B, H, N, C)``, places
        ``(B, H, K/some, N)``, sums ``(B, H, N)``.
    """
    from convnn.backends.triton import few_launch

    into = _made(query, value, k)
    if into[0].numel():
        with on_device_of(value):
            few_launch.forward(
                *(query, key, value, kernel),
                {"B": bias, "CAND": candidates, "MASK": mask, "SHIFT": shift, "BETA": beta},
                into,
                (scale, factor),
                {"KK": k, "PER": places_of(k), "WEIGHT": weight, "CAUSAL": causal, "WINDOW": window},
            )
    return into


def places_of(k: int) -> int:
    """How many of k places are packed into one number."""
    return next(count for count in (3, 4, 2, 1) if k % count == 0)


def _made(query: Tensor, value: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    *lead, n, _ = query.shape
    return (
        value.new_empty((*lead, n, value.shape[-1])),
        query.new_empty((*lead, k // places_of(k), n), dtype=torch.int32),
        query.new_empty((*lead, n), dtype=torch.float32),
    )


@attend_few.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, kernel: Any, bias: Any, among: Any, mask: Any, shift: Any, beta: Any,
    k: int, *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _made(query, value, k)


@operator("attend_few_backward")
def attend_few_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Tensor | None,
    candidates: Tensor | None,
    shift: Tensor | None,
    beta: Tensor | None,
    places: Tensor,
    lse: Tensor,
    gradient: Tensor,
    k: int,
    weight: int,
    scale: float,
    factor: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value, kernel, shift and, row by row, beta."""
    from convnn.backends.triton import few_launch

    into = _gradients(query, key, value, kernel, shift, beta, weight)
    if gradient.numel() == 0:
        for tensor in into:
            tensor.zero_()
        return into
    gradient = shapes.reached(gradient)
    with on_device_of(value):
        few_launch.backward(
            *(query, key, value, kernel),
            {"CAND": candidates, "SHIFT": shift, "BETA": beta},
            (places, lse, gradient),
            into,
            (scale, factor),
            {"KK": k, "PER": places_of(k), "WEIGHT": weight},
        )
    return into


def _gradients(
    query: Tensor, key: Tensor, value: Tensor, kernel: Tensor | None, shift: Any, beta: Any, weight: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    scored = weight == SOFTMAX

    def like(there: bool, shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return query.new_empty(shape if there else (0,), dtype=dtype)

    return (
        like(scored, query.shape, query.dtype),
        like(scored, key.shape, key.dtype),
        like(True, value.shape, value.dtype),
        query.new_empty(0) if kernel is None else kernel.new_empty(kernel.shape),
        like(scored and shift is not None, () if shift is None else shift.shape),
        like(scored and beta is not None, query.shape[:-1]),
    )


@attend_few_backward.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, kernel: Any, among: Any, shift: Any, beta: Any, places: Any, lse: Any,
    gradient: Any, k: int, weight: int, *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _gradients(query, key, value, kernel, shift, beta, weight)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value, kernel, _, candidates, _, shift, beta, *numbers = inputs
    ctx.save_for_backward(query, key, value, kernel, candidates, shift, beta, *output[1:])
    ctx.numbers = numbers[:4]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if gradient is None:
        return (None,) * 15
    query, key, value, kernel, candidates, shift, beta, places, lse = ctx.saved_tensors
    into = attend_few_backward(
        *(query, key, value, kernel, candidates, shift, beta, places, lse, gradient), *ctx.numbers
    )
    scored = ctx.numbers[1] == SOFTMAX
    return (
        into[0] if scored else None,
        into[1] if scored else None,
        into[2],
        None if kernel is None else into[3],
        *(None, None, None),
        into[4] if scored and shift is not None else None,
        into[5].sum().to(beta.dtype).reshape(beta.shape) if scored and beta is not None else None,
        *(None,) * 6,
    )


attend_few.register_autograd(_backward, _keep)


def attended(*inputs: Any) -> Tensor:
    """The output of ``attend_few``, with gradients."""
    return attend_few.learned(*inputs)[0]

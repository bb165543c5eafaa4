"""The kernels as operators of torch: shapes for the compiler, gradients for autograd."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from convnn.backends.triton import shapes
from convnn.backends.triton.register import operator

# Triton is imported where a kernel runs, not where it is named.


def single_is_tf32(tensor: Tensor) -> bool:
    """Whether torch lets matrix units round float32."""
    return tensor.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"


def _on(tensor: Tensor) -> AbstractContextManager[Any]:
    """Launch on the device the tensors are on, whichever is the current one."""
    return torch.cuda.device_of(tensor) if tensor.is_cuda else nullcontext()


@operator("select")
def select(
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    candidates: Tensor | None,
    mask: Tensor | None,
    shift: Tensor | None,
    own: Tensor | None,
    k: int,
    row0: int,
    causal: bool,
    window: int,
    difference: bool,
    scales: int,
) -> tuple[Tensor, Tensor]:
    """The numbers of the K best keys of every row, best first; -1 where there is none. And what they were ranked by.

    Args:
        scales: 0 if bias is added to scores; 1 if they are multiplied with it, 2 if a negative one also forbids.

    Shape:
        query ``(B, H, N, E)``, key ``(B, H, M, E)``, bias ``(B, H, M)``, candidates ``(B, H, r)``, mask and shift
        ``(B, H, N, r)``, own ``(B, H, N)``; the results are ``(B, H, N, K)``.
    """
    from convnn.backends.triton import launch

    index, scores = _chosen(query, key, candidates, k)
    with _on(query):
        launch.select(
            *(query, key, bias, candidates, mask, shift, own, index, scores),
            row0=row0,
            causal=causal,
            window=window,
            difference=difference,
            scales=scales,
        )
    return index, scores


def _chosen(query: Tensor, key: Tensor, candidates: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    # Keys may be candidates more than once, and what is found may be the places of candidates.
    numbers = key.shape[-2] if candidates is None else max(key.shape[-2], candidates.shape[-1])
    small = numbers <= torch.iinfo(torch.int16).max
    index = query.new_empty((*query.shape[:-1], k), dtype=torch.int16 if small else torch.int32)
    return index, query.new_empty(index.shape, dtype=torch.float32)


@operator("own_first")
def own_first(own: Tensor, index: Tensor) -> Tensor:
    """Put one's own key, where there is one, before the others, of which the last gives way.

    Shape:
        own ``(B, H, N)``, negative where there is none, index ``(B, H, N, K)``, both contiguous.
    """
    from convnn.backends.triton import row_steps

    into = torch.empty_like(index)
    with _on(index):
        row_steps.with_own(own, index, into)
    return into


@own_first.register_fake
def _(own: Tensor, index: Tensor) -> Tensor:
    return torch.empty_like(index)


@select.register_fake
def _(
    query: Tensor, key: Tensor, bias: Any, candidates: Any, mask: Any, shift: Any, own: Any, k: int, *_: Any
) -> tuple[Tensor, Tensor]:
    return _chosen(query, key, candidates, k)


@operator("combine")
def combine(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Tensor | None,
    index: Tensor,
    shift: Tensor | None,
    weights: Tensor | None,
    beta: Tensor | None,
    seed: Tensor | None,
    own: Tensor | None,
    scores: Tensor | None,
    kind: int,
    weight: int,
    ranked: bool,
    scale: float,
    own_score: float,
    dropout: float,
    atomic: bool,
    distinct: bool,
) -> Tensor:
    """Score the chosen pairs, weigh them, and combine their values.

    Shape:
        query ``(B, H, N, E)``, key ``(B, H, M, E)``, value ``(B, H, M, C)``, kernel ``(C, K)``, index, shift and
        weights ``(B, H, N, K)``, beta and seed one number, own ``(B, H, N)``; scores ``(B, H, N, K)`` if the search
        has computed them.
    """
    from convnn.backends.triton import launch

    output = _combined(query, value)
    if single_is_tf32(query):
        scores = None  # they were rounded; the chosen pairs are scored again
    given = scores if weights is None else weights
    optional = {"shift": shift, "given": given, "beta": beta, "seed": seed, "own": own}
    scored = scores is not None
    choices = {"KIND": kind, "WEIGHT": weight, "SORTED": ranked and scored, "SCORED": scored}
    choices["ROUGH"] = scored and query.dtype != torch.float32
    with _on(value):
        launch.combine_forward(
            *(query, key, value, kernel, index, optional, output), (scale, own_score, dropout), choices
        )
    return output


def _combined(query: Tensor, value: Tensor) -> Tensor:
    return value.new_empty((*query.shape[:-1], value.shape[-1]))


@combine.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return _combined(query, value)


@operator("combine_backward")
def combine_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Tensor | None,
    index: Tensor,
    shift: Tensor | None,
    weights: Tensor | None,
    beta: Tensor | None,
    seed: Tensor | None,
    own: Tensor | None,
    gradient: Tensor,
    kind: int,
    weight: int,
    scale: float,
    own_score: float,
    dropout: float,
    atomic: bool,
    distinct: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value, kernel, slots (shift or weights) and, row by row, beta."""
    from convnn.backends.triton import backward

    into = _gradients(query, key, value, kernel, index, shift, weights, beta, weight)
    optional = {"shift": shift, "given": weights, "beta": beta, "seed": seed, "own": own}
    named = dict(zip(("query", "key", "value", "kernel", "slots", "beta"), into, strict=True))
    gradient = shapes.reached(gradient)
    numbers, choices = (scale, own_score, dropout), {"KIND": kind, "WEIGHT": weight}
    taps = None if kernel is None else kernel.mT.contiguous()  # (K, C)
    step = backward.Step(query, key, value, taps, index, optional, gradient, named, numbers, choices, distinct)
    with _on(value):
        backward.combine_backward(step, atomic=atomic)
    return into


def _gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Tensor | None,
    index: Tensor,
    shift: Tensor | None,
    weights: Tensor | None,
    beta: Tensor | None,
    weight: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    def like(tensor: Tensor | None, shape: Any, dtype: Any = None) -> Tensor:
        return query.new_empty((0,) if tensor is None else shape, dtype=dtype or query.dtype)

    scored = query if weight == 1 else None
    return (
        like(scored, query.shape),
        like(scored, key.shape),
        like(value, value.shape, value.dtype),
        query.new_empty(0) if kernel is None else kernel.new_empty(kernel.shape),
        like(shift if weights is None else weights, index.shape, torch.float32),
        like(beta, query.shape[:-1], torch.float32),
    )


@combine_backward.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Any,
    index: Tensor,
    shift: Any,
    weights: Any,
    beta: Any,
    seed: Any,
    own: Any,
    gradient: Tensor,
    kind: int,
    weight: int,
    *_: Any,
) -> tuple[Tensor, ...]:
    return _gradients(query, key, value, kernel, index, shift, weights, beta, weight)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:10])
    ctx.numbers = inputs[11:]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    inputs = ctx.saved_tensors
    kind, weight, _ranked, *numbers = ctx.numbers
    into = combine_backward(*inputs, gradient, kind, weight, *numbers)
    query, key, value, kernel, slots, beta = into
    has_kernel, has_shift, has_weights, has_beta = (inputs[place] is not None for place in (3, 5, 6, 7))
    return (
        query if weight == 1 else None,
        key if weight == 1 else None,
        value,
        kernel if has_kernel else None,
        None,
        slots if has_shift and weight == 1 else None,
        slots if has_weights else None,
        beta.sum().to(inputs[7].dtype).reshape(inputs[7].shape) if has_beta and weight == 1 else None,
        *(None,) * 11,
    )


combine.register_autograd(_backward, _keep)

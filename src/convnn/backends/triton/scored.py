"""Scores of chosen pairs, with gradients: products of queries with the keys they chose.

All of it is an aggregation in disguise. Its gradient by given weights is such a product; and the gradients of a product
are the keys, combined by how much each score counts, and what combining them this way asks of the keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from convnn.backends.triton import shapes
from convnn.backends.triton.modes import GIVEN
from convnn.backends.triton.ops import _on
from convnn.backends.triton.register import operator
from convnn.neighbors import together

# Triton is imported where a kernel runs, not where it is named.


@operator("score")
def score(query: Tensor, key: Tensor, index: Tensor) -> Tensor:
    r""":math:`s_{i,k} = q_i^\top k_{I_{i,k}}` in float32, and 0 in an empty slot.

    Shape:
        query ``(B, H, N, E)``, key ``(B, H, M, E)``, index and the result ``(B, H, N, K)``.
    """
    from convnn.backends.triton import backward

    into = _scores(index)
    if into.numel():
        with _on(query):
            backward.pair_scores(_step(query, key, index, None, {"slots": into}))
    return into


def _scores(index: Tensor) -> Tensor:
    return index.new_empty(index.shape, dtype=torch.float32)


def _step(query: Tensor, key: Tensor, index: Tensor, pull: Tensor | None, into: dict[str, Tensor]) -> Any:
    from convnn.backends.triton import backward

    optional = {"shift": None, "given": pull, "beta": None, "seed": None, "own": None}
    nobody = query[..., :1]
    choices = {"KIND": 0, "WEIGHT": GIVEN}
    named = {"query": nobody, "key": nobody, "value": nobody, "slots": nobody, "beta": nobody, **into}
    return backward.Step(
        *(nobody, key[..., :1], key, None, index, optional, query, named, (1.0, 0.0, 0.0), choices),
        distinct=False,
    )


@score.register_fake
def _(query: Tensor, key: Tensor, index: Tensor) -> Tensor:
    return _scores(index)


@operator("score_backward")
def score_backward(query: Tensor, key: Tensor, index: Tensor, pull: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of query and key from that of the scores."""
    from convnn.backends.triton import backward, launch

    of_query, of_key = torch.empty_like(query).contiguous(), torch.empty_like(key).contiguous()
    if index.numel() == 0 or key.numel() == 0:
        return of_query.zero_(), of_key.zero_()
    step = _step(query, key, index, pull.contiguous(), {"value": of_key})
    choices = {**step.choices, "SORTED": False, "SCORED": False, "ROUGH": False}
    with _on(query):
        launch.combine_forward(
            *(step.query, step.key, key, None, index, step.optional, of_query), step.numbers, choices
        )
        backward.pair_keys(step)
    return of_query, of_key


@score_backward.register_fake
def _(query: Tensor, key: Tensor, index: Tensor, pull: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query).contiguous(), torch.empty_like(key).contiguous()


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, pull: Tensor) -> tuple[Tensor, Tensor, None]:
    return *score_backward(*ctx.saved_tensors, pull), None


score.register_autograd(_backward, _keep)


def scored(query: Tensor, key: Tensor, index: Tensor) -> Tensor:
    """The products of queries ``(..., N, E)`` with the keys they chose, ``(..., N, K)``."""
    lead = together(query.shape[:-2], key.shape[:-2], index.shape[:-2])
    given = (*(shapes.folded(tensor, lead) for tensor in (query, key)), shapes.folded(index, lead).contiguous())
    return shapes.unfolded(score.learned(*given), lead)

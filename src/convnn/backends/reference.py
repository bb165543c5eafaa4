"""The definition of the operator: it reads like the equations, and every other backend is held against it."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from convnn.backends import held, relaxed
from convnn.backends.record import Backend
from convnn.neighbors import Neighbors, ranked, take, wide
from convnn.search import Search
from convnn.weighting import Weigh


def select(search: Search) -> Neighbors:
    """Choose the K keys of largest score; among equals the smaller index wins."""
    scores = search.scores().detach()  # (..., N, M)
    values, places = ranked(scores, descending=True)
    # A slice would do, but is contiguous only where K = M, and torch.export would forbid that size.
    first = torch.arange(search.others, device=scores.device)
    best, place = values.index_select(-1, first), places.index_select(-1, first)  # (..., N, K)
    return search.neighbors(search.with_own(best, search.numbered(place)))


def aggregate(value: Tensor, index: Tensor, weights: Tensor, kernel: Tensor | None) -> Tensor:
    r""":math:`y_o = \sum_k \sum_c w_k \, V[I_k, c] \, W_{o,c,k}`; without a kernel :math:`y = \sum_k w_k V[I_k]`."""
    taken = wide(take(value, index))  # (..., N, K, C)
    # An empty slot holds no value: 0 times an accidental NaN would not be 0.
    taken = torch.where(index[..., None] < 0, 0.0, taken) * weights[..., None].to(taken.dtype)
    if kernel is None:
        return taken.sum(-2).to(value.dtype)
    out, per_group, _ = kernel.shape
    groups = value.shape[-1] // per_group
    taken = taken.unflatten(-1, (groups, per_group))  # (..., N, K, G, C/G)
    kernel = wide(kernel).unflatten(0, (groups, out // groups))  # (G, O/G, C/G, K)
    return torch.einsum("...kgc,gock->...go", taken, kernel).flatten(-2).to(value.dtype)


def fused(search: Search, value: Tensor, kernel: Tensor | None, weigh: Weigh) -> Tensor:
    r"""The whole operator; with every key taken and no kernel it is :math:`Y = \rho(S) V` and needs no search."""
    if attends(search, kernel, weigh):
        return attend(search, value, weigh)
    neighbors = select(search)
    return aggregate(value, neighbors.index, weigh(neighbors.scores, neighbors.filled), kernel)


def attends(search: Search, kernel: Tensor | None, weigh: Weigh) -> bool:
    """Whether every key takes part and neither kernel nor weighting asks in which order."""
    # Beside candidates, one's own key is one more for some queries and not for others.
    same_for_all = search.own is None or search.candidates is None
    return search.everything and same_for_all and kernel is None and weigh.order_free


def attend(search: Search, value: Tensor, weigh: Weigh) -> Tensor:
    """Weigh all M keys of every query, and sum."""
    scores, value = search.attended(value)  # (..., N, M), (..., M, C)
    weights = weigh(scores, scores != -torch.inf)
    summed = weights.to(wide(value).dtype) @ wide(value)
    return summed.to(value.dtype)


def declines(search: Search | None, value: Tensor | None, kernel: Tensor | None) -> str | None:  # noqa: ARG001
    """Decline nothing: the reference runs everything."""
    return None


BACKEND = Backend(
    select,
    aggregate,
    declines,
    fused,
    about="the definition; holds all scores at once",
    held=held.reference,
    relaxed=partial(relaxed.run, aggregate=aggregate),
)

"""The operator: for every query choose the K nearest keys, weigh them, combine their values with a kernel."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, overload

import torch
from torch import Tensor

from convnn import arguments, cost, watching
from convnn.arguments import Values, autocast_off
from convnn.backends import Backend, Choice, choose, reference
from convnn.candidates import Candidates
from convnn.masks import Mask
from convnn.neighbors import Neighbors
from convnn.search import Order, SelfScore
from convnn.selection import Selection
from convnn.similarity import Similarity
from convnn.weighting import Weighting

__all__ = ["aggregate", "convnn", "explain", "nearest"]


@overload
def convnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    k: int | Literal["all"],
    similarity: Similarity | str = "scaled_dot",
    weighting: Weighting | str = "softmax",
    mask: Mask | str | Sequence[Mask | str] | None = None,
    candidates: Tensor | Candidates | None = None,
    self_index: Tensor | None = None,
    self_score: SelfScore = "true",
    order: Order = "score",
    selection: Selection | str = "hard",
    dropout_p: float = 0.0,
    backend: str | Backend = "auto",
    return_neighbors: Literal[False] = False,
) -> Tensor: ...


@overload
def convnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    k: int | Literal["all"],
    similarity: Similarity | str = "scaled_dot",
    weighting: Weighting | str = "softmax",
    mask: Mask | str | Sequence[Mask | str] | None = None,
    candidates: Tensor | Candidates | None = None,
    self_index: Tensor | None = None,
    self_score: SelfScore = "true",
    order: Order = "score",
    selection: Selection | str = "hard",
    dropout_p: float = 0.0,
    backend: str | Backend = "auto",
    return_neighbors: Literal[True],
) -> tuple[Tensor, Neighbors]: ...


def convnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    k: int | Literal["all"],
    similarity: Similarity | str = "scaled_dot",
    weighting: Weighting | str = "softmax",
    mask: Mask | str | Sequence[Mask | str] | None = None,
    candidates: Tensor | Candidates | None = None,
    self_index: Tensor | None = None,
    self_score: SelfScore = "true",
    order: Order = "score",
    selection: Selection | str = "hard",
    dropout_p: float = 0.0,
    backend: str | Backend = "auto",
    return_neighbors: bool = False,
) -> Tensor | tuple[Tensor, Neighbors]:
    r"""Choose the K nearest keys of every query, weigh them, and combine their values with a learned kernel.

    .. math::
        I_i = \operatorname{arg\,top}_K \; s(q_i, k_j), \qquad
        y_{i,o} = b_o + \sum_{k=1}^{K} \sum_c \rho(s_i)_k \; V[I_{i,k}, c] \; W_{o,c,k}

    Args:
        kernel: standard, grouped or depthwise by its middle size; None sums the weighted neighbours.
        k: how many neighbours, from 1 to M; ``"all"`` takes every key, and then there is no kernel.
        similarity: ``(query, key) -> scores``, larger is nearer, or a name: ``"dot"``, ``"scaled_dot"``, ``"cosine"``,
            ``"euclidean"``, ``"sqeuclidean"`` (a distance by name means minus that distance).
        weighting: ``(scores, filled) -> weights`` over the K slots, or a name: ``"softmax"``, ``"uniform"``.
        mask: a tensor as in :func:`torch.nn.functional.scaled_dot_product_attention` (True may be chosen, floats are
            added), a rule ``(i, j) -> bool or float`` as in :mod:`convnn.masks`, ``"causal"``, or a sequence of these:
            all of them apply, and floats add up.
        candidates: among whom to search: None for every key, an index ``(..., r)`` of keys (a negative one is none), or
            a callable that makes one, such as :func:`~convnn.candidates.random` and :func:`~convnn.candidates.grid`.
        self_index: each query's own key ``(..., N)``, or a negative number where it has none: unless a mask forbids it,
            it is the first neighbour, whether it is a candidate or not, and never chosen twice.
        self_score: how similar a query and its own key are: what they are (``"true"``), or 1 (``"one"``).
        order: slots of a row by ``"score"``, nearest first, or by ``"key"``.
        selection: ``"hard"``, or ``(scores, chosen) -> counts`` as in :mod:`convnn.selection`, which can be learned.
        dropout_p: probability of dropping a weight; acts whenever it is not 0.
        backend: ``"auto"``, a name, or a :class:`~convnn.backends.Backend`; an explicit one runs or raises.
        return_neighbors: return ``(output, Neighbors)``.

    Shape:
        query ``(..., N, E)``, key ``(..., M, E)``, value ``(..., M, C)``, kernel ``(O, C/groups, K)``, bias ``(O,)``,
        mask broadcasting to ``(..., N, M)``; the output is ``(..., N, O)``, with O = C where there is no kernel.
        Leading dimensions broadcast.

    Example:
        >>> x = torch.randn(2, 50, 16)
        >>> attention = convnn(x, x, x, k="all")
        >>> torch.allclose(attention, F.scaled_dot_product_attention(x, x, x), atol=1e-6)
        True
        >>> kernel = torch.randn(32, 16, 9)
        >>> convnn(x, x, x, kernel, k=9, similarity="cosine", weighting="uniform").shape
        torch.Size([2, 50, 32])
    """
    values = Values(value, kernel, bias).under_autocast()
    search = arguments.search(
        query, key, k=k, similarity=similarity, mask=mask, candidates=candidates, self_index=self_index,
        self_score=self_score, order=order, has_kernel=kernel is not None, selection=selection,
    )  # fmt: skip
    weigh = arguments.weigh(weighting, dropout_p)
    arguments.scores_matter(search, weigh)
    chosen = arguments.choice(backend, search, values).backend
    with autocast_off(query.device):
        if not return_neighbors:
            output = values.shift(chosen.run(search, values.value, values.kernel, weigh))
            arguments.seen(search, chosen.select, weigh)
            return output
        found = chosen.select(search)
        arguments.seen(search, lambda _: found, weigh)
        if search.selection is not None:
            return values.shift(chosen.run(search, values.value, values.kernel, weigh)), found
        weights = weigh(found.scores, found.filled)
        return values.shift(chosen.aggregate(values.value, found.index, weights, values.kernel)), found


def nearest(
    query: Tensor,
    key: Tensor,
    *,
    k: int | Literal["all"],
    similarity: Similarity | str = "scaled_dot",
    mask: Mask | str | Sequence[Mask | str] | None = None,
    candidates: Tensor | Candidates | None = None,
    self_index: Tensor | None = None,
    self_score: SelfScore = "true",
    order: Order = "score",
    backend: str | Backend = "auto",
) -> Neighbors:
    """Find the K nearest keys of every query: the first half of :func:`convnn`, with its arguments.

    Shape:
        query ``(..., N, E)``, key ``(..., M, E)``; both fields of the result are ``(..., N, K)``.

    Example:
        >>> places = torch.arange(5.0)[:, None]
        >>> nearest(places[:1], places, k=3, similarity="euclidean").index
        tensor([[0, 1, 2]])
    """
    search = arguments.search(
        query, key, k=k, similarity=similarity, mask=mask, candidates=candidates, self_index=self_index,
        self_score=self_score, order=order,
    )  # fmt: skip
    chosen = choose(backend, search).backend
    with autocast_off(query.device):
        return chosen.select(search)


def aggregate(
    value: Tensor,
    neighbors: Neighbors,
    kernel: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    weighting: Weighting | str = "softmax",
    dropout_p: float = 0.0,
    backend: str | Backend = "auto",
) -> Tensor:
    """Weigh the neighbours and combine their values: the second half of :func:`convnn`, with its arguments.

    Shape:
        value ``(..., M, C)``, neighbors ``(..., N, K)``, kernel ``(O, C/groups, K)``, bias ``(O,)``; the output is
        ``(..., N, O)``.

    Example:
        >>> x = torch.randn(7, 4)
        >>> found = nearest(x, x, k=3)
        >>> torch.equal(aggregate(x, found), convnn(x, x, x, k=3))
        True
    """
    weigh = arguments.weigh(weighting, dropout_p)
    output = arguments.aggregate(value, neighbors, kernel, bias, weigh=weigh, backend=backend)
    if watching.anyone():
        watching.show(value.shape[-2], neighbors[1].shape, lambda: Neighbors(*neighbors), weigh)
    return output


def explain(*inputs: Any, **options: Any) -> Choice:
    """Say which backend :func:`convnn` takes for these arguments, why, and about what that costs; nothing is computed.

    Tensors on the meta device will do, and count as tensors on a CPU. See :class:`~convnn.cost.Cost` for what is said
    of the cost.

    Example:
        >>> x = torch.empty(50, 16, device="meta")
        >>> explain(x, x, x, k=9).name
        'chunked'
        >>> explain(x, x, x, k=9).cost.search_products
        40000
    """
    bound = inspect.signature(convnn).bind(*inputs, **options)
    bound.apply_defaults()
    given = bound.arguments
    values = Values(given["value"], given["kernel"], given["bias"]).under_autocast()
    combined = ("value", "kernel", "bias", "weighting", "dropout_p", "backend", "return_neighbors")
    choices = {name: given[name] for name in given if name not in combined}
    with torch.random.fork_rng():  # candidates may be drawn, which must not move anybody's random numbers
        search = arguments.search(**choices, has_kernel=values.kernel is not None)
    weigh = arguments.weigh(given["weighting"], given["dropout_p"])
    arguments.scores_matter(search, weigh)
    found = arguments.choice(given["backend"], search, values)
    everybody = search.selection is not None or reference.attends(search, values.kernel, weigh)
    sizes = cost.sizes(search, values.value, values.kernel, weigh, attends=everybody)
    return replace(found, cost=cost.estimate(sizes, found.name, found.backend.held))

"""Any device, bounded memory: the search looks at a budget of scores at a time, the aggregation at one slot.

What autograd keeps between forward and backward is the inputs, the indices and the weights; scores and gathered rows
are computed again, block by block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from convnn import checks, forms
from convnn.backends import held, reference
from convnn.backends import relaxed as dense
from convnn.backends.blocks import ELSEWHERE, ON_CPU, Pieces, in_blocks
from convnn.backends.combine import Combine, with_nobody
from convnn.backends.largest import largest
from convnn.backends.pieces import rebuild, tensors
from convnn.backends.record import Backend
from convnn.forms import PRODUCTS
from convnn.masks import Lookup, Mask
from convnn.neighbors import Neighbors, together, wide
from convnn.search import Search
from convnn.similarity import cosine, dot, pearson
from convnn.weighting import Weigh

T = TypeVar("T")


def with_budget(budget: int) -> Backend:
    """Make a chunked backend that holds at most ``budget`` scores (or other numbers) in one tensor.

    Tensors of the size of an input, an output or a gradient come on top. A budget too small for a single row (its M
    scores where all are taken, its K keys otherwise) still runs, a row at a time.

    Example:
        >>> import convnn
        >>> x = torch.randn(100, 8)
        >>> y = convnn.functional.convnn(x, x, x, k=5, backend=with_budget(1000))
    """
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
        raise ValueError(f"the budget must be a positive number of scores, got {budget!r}")
    return _backend(budget, f"any device; at most {budget:,} scores at a time")


def _backend(budget: int | None, about: str) -> Backend:
    given: Any = {"budget": budget}
    both = partial(fused, **given)
    size = partial(held.chunked, **given)
    all_keys = partial(relaxed, **given)
    halves = partial(select, **given), partial(aggregate, **given)
    return Backend(*halves, declines, both, about=about, held=size, relaxed=all_keys)


def at_most(budget: int | None, tensor: Tensor) -> int:
    """How many scores to hold: few where cores want them near, more where a device wants to be kept busy."""
    if budget is not None:
        return budget
    return ON_CPU if tensor.device.type == "cpu" else ELSEWHERE


def select(search: Search, *, budget: int | None, as_found: bool = False) -> Neighbors:
    """Find the neighbours block by block."""
    budget = at_most(budget, search.query)
    search, width = _lifted(search), _width(search, budget)

    def run(by_row: Pieces, shared: Pieces) -> tuple[Tensor, ...]:
        return _neighbors(rebuild(search, by_row, shared), width, as_found=as_found)

    by_row, shared = tensors(search)
    return Neighbors(*in_blocks(run, by_row, shared, row=_row(search, width), budget=budget))


def rescore(search: Search, index: Tensor, *, budget: int | None = None) -> Neighbors:
    """Score keys that were chosen already, block by block; -1 is a slot nobody won."""
    budget = at_most(budget, search.query)
    search = _lifted(search)

    def run(by_row: Pieces, shared: Pieces) -> tuple[Tensor, ...]:
        block = rebuild(search, by_row[:-1], shared)
        return _again(partial(block.neighbors, by_row[-1], some_empty=True), block)

    by_row, shared = tensors(search)
    row = max(1, search.k * search.query.shape[-1])
    return Neighbors(*in_blocks(run, [*by_row, index.long()], shared, row=row, budget=budget))


def aggregate(value: Tensor, index: Tensor, weights: Tensor, kernel: Tensor | None, *, budget: int | None) -> Tensor:
    """Combine block by block, in each slot by slot."""
    budget = at_most(budget, value)
    kernel = None if kernel is None else wide(kernel)

    def run(by_row: Pieces, shared: Pieces) -> tuple[Tensor, ...]:
        return (_combine(shared[0], by_row[0], by_row[1], kernel),)

    row = max(index.shape[-1], value.shape[-1], 0 if kernel is None else kernel.shape[0])
    rows = with_nobody(wide(value))
    return in_blocks(run, [index, weights], [rows], row=max(1, row), budget=budget)[0].to(value.dtype)


def fused(search: Search, value: Tensor, kernel: Tensor | None, weigh: Weigh, *, budget: int | None) -> Tensor:
    """Run both halves in each block, so that not even (..., N, K) is held as a whole."""
    budget = at_most(budget, value)
    attends = reference.attends(search, kernel, weigh)
    search, width = _lifted(search), _width(search, budget)
    by_row, shared = tensors(search)
    lead = together(*(tensor.shape[:-2] for tensor in (*by_row, *shared)))
    # Scores nobody weighs by only say who comes first, and the search has said that.
    as_found = weigh.ignores_scores and search.similarity in PRODUCTS
    if not attends and (as_found or together(lead, value.shape[:-2]) != lead):
        # One search serves several values: cut with them, it would be repeated for each. And blocks that suit a search
        # do not suit what needs no more of it than an index.
        found = select(search, budget=budget, as_found=as_found)
        return aggregate(value, found.index, weigh(found.scores, found.filled), kernel, budget=budget)
    kernel = None if kernel is None else wide(kernel)

    def run(by_row: Pieces, shared: Pieces) -> tuple[Tensor, ...]:
        block = rebuild(search, by_row, shared[1:])
        if attends:
            return (_again(partial(reference.attend, block, shared[0], weigh), block, random=weigh.may_be_random),)
        neighbors = _neighbors(block, width)
        return (_combine(shared[0], neighbors.index, weigh(neighbors.scores, neighbors.filled), kernel),)

    row = max(value.shape[-1], 0 if kernel is None else kernel.shape[0])
    row = max(row, search.width if attends else _row(search, width))
    rows = wide(value) if attends else with_nobody(wide(value))
    return in_blocks(run, by_row, [rows, *shared], row=row, budget=budget)[0].to(value.dtype)


def relaxed(search: Search, value: Tensor, kernel: Tensor | None, weigh: Weigh, *, budget: int | None) -> Tensor:
    """Weigh every searched key, block by block; nothing of the size of the scores is kept for backward."""
    budget = at_most(budget, value)
    search = _lifted(search)
    by_row, shared = tensors(search)

    def run(by_row: Pieces, shared: Pieces) -> tuple[Tensor, ...]:
        block = rebuild(search, by_row, shared[1:])
        combine = partial(dense.run, block, shared[0], kernel, weigh, reference.aggregate)
        return (_again(combine, block, random=weigh.may_be_random),)

    row = max(search.width + search.k, search.k * max(value.shape[-1], search.query.shape[-1]))
    return in_blocks(run, by_row, [wide(value), *shared], row=row, budget=budget)[0].to(value.dtype)


def declines(search: Search | None, value: Tensor | None, kernel: Tensor | None) -> str | None:  # noqa: ARG001
    """Say why not: where sizes must stay symbolic, or inside a transform; no other input is refused."""
    # torch.compiler.is_exporting() is this flag, but 2.11 answers True under torch.compile as well.
    if torch.compiler._is_exporting_flag:
        return "torch.export needs sizes to stay symbolic, and the number of blocks depends on them"
    # Under torch.compile this cannot be asked, and a transform inside it raises where it meets the recomputation.
    if not torch.compiler.is_compiling() and checks.is_transformed():
        return "torch.func transforms do not reach into what it computes again in backward"
    return None


def _width(search: Search, budget: int) -> int:
    """How many keys the search looks at together: all, unless that left fewer than 64 rows in the budget."""
    return min(search.width, max(search.k, budget // 64))


def _row(search: Search, width: int) -> int:
    """How many numbers one row needs at most: its scores beside the best so far, or its K gathered keys."""
    return max(width + search.k, search.k * search.query.shape[-1])


def _neighbors(block: Search, width: int, *, as_found: bool = False) -> Neighbors:
    with torch.no_grad():
        best, index = _choose(block, width)
        if as_found:
            return block.found(best, index)
        index = block.with_own(best, index)
    return _again(partial(block.neighbors, index), block)


def _choose(search: Search, width: int) -> tuple[Tensor, Tensor]:
    """Find the K best keys of every row, ``width`` keys at a time; NaN outranks everything, as in the reference."""
    n_keys = search.width
    k, ordered = search.others, search.own is not None
    best, place = largest(_scores(search, 0, width), k, ordered=ordered)
    # Under torch.compile a range would tie the graph to this number of keys.
    for first in range(width, n_keys, width) if width < n_keys else ():
        scores = _scores(search, first, min(first + width, n_keys))
        places = torch.arange(first, first + scores.shape[-1], device=scores.device).expand(scores.shape)
        scores, places = torch.cat([best, scores], -1), torch.cat([place, places], -1)
        best, chosen = largest(scores, k, ordered=ordered)
        place = places.gather(-1, chosen)
    return best, search.numbered(place)


def _scores(search: Search, first: int, last: int) -> Tensor:
    """Score the keys from ``first`` up to ``last``; one's own is -inf, written in place and not by two more passes."""
    whole = search.candidates is None and last - first == search.width
    if search.own is None or not whole or search.similarity not in PRODUCTS:  # what others return may be their own
        return search.scores(first, last)
    scores = replace(search, own=None).scores()
    own = search.own.expand(*together(scores.shape[:-2], search.own.shape[:-2]), -1, -1)
    scores = scores.expand(*own.shape[:-1], -1).contiguous()
    own, nobody = own.clamp(min=0), own < 0
    return scores.scatter_(-1, own, torch.where(nobody, scores.gather(-1, own), -torch.inf))


def _again(function: Callable[[], T], block: Search, *, random: bool = False) -> T:
    """Call ``function``, and call it once more in backward instead of keeping what it computed on the way."""
    if not torch.is_grad_enabled():
        return function()
    # The query is passed for its device: checkpoint restores the random state of the devices it sees.
    return checkpoint(lambda _: function(), block.query, use_reentrant=False, preserve_rng_state=random)


def _combine(value: Tensor, index: Tensor, weights: Tensor, kernel: Tensor | None) -> Tensor:
    """Combine rows of values, of which the last is nobody's."""
    index = torch.where(index < 0, value.shape[-2] - 1, index)
    lead = together(value.shape[:-2], index.shape[:-2])
    index, weights = index.expand(*lead, -1, -1), weights.expand(*lead, -1, -1).to(value.dtype)
    taps = None
    if kernel is not None:
        groups = value.shape[-1] // kernel.shape[1]
        taps = kernel.unflatten(0, (groups, -1))  # (G, O/G, C/G, K)
    return Combine.apply(value.expand(*lead, -1, -1), index, weights, taps)


def _lifted(search: Search) -> Search:
    """Lift half types once, so that the gradients of all blocks are added in float32."""
    mask: list[Mask] = []
    for given in search.mask:
        if isinstance(given, Lookup):
            mask.append(replace(given, table=wide(given.table)))
        else:
            shared = isinstance(given, Tensor) and given.shape[-2] == 1 and given.dtype != torch.bool
            mask.append(wide(given) if shared else given)  # type: ignore[arg-type]
    query, key, similarity = wide(search.query), wide(search.key), search.similarity
    # Lengths are taken once, and not again for every pair; what a mask hides is left alone, NaN and all.
    if similarity in (cosine, pearson) and not search.mask and search.candidates is None:
        query, key = _again(partial(forms.directions, similarity, query, key), search)
        similarity = dot
    return replace(search, query=query, key=key, similarity=similarity, mask=tuple(mask))


BACKEND = _backend(None, f"any device; at most {ON_CPU:,} scores at a time on a CPU, {ELSEWHERE:,} elsewhere")

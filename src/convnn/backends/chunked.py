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
from convnn.backends import reference
from convnn.backends.blocks import Pieces, in_blocks
from convnn.backends.combine import Combine, with_nobody
from convnn.backends.record import Backend
from convnn.masks import Lookup, Mask
from convnn.neighbors import Neighbors, together, wide
from convnn.search import Search
from convnn.similarity import cosine, dot, pearson
from convnn.weighting import Weigh

T = TypeVar("T")
ON_CPU, ELSEWHERE = 2**20, 2**22  # scores, which are float32


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
    return Backend(
        partial(select, **given), partial(aggregate, **given), declines, partial(fused, **given), about=about
    )


def at_most(budget: int | None, tensor: Tensor) -> int:
    """How many scores to hold: few where cores want them near, more where a device wants to be kept busy."""
    if budget is not None:
        return budget
    return ON_CPU if tensor.device.type == "cpu" else ELSEWHERE


def select(search: Search, *, budget: int | None) -> Neighbors:
    """Find the neighbours block by block."""
    budget = at_most(budget, search.query)
    search, width = _lifted(search), _width(search, budget)

    def run(by_row: Pieces, shared: Pieces) -> tuple[Tensor, ...]:
        return _neighbors(_rebuild(search, by_row, shared), width)

    by_row, shared = _tensors(search)
    return Neighbors(*in_blocks(run, by_row, shared, row=_row(search, width), budget=budget))


def rescore(search: Search, index: Tensor, *, budget: int | None = None) -> Neighbors:
    """Score keys that were chosen already, block by block; -1 is a slot nobody won."""
    budget = at_most(budget, search.query)
    search = _lifted(search)

    def run(by_row: Pieces, shared: Pieces) -> tuple[Tensor, ...]:
        block = _rebuild(search, by_row[:-1], shared)
        return _again(partial(block.neighbors, by_row[-1], some_empty=True), block)

    by_row, shared = _tensors(search)
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
    by_row, shared = _tensors(search)
    lead = together(*(tensor.shape[:-2] for tensor in (*by_row, *shared)))
    if not attends and together(lead, value.shape[:-2]) != lead:
        # One search serves several values: cut with them, it would be repeated for each.
        found = select(search, budget=budget)
        return aggregate(value, found.index, weigh(found.scores, found.filled), kernel, budget=budget)
    kernel = None if kernel is None else wide(kernel)

    def run(by_row: Pieces, shared: Pieces) -> tuple[Tensor, ...]:
        block = _rebuild(search, by_row, shared[1:])
        if attends:
            return (_again(partial(reference.attend, block, shared[0], weigh), block, random=weigh.may_be_random),)
        neighbors = _neighbors(block, width)
        return (_combine(shared[0], neighbors.index, weigh(neighbors.scores, neighbors.filled), kernel),)

    row = max(value.shape[-1], 0 if kernel is None else kernel.shape[0])
    row = max(row, search.width if attends else _row(search, width))
    rows = wide(value) if attends else with_nobody(wide(value))
    return in_blocks(run, by_row, [rows, *shared], row=row, budget=budget)[0].to(value.dtype)


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


def _neighbors(block: Search, width: int) -> Neighbors:
    with torch.no_grad():
        index = _choose(block, width)
    return _again(partial(block.neighbors, index), block)


def _choose(search: Search, width: int) -> Tensor:
    """Find the K best keys of every row, ``width`` keys at a time; NaN outranks everything, as in the reference."""
    n_keys = search.width
    k, ordered = search.others, search.own is not None
    best, place = search.scores(0, width).topk(k, sorted=ordered)
    # Under torch.compile a range would tie the graph to this number of keys.
    for first in range(width, n_keys, width) if width < n_keys else ():
        scores = search.scores(first, min(first + width, n_keys))
        places = torch.arange(first, first + scores.shape[-1], device=scores.device).expand(scores.shape)
        scores, places = torch.cat([best, scores], -1), torch.cat([place, places], -1)
        best, chosen = scores.topk(k, sorted=ordered)
        place = places.gather(-1, chosen)
    return search.with_own(best, search.numbered(place))


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


def _tensors(search: Search) -> tuple[list[Tensor], list[Tensor]]:
    """Say which tensors of a search are cut by row, and which are shared by the rows."""
    by_row, shared = [search.query, search.rows], [search.key]
    if search.own is not None:
        by_row.append(search.own)
    if search.candidates is not None:
        shared.append(search.candidates)
    for mask in search.mask:
        if isinstance(mask, Lookup):
            shared.append(mask.table)
        elif isinstance(mask, Tensor):
            (shared if mask.shape[-2] == 1 else by_row).append(mask)
    return by_row, shared


def _rebuild(search: Search, by_row: Pieces, shared: Pieces) -> Search:
    """Make a search of one block's tensors, given in the order of ``_tensors``."""
    rows_left, shared_left = iter(by_row), iter(shared)
    query, rows, key = next(rows_left), next(rows_left).reshape(-1, 1), next(shared_left)
    own = None if search.own is None else next(rows_left)
    candidates = None if search.candidates is None else next(shared_left)
    mask: list[Mask] = []
    for whole in search.mask:
        if isinstance(whole, Lookup):
            mask.append(replace(whole, table=next(shared_left)))
        elif isinstance(whole, Tensor):
            mask.append(next(shared_left if whole.shape[-2] == 1 else rows_left))
        else:
            mask.append(whole)
    return replace(search, query=query, key=key, rows=rows, mask=tuple(mask), own=own, candidates=candidates)


BACKEND = _backend(None, f"any device; at most {ON_CPU:,} scores at a time on a CPU, {ELSEWHERE:,} elsewhere")

"""Fused kernels in Triton: exact neighbours without a score matrix, gradients whose sums have one order."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from convnn import checks, forms, laid
from convnn.backends import chunked, reference
from convnn.backends.record import Backend
from convnn.backends.triton import few, given, mixed, modes, ops, shapes, spread
from convnn.backends.triton.attention import attend
from convnn.backends.triton.choice import choose, in_order
from convnn.backends.triton.gates import CHANNELS, declines, otherwise, waits
from convnn.backends.triton.held import bytes_held
from convnn.backends.triton.modes import UNIFORM, Known
from convnn.backends.triton.ranks import marked, ranks
from convnn.backends.triton.scored import scored
from convnn.forms import Form
from convnn.neighbors import Neighbors, take, together
from convnn.search import Search
from convnn.weighting import Weigh

KINDS = {"dot": 0, "distance": 1, "square": 2}


def select(search: Search) -> Neighbors:
    """Find the neighbours, and score them again with their gradients."""
    if not forms.known(search.similarity):
        return otherwise().select(search)
    form = _form(search)
    index, _ = choose(search, ranks(search, form))
    if torch.compiler._is_exporting_flag:
        return search.neighbors(index.long(), some_empty=True)
    if form.kind != "dot":
        return chunked.rescore(search, index)
    return search.ordered(_scored(search, form, index), index.long())


def aggregate(value: Tensor, index: Tensor, weights: Tensor, kernel: Tensor | None, *, atomic: bool = False) -> Tensor:
    """Combine neighbours whose weights are known."""
    checks.stop_beyond("neighbors.index", index, value.shape[-2])
    return _aggregate(value, index, weights, kernel, atomic=atomic, distinct=False)


def _aggregate(
    value: Tensor, index: Tensor, weights: Tensor, kernel: Tensor | None, *, atomic: bool, distinct: bool
) -> Tensor:
    value = _widened(value, kernel)
    if kernel is not None and not _by_channel(value, kernel):
        return mixed.combine(value, index, weights, kernel, distinct=distinct)
    return given.combine(value, index, weights, _taps(kernel), atomic=atomic, distinct=distinct)


def fused(search: Search, value: Tensor, kernel: Tensor | None, weigh: Weigh, *, atomic: bool = False) -> Tensor:
    """Run the whole operator."""
    if reference.attends(search, kernel, weigh):
        return attend(search, value, weigh)
    known, value = modes.known(weigh), _widened(value, kernel)
    if known is None or not _by_channel(value, kernel) or not forms.known(search.similarity):
        if known is not None and known.mode == UNIFORM and forms.known(search.similarity):
            counts = known.dropout_p == 0.0 and all(map(shapes.says_bool, search.mask))
            if kernel is not None and not _by_channel(value, kernel) and counts:
                return _counted(search, value, kernel)
            index = in_order(search, choose(search, ranks(search, _form(search)))[0].long())
            weights = weigh(_unscored(search, index), index >= 0)
            return _aggregate(value, index, weights, kernel, atomic=atomic, distinct=_distinct(search))
        return _weighed(search, value, kernel, weigh, atomic=atomic)
    form = _form(search)
    if few.takes(search, form, value, known):
        return few.attend(search, form, value, kernel, known)
    return _combine(search, form, choose(search, ranks(search, form)), value, kernel, known, atomic=atomic)


def _weighed(search: Search, value: Tensor, kernel: Tensor | None, weigh: Weigh, *, atomic: bool) -> Tensor:
    """Score the neighbours before anybody weighs them."""
    found = _as_found(search)
    weights = weigh(found.scores, found.filled)
    if kernel is not None and not _by_channel(value, kernel) and spread.takes(search):
        return spread.combine(search, value, found.index, weights, kernel)
    return _aggregate(value, found.index, weights, kernel, atomic=atomic, distinct=_distinct(search))


def _as_found(search: Search) -> Neighbors:
    """The neighbours in the order they were found in, which may differ from that of their scores in the last digits."""
    if not forms.known(search.similarity) or torch.compiler._is_exporting_flag:
        return select(search)
    form = _form(search)
    if form.kind != "dot":
        return select(search)
    index = in_order(search, choose(search, ranks(search, form))[0])
    return Neighbors(_scored(search, form, index), index)


def _scored(search: Search, form: Form, index: Tensor) -> Tensor:
    """The scores of the chosen pairs, with gradients; -inf in empty slots."""
    scores = scored(form.query, form.key, index) * form.scale
    scores = search.with_own_score(scores, index)
    shifts = _shifts(search, index)
    scores = scores if shifts is None else scores + shifts
    return scores.masked_fill(index < 0, -torch.inf)


def _counted(search: Search, value: Tensor, kernel: Tensor) -> Tensor:
    """Every neighbour counts once, and the kernel mixes channels."""
    by, *lost = marked(search)
    index = in_order(search, choose(search, by)[0])
    if spread.takes(search):
        return spread.combine(search, value, index, None, kernel, *lost)
    return mixed.combine(value, index, None, kernel, *lost, distinct=_distinct(search))


def _distinct(search: Search) -> bool:
    """Whether no row can choose a key twice; of candidates one may be named so."""
    return search.candidates is None


def _form(search: Search) -> Form:
    hides = len(search.mask) > 0 or search.candidates is not None
    return forms.form(search.similarity, search.query, search.key, hides=hides)


def _combine(
    search: Search,
    form: Form,
    found: tuple[Tensor, Tensor | None],
    value: Tensor,
    kernel: Tensor | None,
    known: Known,
    *,
    atomic: bool,
) -> Tensor:
    index, scores = found
    lead = together(index.shape[:-2], value.shape[:-2])
    ranked = search.own is None and not (isinstance(known.beta, float) and known.beta < 0)
    if search.order == "key":
        index, ranked, scores = in_order(search, index), False, None
    shifts = _shifts(search, index)
    ranked = ranked and shifts is None and scores is not None
    if not ranked and form.query.dtype != torch.float32:
        scores = None  # half types are ranked by scores that gave up digits; only the first tells whether it matters
    slots = shapes.folded(index, lead)
    slots = slots if slots.stride(-2) == slots.shape[-1] else slots.contiguous()
    own = search.own if search.own_score is not None else None
    fixed = None if own is None else shapes.folded(own.int(), lead)[..., 0].contiguous()
    output = ops.combine.learned(
        *(shapes.folded(tensor, lead) for tensor in (form.query, form.key, value)),
        *(_taps(kernel), slots, None if shifts is None else shapes.folded(shifts, lead).contiguous()),
        *(None, _beta(known, value), _seed(known, value), fixed),
        *(None if scores is None else shapes.folded(scores, lead).contiguous(), KINDS[form.kind], known.mode, ranked),
        *(form.scale, search.own_score or 0.0, known.dropout_p, atomic, _distinct(search)),
    )
    return shapes.unfolded(output, lead)


def _unscored(search: Search, index: Tensor) -> Tensor:
    """Scores for a weighting that does not look at them: 0, or NaN where a query, a chosen key or a mask has one."""
    of_query, of_key = (side.isnan().any(-1, keepdim=True) for side in (search.query, search.key))
    lost, shifts = of_query | take(of_key, index)[..., 0], _shifts(search, index)
    lost = (lost if shifts is None else lost | shifts.isnan()) & (index >= 0)
    return torch.zeros(lost.shape, device=index.device).masked_fill(lost, torch.nan)


def _beta(known: Known, value: Tensor) -> Tensor | None:
    return value.new_full((), known.beta, dtype=torch.float32) if isinstance(known.beta, float) else known.beta


def _seed(known: Known, value: Tensor) -> Tensor | None:
    if known.dropout_p == 0.0:
        return None
    return torch.randint(2**31 - 1, (), device=value.device, dtype=torch.int64)


def _shifts(search: Search, index: Tensor) -> Tensor | None:
    """What float masks add to the scores of the chosen pairs, with their gradients."""
    told = [mask for mask in search.mask if not shapes.says_bool(mask)]
    _, shifts = laid.combine(laid.pairs(mask, search.rows, index.long()) for mask in told)
    if not shifts:
        return None
    return sum((shift.float() for shift in shifts[1:]), shifts[0].float()).expand(index.shape)


def _by_channel(value: Tensor, kernel: Tensor | None) -> bool:
    """Whether each output channel comes from one channel of the values."""
    return kernel is None or (kernel.shape[1] == 1 and kernel.shape[0] == value.shape[-1])


def _widened(value: Tensor, kernel: Tensor | None) -> Tensor:
    """Repeat channels of which a depthwise kernel makes several outputs: then each output has one of its own."""
    channels = value.shape[-1]
    if kernel is None or kernel.shape[1] != 1 or not channels < kernel.shape[0] <= CHANNELS:
        return value
    return value.repeat_interleave(kernel.shape[0] // channels, -1)


def _taps(kernel: Tensor | None) -> Tensor | None:
    return None if kernel is None else kernel.squeeze(1).contiguous()  # (C, K)


def with_order(*, fixed: bool) -> Backend:
    """Make a Triton backend that adds up the gradients of keys and values in a fixed order, or as they come.

    As they come they need less work and memory where there are few neighbours, and differ in their last bits from run
    to run.
    """
    return Backend(
        select,
        partial(aggregate, atomic=not fixed),
        declines,
        partial(fused, atomic=not fixed),
        about="fused kernels on CUDA; no score matrix",
        waits=waits,
        held=bytes_held,
    )


BACKEND = with_order(fixed=True)

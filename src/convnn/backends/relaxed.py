"""The operator with a selection that is not hard: every searched key counts as often as the selection says."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from convnn.neighbors import Neighbors, together, wide
from convnn.search import Search
from convnn.weighting import Weigh


def run(
    search: Search,
    value: Tensor,
    kernel: Tensor | None,
    weigh: Weigh,
    aggregate: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
) -> Tensor:
    r""":math:`y_o = \sum_j w_j \sum_c V_{jc} W_{o,c,t(j)}` with :math:`w = \rho_g(s)`, in which key j counts g times.

    The tap t(j) of a winner is its slot. Another key takes the last one, or where slots are in the order of keys the
    one it would stand in.
    """
    found, rest = _parted(search)
    lead = together(found.scores.shape[:-1], rest.shape[:-1])
    scores = torch.cat([found.scores.expand(*lead, -1), rest.expand(*lead, -1)], -1)  # (..., N, K + r)
    weights = weigh.counted(scores, scores != -torch.inf, _counts(search, scores, found.index.expand(*lead, -1)))
    k = found.index.shape[-1]
    values = wide(search.seen(value)[2])  # (..., r, C)
    output = aggregate(wide(value), found.index, weights[..., :k], None if kernel is None else wide(kernel))
    others = weights[..., k:].to(values.dtype)
    if kernel is None:
        return (output + others @ values).to(value.dtype)
    if search.order == "score":
        return (output + _tapped(others @ values, wide(kernel[..., -1]))).to(value.dtype)
    slots = _slots(search, found.index, others.shape)
    for tap in range(k):
        output = output + _tapped((others * (slots == tap)) @ values, wide(kernel[..., tap]))
    return output.to(value.dtype)


def _parted(search: Search) -> tuple[Neighbors, Tensor]:
    """The winners, and the scores ``(..., N, r)`` of the searched keys with -inf for winners."""
    scores = search.scores()
    known = scores.detach()
    ranked = known.sort(dim=-1, descending=True, stable=True)
    best, place = ranked.values[..., : search.others], ranked.indices[..., : search.others]
    found = search.neighbors(search.with_own(best, search.numbered(place)))
    won = torch.full_like(best[..., :1], search.k, dtype=torch.int64)
    if search.own is not None:
        won = search.k - (found.index == search.own).any(-1, keepdim=True).long()  # one of them is oneself
    lead = together(place.shape[:-1], won.shape[:-1])
    first = torch.arange(search.others, device=place.device) < won.expand(*lead, 1)
    winners = torch.zeros(*lead, scores.shape[-1], dtype=torch.bool, device=place.device)
    winners = winners.scatter(-1, place.expand(*lead, -1), first)
    return found, torch.where(winners, -torch.inf, scores.expand(*lead, -1))


def _counts(search: Search, scores: Tensor, index: Tensor) -> Tensor:
    """How often each key counts; one's own, which nobody has to choose, once."""
    none = torch.zeros((), dtype=torch.bool, device=index.device).expand(*index.shape[:-1], scores.shape[-1])
    first = index.shape[-1]
    won = torch.cat([index >= 0, none[..., first:]], -1)
    if search.selection is None:
        return won.to(scores.dtype)
    own = none if search.own is None else torch.cat([(index == search.own) & (index >= 0), none[..., first:]], -1)
    counts = search.selection(torch.where(own, -torch.inf, scores), won & ~own)
    if not isinstance(counts, Tensor) or counts.shape != scores.shape:
        came = tuple(counts.shape) if isinstance(counts, Tensor) else type(counts).__name__
        raise ValueError(f"a selection must return a count per score, shape {tuple(scores.shape)}, got {came}")
    return torch.where(own, 1.0, counts)


def _slots(search: Search, index: Tensor, shape: torch.Size) -> Tensor:
    """In which slot each searched key would stand among winners in the order of keys, ``(..., N, r)``."""
    last = torch.iinfo(index.dtype).max
    winners = index.masked_fill(index < 0, last).expand(*shape[:-1], -1).contiguous()
    keys = search.numbers(0, shape[-1]).expand(shape).contiguous()
    return torch.searchsorted(winners, keys).clamp(max=index.shape[-1] - 1)


def _tapped(tokens: Tensor, tap: Tensor) -> Tensor:
    """Combine channels ``(..., N, C)`` by one tap of a kernel, ``(O, C/groups)``."""
    out, per_group = tap.shape
    groups = tokens.shape[-1] // per_group
    parts, taps = tokens.unflatten(-1, (groups, per_group)), tap.unflatten(0, (groups, out // groups))
    return torch.einsum("...gc,goc->...go", parts, taps).flatten(-2)

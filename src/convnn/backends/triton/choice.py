"""Choose the keys of every query: the search by kernels, and one's own key among what it found."""

from __future__ import annotations

import torch
from torch import Tensor

from convnn import checks
from convnn.backends.triton import ops, shapes
from convnn.backends.triton.gates import otherwise
from convnn.backends.triton.ranks import Ranks
from convnn.forms import FUSED
from convnn.search import Search

# With more candidates than a program holds, what is found are their places.
WHOLE = 256
# What the kernels take for forbidden; a finite number of the caller's, however low, is not.
FORBIDDEN, LEAST = -3.2e38, -1e38
# Where infinity is ranked, and before it what is not a number: bits of both are needed for other things.
INFINITE, LOST = 1e38, 2e38


def choose(search: Search, by: Ranks) -> tuple[Tensor, Tensor | None]:
    """The numbers of the chosen keys, ``(..., N, K)``, and what they were ranked by where that is a score."""
    if search.candidates is not None:
        # They are sorted: the last is the largest.
        checks.stop_beyond("candidates", search.candidates[..., 0, -1], search.key.shape[-2])
    with torch.no_grad():
        return _searched(search, by) if search.others <= FUSED else (otherwise().select(search).index, None)


def _searched(search: Search, by: Ranks) -> tuple[Tensor, Tensor | None]:
    lead = shapes.lead_of(search)
    masks = shapes.fuse(search)
    bias = by.per_key
    if masks.padding is not None:
        shown = masks.padding[..., 0, :].expand(*masks.padding.shape[:-2], search.key.shape[-2])
        bias = torch.where(shown, 0.0 if bias is None else bias, -1.0 if by.scales else FORBIDDEN)
    scales = by.scales + (by.scales and masks.padding is not None)
    query, key = shapes.folded(by.query, lead), shapes.folded(by.key, lead)
    per_key = None if bias is None else shapes.folded(bias.float()[..., None, :], lead)[..., 0, :]
    among = None if search.candidates is None else shapes.folded(search.candidates, lead)[..., 0, :]
    own = None if search.own is None else shapes.folded(search.own.int(), lead)[..., 0].contiguous()
    parts = []
    shifted = False
    for first, last, allowed, shift in shapes.blocks(search, masks.others, lead):
        shifted = shifted or shift is not None
        rows = query if last - first == query.shape[-2] else query[..., first:last, :]
        mine = own if own is None or rows is query else own[..., first:last]
        if shift is not None and by.kind == "distance":
            # It would have to be added after the root.
            return otherwise().select(search).index, None
        scaled = None if shift is None else _ranked(shift, by)
        options = (search.others, first, masks.causal, masks.window, by.by_difference, scales)
        mine = None if mine is None else mine.contiguous()
        parts.append(ops.select(rows, key, per_key, among, allowed, scaled, mine, *options))
    joined = parts[0] if len(parts) == 1 else tuple(torch.cat(part, -2) for part in zip(*parts, strict=True))
    index, scores = (shapes.unfolded(part, lead) for part in joined)
    if search.candidates is not None and search.width > WHOLE:
        index = torch.where(index < 0, -1, search.numbered(index.clamp(min=0).long()))
    if own is not None and search.own_is_allowed and index.shape[-1] == search.k:
        return shapes.unfolded(ops.own_first(own, shapes.folded(index, lead).contiguous()), lead), None
    if search.own is not None:
        return search.with_own(scores, index.long()), None
    return index, scores if by.scored and not shifted else None


def _ranked(shift: Tensor, by: Ranks) -> Tensor:
    """What float masks add to what is ranked; where it is finite, it does not forbid."""
    within = (shift * by.per_shift).clamp(LEAST, INFINITE).nan_to_num(nan=LOST)
    return torch.where(shift == -torch.inf, FORBIDDEN, within)


def in_order(search: Search, index: Tensor) -> Tensor:
    """What was found, in the order that was asked for."""
    return _by_number(index) if search.order == "key" else index


def _by_number(index: Tensor) -> Tensor:
    """Put the slots of a row in the order of keys, empty ones last."""
    last = torch.iinfo(index.dtype).max
    index = index.masked_fill(index < 0, last).sort(dim=-1).values
    return index.masked_fill(index == last, -1)

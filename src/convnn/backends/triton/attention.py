"""Every key of every query, without a kernel: torch's own attention, wherever that computes the same thing."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from convnn import forms
from convnn.backends import chunked
from convnn.backends.triton import gates, modes, shapes
from convnn.backends.triton.modes import SOFTMAX, Known
from convnn.masks import Lookup
from convnn.neighbors import together, wide
from convnn.search import Search
from convnn.weighting import Weigh

# Torch's fused kernels take multiples of so many channels; with others it computes step by step.
ALIGNED = 8
# A finite number forbids nothing; but torch's kernels scale it before they compare, and a larger one leaves the range.
LEAST = -1e37


def attend(search: Search, value: Tensor, weigh: Weigh) -> Tensor:
    """Weigh all keys of every query, and sum."""
    known = modes.known(weigh)
    if known is None or not _is_attention(search, value, known):
        return gates.otherwise().run(search, value, None, weigh)
    masks = shapes.fuse(search)
    causal = masks.causal and masks.window < 0 and masks.padding is None and not masks.others
    if causal and search.candidates is None:
        search = replace(search, mask=())
        if _replaces(search, value):
            return _attention(search, search.query, search.key, value, known, causal=True)
        lost, reached = _past(search)
        output = _attention(search, search.query, _kept(search.key, lost), value, known, causal=True)
        return output * torch.where(reached, torch.nan, 1.0).to(output.dtype)
    if _entries(search, value) > _at_most(search):
        return gates.otherwise().run(search, value, None, weigh)
    query, key, value, allowed, shifts = search.seen(value)
    if allowed is None:
        return _attention(search, query, key, value, known)
    whole = allowed.expand(*allowed.shape[:-1], search.width)
    chooses, lost = whole.any(-1, keepdim=True), key.isnan().any(-1)  # (..., N, 1), (..., r)
    reached = torch.einsum("...nm,...m->...n", whole.to(query.dtype), lost.to(query.dtype))[..., None] > 0
    # Who may choose nobody sees everybody instead, which is defined, and counts 0.
    mask, dtype = _as_one(whole | ~chooses, shifts, known.beta)
    output = _attention(search, query, _kept(key, lost), value, known, mask=mask, dtype=dtype)
    return output * torch.where(reached, torch.nan, chooses.float()).to(output.dtype)


def _is_attention(search: Search, value: Tensor, known: Known) -> bool:
    """Whether it is a softmax of dot products, and not of nothing."""
    is_softmax = known.mode == SOFTMAX and search.own_score is None
    is_dot = forms.known(search.similarity) and forms.kind(search.similarity) == "dot"
    lead = together(shapes.lead_of(search), value.shape[:-2])
    fits = 0 < prod(lead) <= gates.ENTRIES and search.query.shape[-2] > 0 and value.shape[-1] > 0
    return is_softmax and is_dot and fits


def _replaces(search: Search, value: Tensor) -> bool:
    """Whether torch's kernels put -inf where the future is, and do not add it: then a NaN there is not seen."""
    return search.query.is_cuda and search.query.shape[-1] % ALIGNED == 0 and value.shape[-1] % ALIGNED == 0


def _past(search: Search) -> tuple[Tensor, Tensor]:
    """Which keys hold a NaN, ``(..., M)``, and which queries see one of these in their past, ``(..., N, 1)``."""
    lost = search.key.isnan().any(-1)
    last = search.rows[:, 0].clamp(max=lost.shape[-1] - 1)
    return lost, (lost.cumsum(-1) > 0).index_select(-1, last)[..., None]


def _kept(key: Tensor, lost: Tensor) -> Tensor:
    return torch.where(lost[..., None], 0.0, key)


def _entries(search: Search, value: Tensor) -> int:
    """How many numbers the masks have as one tensor, or its gradient has."""
    tensors = [mask.table if isinstance(mask, Lookup) else mask for mask in search.mask]
    given = [mask for mask in tensors if isinstance(mask, Tensor)]
    among = [] if search.candidates is None else [search.candidates]
    lead = together(*(tensor.shape[:-2] for tensor in (*given, *among)))
    learned = torch.is_grad_enabled() and any(mask.requires_grad for mask in given)
    if learned or (len(lead) > 2 and prod(lead) > 1):
        lead = together(shapes.lead_of(search), value.shape[:-2])
    by_key = all(isinstance(mask, Tensor) and mask.shape[-2] == 1 for mask in search.mask)
    return prod(lead) * (1 if by_key and not learned else search.query.shape[-2]) * search.width


def _at_most(search: Search) -> int:
    """As many as chunked would hold, or as the caller holds anyway."""
    return max(chunked.at_most(None, search.query), *(m.numel() for m in search.mask if isinstance(m, Tensor)), 0)


def _as_one(allowed: Tensor, shifts: list[Tensor], beta: Tensor | float | None) -> tuple[Tensor, torch.dtype | None]:
    """All masks as one, of what is weighed; and the type its digits need."""
    if not shifts:
        return allowed, None
    total = sum((shift.float() for shift in shifts[1:]), shifts[0].float())
    total = shapes.not_below(total if beta is None else total * beta, LEAST)
    return torch.where(allowed, total, -torch.inf), reduce(torch.promote_types, (shift.dtype for shift in shifts))


def _attention(
    search: Search,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    known: Known,
    *,
    mask: Tensor | None = None,
    dtype: torch.dtype | None = None,
    causal: bool = False,
) -> Tensor:
    """Torch's attention in the widest of the types."""
    lead = together(shapes.lead_of(search), value.shape[:-2])
    form = forms.form(search.similarity, query, key)
    dtype = reduce(torch.promote_types, (form.query.dtype, value.dtype), dtype or value.dtype)
    query, scale = form.query, form.scale
    if isinstance(known.beta, Tensor):
        query = wide(query) * known.beta
    elif known.beta is not None:
        # A negative scale would have torch's kernels look for the smallest score.
        query, scale = -query if known.beta < 0 else query, scale * abs(known.beta)
    query, key, values = (shapes.folded(tensor.to(dtype), lead) for tensor in (query, form.key, value))
    if mask is not None:
        mask = shapes.lead_folded(mask if mask.dtype == torch.bool else mask.to(dtype), lead)
    output = F.scaled_dot_product_attention(
        query, key, values, attn_mask=mask, dropout_p=known.dropout_p, is_causal=causal, scale=scale
    )
    return shapes.unfolded(output, lead).to(value.dtype)

"""Searches over few keys, whose scores one program holds: the whole operator in one kernel, and so its backward."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from convnn import checks
from convnn.backends.triton import shapes
from convnn.backends.triton.few_ops import attended
from convnn.backends.triton.modes import Known
from convnn.forms import Form
from convnn.neighbors import together
from convnn.search import Search

# So many keys or candidates are few, and so many channels fit beside them; of single precision half as many of either.
KEYS, CHANNELS = 64, 128
# What the kernels take for forbidden; a finite number of the caller's, however low, is not.
FORBIDDEN, LEAST = -3.2e38, -1e38


def takes(search: Search, form: Form, value: Tensor, known: Known) -> bool:
    """Whether the kernels for few keys run this search; shapes and options decide, never numbers."""
    if torch.compiler._is_exporting_flag:
        return False  # sizes must stay symbolic
    widest = max(search.query.shape[-1], value.shape[-1])
    narrow = widest <= CHANNELS and search.k <= search.width <= KEYS
    narrow = narrow and (value.itemsize == 2 or search.width <= KEYS // 2 or widest <= CHANNELS // 2)
    plain = search.own is None and search.order == "score" and form.kind == "dot" and known.dropout_p == 0.0
    # Of scores that count backwards the first is not the largest.
    rising = not isinstance(known.beta, float) or known.beta > 0
    return narrow and plain and rising and _is_small(search, value)


def _is_small(search: Search, value: Tensor) -> bool:
    """Whether masks that are evaluated entry by entry may be so at once."""
    if len(shapes.fuse(search).others) == 0:
        return True
    lead = together(shapes.lead_of(search), value.shape[:-2])
    return prod(lead) * search.query.shape[-2] * search.width <= shapes.ENTRIES


def attend(search: Search, form: Form, value: Tensor, kernel: Tensor | None, known: Known) -> Tensor:
    """Run the whole operator."""
    lead = together(shapes.lead_of(search), value.shape[:-2])
    masks = shapes.fuse(search)
    bias = None
    if masks.padding is not None:
        bias = torch.where(masks.padding, 0.0, FORBIDDEN).expand(*masks.padding.shape[:-1], search.width)
        bias = shapes.folded(bias, lead)[..., 0, :]
    among = None
    if search.candidates is not None:
        # They are sorted: the last is the largest.
        checks.stop_beyond("candidates", search.candidates[..., 0, -1], search.key.shape[-2])
        among = shapes.folded(search.candidates, lead)[..., 0, :]
    allowed, shift = _evaluated(search, masks.others, lead)
    beta = known.beta if isinstance(known.beta, Tensor) else None
    taps = None if kernel is None else kernel.squeeze(1).contiguous()
    output = attended(
        *(shapes.folded(tensor, lead) for tensor in (form.query, form.key, value)),
        *(taps, bias, among, allowed, shift, beta, search.k, known.mode, form.scale),
        *(known.beta if isinstance(known.beta, float) else 1.0, masks.causal, masks.window),
    )
    return shapes.unfolded(output, lead)


def _evaluated(search: Search, others: tuple[Any, ...], lead: Any) -> tuple[Tensor | None, Tensor | None]:
    """Who may choose whom, and what is added to the scores, with its gradient."""
    if not others:
        return None, None
    allowed, shifts = replace(search, mask=others).entries()
    shift = shapes.not_below(sum((each.float() for each in shifts[1:]), shifts[0].float()), LEAST) if shifts else None
    return _laid_out(search, allowed, lead), _laid_out(search, shift, lead)


def _laid_out(search: Search, entry: Tensor | None, lead: Any) -> Tensor | None:
    shape = (search.query.shape[-2], search.width)
    return None if entry is None else shapes.folded(entry.expand(*entry.shape[:-2], *shape), lead)

"""What keys are ranked by: their scores, or what orders them alike and matrix units multiply faster."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from convnn import forms
from convnn.backends.triton import shapes
from convnn.backends.triton.mix import directions, levels
from convnn.forms import Form, Kind
from convnn.search import Search
from convnn.similarity import cosine


class Ranks(NamedTuple):
    """Queries, keys and a number per key that is added to their product, or that the product is multiplied with.

    Args:
        scales: whether it is multiplied.
        kind: what the score is that keys are ranked for.
        by_difference: whether the squared distance is meant, not the product.
        per_shift: what a number added to the score counts here.
        scored: whether the product, times a number above 0 that is the same for all pairs, is the score.
    """

    query: Tensor
    key: Tensor
    per_key: Tensor | None = None
    scales: bool = False
    kind: Kind = "dot"
    by_difference: bool = False
    per_shift: float = 1.0
    scored: bool = True


def ranks(search: Search, form: Form) -> Ranks:
    """Rank the keys of a search whose scores have this form."""
    return _levelled(search)[0] if _levels(search) else _as_scored(form)


@torch.no_grad()
def marked(search: Search) -> tuple[Ranks, Tensor, Tensor]:
    """Rank keys where nothing is learned through scores, and mark by NaN which queries and keys have one."""
    if _levels(search):
        return _levelled(search)
    if search.similarity is cosine:
        (query, no_query), (key, no_key) = directions(search.query), directions(search.key)
        return _as_scored(Form(query, key)), no_query, no_key
    form = forms.form(search.similarity, search.query, search.key)
    return _as_scored(form), _lost(search.query), _lost(search.key)


def _levels(search: Search) -> bool:
    """Whether keys are ranked without the length of their query: it does not change their order, unless it is shifted.

    Directions of half types would have to be held in single precision.
    """
    half = search.query.dtype != torch.float32 and search.query.dtype == search.key.dtype
    return half and search.similarity is cosine and all(map(shapes.says_bool, search.mask))


@torch.no_grad()
def _levelled(search: Search) -> tuple[Ranks, Tensor, Tensor]:
    (query, _, no_query), (key, factor, no_key) = levels(search.query), levels(search.key)
    return Ranks(query, key, factor, scales=True, scored=False), no_query, no_key


def _as_scored(form: Form) -> Ranks:
    told: Any = {"kind": form.kind, "by_difference": form.by_difference, "per_shift": form.per_shift}
    return Ranks(*form.ranked(), **told, scored=form.kind == "dot")


def _lost(rows: Tensor) -> Tensor:
    return torch.where(rows.isnan().any(-1), torch.nan, 0.0)

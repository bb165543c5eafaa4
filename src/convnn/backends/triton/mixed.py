"""From the records of the operator to the kernels that mix channels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from convnn import forms
from convnn.backends.triton import shapes
from convnn.backends.triton.mix import directions, mix
from convnn.forms import Form
from convnn.neighbors import together
from convnn.search import Search
from convnn.similarity import cosine


def combine(value: Tensor, index: Tensor, weights: Tensor | None, kernel: Tensor, *lost: Tensor) -> Tensor:
    """Combine neighbours with a kernel that mixes channels; every one counts once if there are no weights.

    Args:
        lost: of every query and of every key, 0, or NaN where it has one: the rows it reaches become NaN.
    """
    lead = together(value.shape[:-2], index.shape[:-2])
    given = None if weights is None else shapes.folded(weights.float(), lead).contiguous()
    slots = shapes.folded(index, lead).contiguous()
    marks: Any = [shapes.folded(mark[..., None], lead)[..., 0].contiguous() for mark in lost] or [None, None]
    return shapes.unfolded(mix(shapes.folded(value, lead), slots, given, kernel, *marks), lead)


@torch.no_grad()
def ranked(search: Search) -> tuple[Form, Tensor, Tensor]:
    """What keys are ranked by where nothing is learned through scores, and which queries and keys are lost to a NaN."""
    if search.similarity is cosine:
        (query, no_query), (key, no_key) = directions(search.query), directions(search.key)
        return Form(query, key), no_query, no_key
    return forms.form(search.similarity, search.query, search.key), _lost(search.query), _lost(search.key)


def _lost(rows: Tensor) -> Tensor:
    return torch.where(rows.isnan().any(-1), torch.nan, 0.0)

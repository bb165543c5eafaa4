"""How a layer chooses, said in the plain values the page knows; what they cannot say becomes a note."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from convnn import laid
from convnn.blend import Blend
from convnn.candidates import Cells, grid, random
from convnn.layers.windows import Nearness
from convnn.masks import Rule, causal, near
from convnn.search import Search
from convnn.similarity import SIMILARITIES, Bilinear, Mahalanobis, Similarity
from convnn.weighting import WEIGHTINGS, LearnedTemperature, softmax_at
from convnn_lab.explorer.layer import Choices, Layer
from convnn_lab.explorer.places import Map

MASK_BITS = 2**24
"""a mask of more pairs is not kept"""


def layer(name: str, module: Any, search: Search, places: Map, features: Tensor | None = None) -> Layer:
    """A layer from one of its searches.

    Args:
        features: what stands in the cells, where the search compares places alone.
    """
    query, key, similarity, in_space = _features(search, features)
    own, notes = _similar(search.similarity, similarity, in_space)
    k: Any = "all" if search.everything else search.k
    first: Any = "any" if search.own is None else "first" if search.own_score is None else "one"
    weighed, more = _weighting(module.weighting)
    own = replace(own, k=k, self=first, **weighed)
    among, candidates = _candidates(search, places, key.shape[0])
    rule, mask, masked = _mask(search, places)
    own = replace(own, **among, **rule)
    same = query is not None and torch.equal(query, key[:, places.own_keys()])
    said = (*notes, *more, *masked)
    return Layer(name, type(module).__name__, places, key, None if same else query, own, candidates, mask, said)


def _heads(tensor: Tensor) -> Tensor:
    """The first sample, ``(H, N, E)``."""
    whole = tensor if tensor.ndim > 2 else tensor[None]
    return (whole.flatten(0, -4)[0] if whole.ndim > 3 else whole[:1]).detach().float().cpu()


def _features(search: Search, features: Tensor | None) -> tuple[Tensor | None, Tensor, Similarity, bool]:
    """Queries and keys without their places, and what compares them."""
    similarity = search.similarity
    if isinstance(similarity, Nearness):
        if features is None:
            raise ValueError("a search in space needs the features of the cells to show them")
        return None, _heads(features), SIMILARITIES["cosine"], True
    query, key = _heads(search.query), _heads(search.key)
    if isinstance(similarity, Blend):
        query, key, similarity = query[..., similarity.axes :], key[..., similarity.axes :], similarity.features
    if isinstance(similarity, Bilinear):
        return query @ similarity.weight.detach().float().cpu(), key, SIMILARITIES["dot"], False
    if isinstance(similarity, Mahalanobis):
        factor = similarity.factor.detach().float().cpu()
        return query @ factor, key @ factor, SIMILARITIES["euclidean"], False
    return query, key, similarity, False


def _similar(given: Similarity, features: Similarity, in_space: bool) -> tuple[Choices, tuple[str, ...]]:
    names = {id(known): name for name, known in SIMILARITIES.items()}
    name, notes = names.get(id(features)), list[str]()
    if name is None:
        notes.append("compares by a similarity the page does not know; shown by cosine")
    own = Choices(
        similarity=name or "cosine", space="window" if in_space else "chebyshev", share=0.0 if in_space else 1.0
    )
    if isinstance(given, Blend):
        space = "window" if isinstance(given.space, Nearness) else names.get(id(given.space))
        if space not in ("window", "chebyshev", "euclidean", "sqeuclidean", "manhattan"):
            notes.append("compares places by a similarity the page does not know; shown by Chebyshev distance")
            space = "chebyshev"
        own = replace(own, share=float(given.share), space=space)
    return own, tuple(notes)


def _weighting(given: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    if isinstance(given, softmax_at | LearnedTemperature):
        return {"weighting": "softmax_at", "temperature": float(given.temperature)}, ()
    name = next((name for name, known in WEIGHTINGS.items() if known is given), None)
    if name is None:
        return {"weighting": "uniform"}, ("weighs in a way the page does not know; shown by equal weights",)
    return {"weighting": name}, ()


def _candidates(search: Search, places: Map, heads: int) -> tuple[dict[str, Any], Tensor | None]:
    """The rule that gives the candidates, or the candidates."""
    if search.candidates is None:
        return {}, None
    taken = search.candidates[..., 0, :].detach().cpu()  # (..., r)
    count = taken.shape[-1]
    cells, here = Cells((places.keys,) if places.before else places.cells), torch.device("cpu")
    if taken.ndim == 1:
        if torch.equal(taken, random(count).eval()(torch.Size(()), cells, here).sort().values):
            return {"candidates": "random", "count": count}, None
        steps = round(count**0.5) ** 2 if len(cells.size) > 1 else count
        regular = grid(count)(torch.Size(()), cells, here) if steps == count else None
        if regular is not None and torch.equal(taken, regular):
            return {"candidates": "grid", "count": count}, None
    each = taken.reshape(-1, count)[:heads] if taken.ndim > 1 else taken[None]
    return {"candidates": "own", "count": count}, each


def _mask(search: Search, places: Map) -> tuple[dict[str, Any], Tensor | None, tuple[str, ...]]:
    """The rule that forbids, or who is allowed."""
    if not search.mask:
        return {}, None, ()
    only = search.mask[0] if len(search.mask) == 1 else None
    if only is causal:
        return {"mask": "causal"}, None, ()
    entry = only.entry if isinstance(only, Rule) else None
    if isinstance(entry, partial) and entry.func is near:
        return {"mask": "window", "radius": entry.keywords["radius"]}, None, ()
    if places.queries * places.keys > MASK_BITS:
        return {}, None, ("has a mask that is too large to be shown; shown without it",)
    allowed, shifts = laid.combine(laid.block(mask, search.rows, 0, places.keys) for mask in search.mask)
    notes = ("adds numbers to its scores that are not shown here",) if shifts else ()
    if allowed is None or (allowed.ndim > 2 and allowed.shape[:-2].numel() > 1):
        return {}, None, (*notes, *(("has a mask for each head; shown without it",) if allowed is not None else ()))
    bits = allowed.reshape(allowed.shape[-2:]).expand(places.queries, places.keys).cpu()
    return ({}, None, notes) if bool(bits.all()) else ({"mask": "own"}, bits, notes)

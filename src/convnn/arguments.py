"""From the arguments of the operator to its records: names resolved, everything checked, autocast settled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from convnn import checks, watching
from convnn.backends import Backend, Choice, choose
from convnn.candidates import Candidates, Cells
from convnn.masks import MASKS, Lookup, Mask
from convnn.names import resolve
from convnn.neighbors import Neighbors, wide
from convnn.relative import RelativeBias
from convnn.search import Order, Search, SelfScore
from convnn.selection import SELECTIONS, Selection, is_hard
from convnn.similarity import SIMILARITIES, Similarity
from convnn.weighting import WEIGHTINGS, Weigh, Weighting


class Values(NamedTuple):
    """What is combined, and with what."""

    value: Tensor
    kernel: Tensor | None
    bias: Tensor | None

    def under_autocast(self) -> Values:
        """Take the type autocast asks for, as torch's convolutions and attention do."""
        checks.tensors(**self._given())
        if _autocast_on(self.value.device):
            dtype = torch.get_autocast_dtype(self.value.device.type)
            return Values(*(x if x is None or x.dtype == torch.float64 else x.to(dtype) for x in self))  # type: ignore[arg-type]
        return self

    def check(self, k: int) -> None:
        """Require a kernel and a bias that fit the values and k."""
        checks.same_dtype(**self._given())
        checks.combined(self.value, k, self.kernel, self.bias)

    def _given(self) -> dict[str, Tensor]:
        optional = {"kernel": self.kernel, "bias": self.bias}
        return {"value": self.value, **{name: tensor for name, tensor in optional.items() if tensor is not None}}

    def shift(self, output: Tensor) -> Tensor:
        """Add the bias, if there is one."""
        return output if self.bias is None else output + self.bias


def search(
    query: Tensor,
    key: Tensor,
    *,
    k: int | Literal["all"],
    similarity: Similarity | str,
    mask: Mask | str | Sequence[Mask | str] | None,
    candidates: Tensor | Candidates | None,
    self_index: Tensor | None,
    self_score: SelfScore,
    order: Order,
    has_kernel: bool = False,
    selection: Selection | str = "hard",
) -> Search:
    """Check what decides the neighbours, and put it into a record."""
    checks.compared(query, key)
    if query.dtype != key.dtype and _autocast_on(query.device):
        query, key = wide(query), wide(key)
    checks.same_dtype(query=query, key=key)
    checks.one_of("order", order, ("score", "key"))
    n_queries, n_keys = query.shape[-2], key.shape[-2]
    chosen = resolve("similarity", similarity, SIMILARITIES)
    among = _candidates(candidates, query, key)
    own = _own(self_index, query, n_queries, n_keys)
    checks.one_of("self_score", self_score, ("true", "one"))
    count = checks.neighbor_count(k, n_keys, has_kernel=has_kernel)
    if among is not None:
        count = checks.neighbor_count(k, among.shape[-1], among="candidates")
        # All candidates, and oneself beside them.
        count = count + 1 if isinstance(k, str) and own is not None else count
    given_masks = mask if isinstance(mask, (list, tuple)) else () if mask is None else (mask,)
    laid = tuple(_mask(each, query, n_queries, n_keys) for each in given_masks)
    score = 1.0 if self_score == "one" else None
    relaxed = _relaxed(selection, everybody=isinstance(k, str))
    built = Search(query, key, laid, chosen, count, order, isinstance(k, str), among, own, score, relaxed)
    checks.leading(**_tensors(built))
    return built


def _relaxed(selection: Selection | str, *, everybody: bool) -> Selection | None:
    """The selection, or None where the K nearest count once: where all win, there is nothing to choose."""
    chosen: Selection = resolve("selection", selection, SELECTIONS)
    return None if everybody or is_hard(chosen) else chosen


def _tensors(search: Search) -> dict[str, Tensor]:
    laid = [getattr(mask, "table", mask) for mask in search.mask if isinstance(mask, (Tensor, Lookup))]
    names = ["mask"] if len(laid) == 1 else [f"mask {number}" for number in range(len(laid))]
    narrowed = {"candidates": search.candidates, "self_index": search.own}
    given = {name: tensor for name, tensor in narrowed.items() if tensor is not None}
    return {"query": search.query, "key": search.key, **dict(zip(names, laid, strict=True)), **given}


def _candidates(candidates: Tensor | Candidates | None, query: Tensor, key: Tensor) -> Tensor | None:
    if candidates is None:
        return None
    n_keys = key.shape[-2]
    if not isinstance(candidates, Tensor):
        if not callable(candidates):
            raise TypeError(f"candidates must be None, an index or a callable, got {candidates!r}")
        lead = checks.leading(query=query, key=key)
        chosen = candidates(lead, Cells((n_keys,)), query.device)
        if chosen is None:
            return None
        candidates = chosen
    checks.places("candidates", candidates, "(..., r)", n_keys)
    checks.same_device(query=query, candidates=candidates)
    if candidates.shape[-1] == 0:
        raise ValueError("there must be at least one candidate, got none")
    # Sorted, so that of equally near ones the one of smaller number comes first.
    return candidates.sort(dim=-1).values[..., None, :]


def _own(self_index: Tensor | None, query: Tensor, n_queries: int, n_keys: int) -> Tensor | None:
    if self_index is None:
        return None
    checks.places("self_index", self_index, "(..., N)", n_keys)
    checks.same_device(query=query, self_index=self_index)
    if self_index.shape[-1] != n_queries:
        came = tuple(self_index.shape)
        raise ValueError(f"self_index must name a key for each of the {n_queries} queries, got a shape of {came}")
    return self_index[..., :, None]


def _mask(mask: Mask | str, query: Tensor, n_queries: int, n_keys: int) -> Mask:
    if isinstance(mask, RelativeBias):
        mask = mask.on(mask.size)
    if isinstance(mask, Lookup):
        checks.same_device(query=query, mask=mask.table)
        table = mask.table
        if table.ndim < 2 or table.shape[-2] != 1 or not table.is_floating_point():
            came = f"{tuple(table.shape)} of {table.dtype}"
            raise ValueError(f"the table of a lookup must be floating point of shape (..., 1, T), got {came}")
    if not isinstance(mask, Tensor):
        rule = resolve("mask", mask, MASKS)
        sizes = getattr(rule, "sizes", None)
        if sizes is not None and sizes != (n_queries, n_keys):
            raise ValueError(f"the mask is for {sizes} queries and keys, got {(n_queries, n_keys)}")
        return rule
    checks.same_device(query=query, mask=mask)
    return checks.mask_tensor(mask, n_queries, n_keys)


def weigh(weighting: Weighting | str, dropout_p: float) -> Weigh:
    """Check what decides the weights, and put it into a record."""
    checks.probability(dropout_p)
    return Weigh(resolve("weighting", weighting, WEIGHTINGS), dropout_p)


def scores_matter(search: Search, weigh: Weigh) -> None:
    """Require weights that depend on scores where something can be learned in no other way."""
    reason, blind = getattr(search.similarity, "needs_scores", None), weigh.ignores_scores
    if search.selection is not None:
        if not blind and not getattr(weigh.weighting, "proportional", False):
            name = getattr(weigh.weighting, "__name__", type(weigh.weighting).__name__)
            raise ValueError(f"a selection that is not hard needs uniform weights or a softmax, got {name}")
    elif reason and blind:
        raise ValueError(
            f"{reason} needs a weighting that depends on scores, such as softmax, or a selection with a gradient, such "
            "as straight_through: nothing would flow to it"
        )


def choice(backend: str | Backend, search: Search, values: Values) -> Choice:
    """Check that what is combined fits what is searched, and find the backend for both."""
    checks.same_device(query=search.query, value=values.value)
    values.check(search.k)
    if values.value.shape[-2] != search.key.shape[-2]:
        came = f"{values.value.shape[-2]} values for {search.key.shape[-2]} keys"
        raise ValueError(f"there must be a value for every key, got {came}")
    checks.leading(**_tensors(search), value=values.value)
    return choose(backend, search, values.value, values.kernel)


def aggregate(
    value: Tensor,
    neighbors: Neighbors,
    kernel: Tensor | None,
    bias: Tensor | None = None,
    *,
    weigh: Weigh,
    backend: str | Backend,
) -> Tensor:
    """Check and run the second half of the operator."""
    values = Values(value, kernel, bias).under_autocast()
    neighbors = Neighbors(*neighbors)
    checks.neighbors(value, neighbors)
    values.check(neighbors.index.shape[-1])
    chosen = choose(backend, None, values.value, values.kernel).backend
    with autocast_off(value.device):
        weights = weigh(neighbors.scores, neighbors.filled)
        return values.shift(chosen.aggregate(values.value, neighbors.index, weights, values.kernel))


def seen(search: Search, select: Callable[[Search], Neighbors], weigh: Weigh) -> None:
    """Let whoever looks on see what was searched."""
    if watching.anyone():
        shape = (*checks.leading(**_tensors(search)), search.query.shape[-2], search.k)
        watching.show(search.key.shape[-2], shape, lambda: select(search), weigh)


def _autocast_on(device: torch.device) -> bool:
    # The meta device has no autocast, and asking for it raises.
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def autocast_off(device: torch.device) -> AbstractContextManager[Any]:
    """Keep autocast out of scores and sums: 8 bits of a score would tie neighbours that differ."""
    return torch.autocast(device.type, enabled=False) if _autocast_on(device) else nullcontext()

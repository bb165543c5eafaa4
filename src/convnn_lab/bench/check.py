"""Whether the operator is right: what it chose, what it returns and every gradient, before anything is timed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import and_
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from convnn.functional import convnn, nearest
from convnn.masks import Rule
from convnn_lab.bench.measure import Function

# How far a chosen score may be below one that was not, relative to it, and a norm from what it should be.
CHOSEN = {torch.float32: 2**-20, torch.bfloat16: 2**-15, torch.float16: 2**-15}
ERROR = {torch.float32: 1e-4, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
NAMES = ("output", "gradient of query", "gradient of key", "gradient of value", "gradient of kernel")
# So many scores in float64 are looked at together.
SCORES = 2**26


def check(
    case: object,
    inputs: Sequence[Tensor],
    k: int,
    candidates: Tensor | None = None,
    *,
    rules: Sequence[Rule] = (),
    rows: Tensor | None = None,
    similarity: str = "scaled_dot",
    weighting: str = "softmax",
) -> None:
    """Hold the operator against float64 on a few heads; raise where it differs.

    The neighbours must have the K largest scores of their row, up to what the search promises. Output and gradients are
    compared with a computation from those same neighbours. Rows in which two of them, or the last and the next, are too
    close to say which comes first are not compared beyond that: their gradients are pulled with 0.

    Args:
        rules: who may be chosen.
        rows: the queries that are looked at, each with K keys to choose at least; None for all.
        similarity: ``"scaled_dot"`` or ``"cosine"``.
        weighting: ``"softmax"`` or ``"uniform"``.

    Shape:
        inputs: query ``(B, H, N, d)``, key and value ``(B, H, M, d)``, and a kernel ``(O, d, K)`` or ``(d, 1, K)`` if
        there is one.
    """
    given = [tensor.detach() for tensor in (*(tensor[:1, :2] for tensor in inputs[:3]), *inputs[3:])]
    rows = torch.arange(given[0].shape[-2], device=given[0].device) if rows is None else rows
    options: dict[str, Any] = {"k": k, "candidates": candidates, "similarity": similarity, "mask": list(rules) or None}
    index = nearest(*given[:2], **options).index[..., rows, :]
    among: Any = {"candidates": candidates, "rules": rules, "numbers": rows, "similarity": similarity}
    told = _chosen(case, [given[0][..., rows, :], given[1]], index, **among)
    pull = told[..., None] * torch.randn_like(_output(given)[..., rows, :])

    def ours(*leaves: Tensor) -> Tensor:
        return convnn(*leaves, weighting=weighting, **options)[..., rows, :]

    def exact(query: Tensor, *others: Tensor) -> Tensor:
        return gathered(query[..., rows, :], *others, index=index, similarity=similarity, weighting=weighting)

    mine = _step(ours, given, pull, told)
    theirs = _step(exact, [tensor.double() for tensor in given], pull.double(), told)
    for name, one, other in zip(NAMES, mine, theirs, strict=False):
        # Nothing flows to queries and keys where all neighbours count alike.
        error = ((one.double() - other).norm() / other.norm().clamp(min=1e-30)).item()
        if not error <= ERROR[given[0].dtype]:
            raise ValueError(f"{case}: the {name} is off by {error:.1e} of its norm; nothing is timed")


def _output(given: Sequence[Tensor]) -> Tensor:
    """Something of the shape and the type of the output."""
    query, value, *kernel = given[0], *given[2:]
    return query.new_empty((*query.shape[:-1], kernel[0].shape[0] if kernel else value.shape[-1]))


def gathered(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Tensor | None = None,
    *,
    index: Tensor,
    similarity: str = "scaled_dot",
    weighting: str = "softmax",
) -> Tensor:
    """The operator from neighbours ``index`` (..., N, K) that are known, in their order."""
    query, key = _compared(query, key, similarity)
    near, taken = taken_from(key, index), taken_from(value, index)  # (..., N, K, d)
    scores = torch.einsum("...ne,...nke->...nk", query, near)
    weights = scores.softmax(-1) if weighting == "softmax" else torch.ones_like(scores)
    if kernel is None:
        return torch.einsum("...nk,...nkc->...nc", weights, taken)
    if kernel.shape[1] == 1:
        return torch.einsum("...nk,...nkc,ck->...nc", weights, taken, kernel[:, 0])
    return torch.einsum("...nkc,ock->...no", weights[..., None] * taken, kernel)


def taken_from(tensor: Tensor, index: Tensor) -> Tensor:
    """The rows ``(..., N, K, d)`` of a tensor ``(..., M, d)`` that an index ``(..., N, K)`` names."""
    rows = index.flatten(-2)[..., None]
    return tensor.gather(-2, rows.expand(*rows.shape[:-1], tensor.shape[-1])).unflatten(-2, index.shape[-2:])


def _compared(query: Tensor, key: Tensor, similarity: str) -> tuple[Tensor, Tensor]:
    """What the scores are the dot product of."""
    if similarity == "cosine":
        return F.normalize(query, dim=-1), F.normalize(key, dim=-1)
    return query * query.shape[-1] ** -0.5, key


def _chosen(
    case: object,
    given: Sequence[Tensor],
    index: Tensor,
    *,
    candidates: Tensor | None,
    rules: Sequence[Rule],
    numbers: Tensor,
    similarity: str,
) -> Tensor:
    """Check the neighbours of the rows of these numbers, and say in which of them their order is beyond doubt."""
    query, key = _compared(given[0].double(), given[1].double(), similarity)
    distinct = (index.sort(-1).values.diff(dim=-1) > 0).all() and (index >= 0).all()
    if not distinct or not (candidates is None or torch.isin(index, candidates).all()):
        raise ValueError(f"{case}: a row has a neighbour twice, or one it may not choose; nothing is timed")
    size, parts, count = key.norm(dim=-1).amax(-1, keepdim=True), [], max(1, SCORES // key.shape[-2])
    columns = torch.arange(key.shape[-2], device=key.device)
    for rows, slots, i in zip(query.split(count, -2), index.split(count, -2), numbers.split(count), strict=True):
        scores = rows @ key.mT  # (..., N, M)
        if rules:
            allowed = reduce(and_, [rule(i[:, None], columns[None]) for rule in rules])
            scores = scores.masked_fill(~allowed, -torch.inf)
        chosen = scores.gather(-1, slots).sort(-1, descending=True).values
        scores = scores if candidates is None else scores[..., candidates]
        best, after = _first(scores, index.shape[-1])
        slack = CHOSEN[given[0].dtype] * best.abs() + 2**-20 * (rows.norm(dim=-1) * size)[..., None]
        if not (best - chosen <= slack).all():
            raise ValueError(f"{case}: a row's neighbours are not its nearest keys; nothing is timed")
        # The last of them must be told from the first that is none, too.
        parts.append((chosen - torch.cat([chosen[..., 1:], after], -1) > slack).all(-1))
    told = torch.cat(parts, -1)
    if not told.any():
        raise ValueError(f"{case}: no row has neighbours far enough apart to compare; nothing is timed")
    return told


def _first(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of a row, and the one after them, or less than any where there is none."""
    best = scores.topk(min(k + 1, scores.shape[-1])).values
    return best[..., :k], best[..., k:] if best.shape[-1] > k else torch.full_like(best[..., :1], -torch.inf)


def _step(function: Function, given: Sequence[Tensor], pull: Tensor, told: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in given]
    output = function(*leaves)
    grads = torch.autograd.grad(output, leaves, pull, allow_unused=True, materialize_grads=True)
    return [output.detach()[told], *grads]

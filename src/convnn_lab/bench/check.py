"""Whether the operator is right: what it chose, what it returns and every gradient, before anything is timed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from convnn.functional import convnn, nearest
from convnn_lab.bench.measure import Function

# How far a chosen score may be below one that was not, relative to it, and a norm from what it should be.
CHOSEN = {torch.float32: 2**-20, torch.bfloat16: 2**-15, torch.float16: 2**-15}
ERROR = {torch.float32: 1e-4, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
NAMES = ("output", "gradient of query", "gradient of key", "gradient of value", "gradient of kernel")


def check(case: object, inputs: Sequence[Tensor], k: int, candidates: Tensor | None = None) -> None:
    """Hold the operator against float64 on a few heads; raise where it differs.

    The neighbours must have the K largest scores of their row, up to what the search promises. Output and gradients are
    compared with a computation from those same neighbours. Rows in which two of them are too close to say which comes
    first are not compared beyond that: their gradients are pulled with 0.

    Shape:
        inputs: query, key and value ``(B, H, N, d)``, and a kernel ``(d, 1, K)`` or none.
    """
    given = [tensor.detach() for tensor in (*(tensor[:1, :2] for tensor in inputs[:3]), *inputs[3:])]
    index = nearest(*given[:2], k=k, candidates=candidates).index
    told = _chosen(case, given, index, candidates)
    pull = torch.randn_like(given[0]) * told[..., None]

    def ours(*leaves: Tensor) -> Tensor:
        return convnn(*leaves, k=k, candidates=candidates)

    def exact(*leaves: Tensor) -> Tensor:
        return gathered(*leaves, index=index)

    mine = _step(ours, given, pull, told)
    theirs = _step(exact, [tensor.double() for tensor in given], pull.double(), told)
    for name, one, other in zip(NAMES, mine, theirs, strict=False):
        error = ((one.double() - other).norm() / other.norm()).item()
        if not error <= ERROR[given[0].dtype]:
            raise ValueError(f"{case}: the {name} is off by {error:.1e} of its norm; nothing is timed")


def gathered(query: Tensor, key: Tensor, value: Tensor, kernel: Tensor | None = None, *, index: Tensor) -> Tensor:
    """The operator from neighbours ``index`` (..., N, K) that are known, in their order."""
    rows = index.flatten(-2)[..., None]
    near, taken = (
        tensor.gather(-2, rows.expand(*rows.shape[:-1], tensor.shape[-1])).unflatten(-2, index.shape[-2:])
        for tensor in (key, value)
    )  # (..., N, K, d)
    weights = (torch.einsum("...ne,...nke->...nk", query, near) * query.shape[-1] ** -0.5).softmax(-1)
    if kernel is None:
        return torch.einsum("...nk,...nkc->...nc", weights, taken)
    return torch.einsum("...nk,...nkc,ck->...nc", weights, taken, kernel[:, 0])


def _chosen(case: object, given: Sequence[Tensor], index: Tensor, candidates: Tensor | None) -> Tensor:
    """Check the neighbours, and say in which rows their order is beyond doubt."""
    query, key = (tensor.double() for tensor in given[:2])
    distinct = (index.sort(-1).values.diff(dim=-1) > 0).all() and (index >= 0).all()
    if not distinct or not (candidates is None or torch.isin(index, candidates).all()):
        raise ValueError(f"{case}: a row has a neighbour twice, or one it may not choose; nothing is timed")
    size, parts = key.norm(dim=-1).amax(-1, keepdim=True), []
    for rows, slots in zip(query.split(1024, -2), index.split(1024, -2), strict=True):
        scores = rows @ key.mT  # (..., N, N)
        best = (scores if candidates is None else scores[..., candidates]).topk(index.shape[-1]).values
        chosen = scores.gather(-1, slots).sort(-1, descending=True).values
        slack = CHOSEN[given[0].dtype] * best.abs() + 2**-20 * (rows.norm(dim=-1) * size)[..., None]
        if not (best - chosen <= slack).all():
            raise ValueError(f"{case}: a row's neighbours are not its nearest keys; nothing is timed")
        parts.append((chosen[..., :-1] - chosen[..., 1:] > slack[..., :-1]).all(-1))
    told = torch.cat(parts, -1)
    if not told.any():
        raise ValueError(f"{case}: no row has neighbours far enough apart to compare; nothing is timed")
    return told


def _step(function: Function, given: Sequence[Tensor], pull: Tensor, told: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in given]
    output = function(*leaves)
    return [output.detach()[told], *torch.autograd.grad(output, leaves, pull)]

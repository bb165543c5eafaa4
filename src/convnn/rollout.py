"""What a token sees through all layers: attention rollout as a product of sparse matrices."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from convnn import checks
from convnn.inside import Call, Record
from convnn.neighbors import together


def sparse_rollout(
    seen: Record | Sequence[Call], *, tokens: Sequence[int] | Tensor | None = None, forward: int = -1
) -> Tensor:
    r"""Combine the attention layers of one pass into the share every token has in what others see.

    .. math::
        R = \bar A_L \cdots \bar A_2 \bar A_1, \qquad
        \bar A_l = \tfrac12 I + \tfrac12 \operatorname{mean}_h A_{l,h}

    with the rows of :math:`A_l`, the recorded weights at the keys they belong to, divided by their sums; a token that
    chose nobody keeps to itself. The matrices stay sparse. With ``tokens`` only their rows are computed, which is all
    that is ever held.

    Args:
        seen: what :func:`~convnn.record` saw, or calls in the order of their layers.
        tokens: the tokens whose rows are wanted, such as ``[0]`` for a class token; None for all.
        forward: which pass of a record; -1 is the last.

    Shape:
        ``(B, tokens, N)``, or sparse ``(B, N, N)`` where all are wanted; B is the leading dimensions as one, heads
        left out. Rows sum to 1.

    Example:
        >>> import convnn
        >>> model = convnn.models.create("vit_tiny", layer="convnn", image_size=64)
        >>> with convnn.record(model) as seen:
        ...     y = model(torch.randn(1, 3, 64, 64))
        >>> convnn.sparse_rollout(seen, tokens=[0]).shape
        torch.Size([1, 1, 17])
    """
    calls = _of_pass(seen, forward) if isinstance(seen, Record) else list(seen)
    if not calls:
        raise ValueError("a rollout needs at least one layer, and nothing was recorded")
    size = calls[0].index.shape[-2]
    for call in calls:
        _check(call, size)
    lead = together(*(_lead(call) for call in calls))
    layers = (_matrix(call, lead) for call in calls)
    batch = lead.numel()
    if tokens is None:
        whole = next(layers)
        for layer in layers:
            whole = _times(layer, whole)
        return _unblocked(whole.coalesce(), batch, size)
    chosen = torch.as_tensor(tokens, device=calls[0].index.device)
    checks.places("tokens", chosen, "(T,)", size, every=True)
    rows = _start(chosen, batch, size, calls[0].weights.dtype)  # (B * N, T)
    for layer in reversed(list(layers)):
        rows = _times(layer.t(), rows)
    return rows.unflatten(0, (batch, size)).mT.contiguous()


def _of_pass(seen: Record, forward: int) -> list[Call]:
    if not -seen.forwards <= forward < seen.forwards:
        raise ValueError(f"forward must name one of the {seen.forwards} recorded passes, got {forward}")
    number = forward % seen.forwards
    return [call for call in seen.calls if call.forward == number]


def _check(call: Call, size: int) -> None:
    name = call.layer or "the model"
    queries = call.index.shape[-2]
    if queries != call.keys or queries != size:
        said = f"{name} has {queries} queries and {call.keys} keys where the first layer has {size}"
        raise ValueError(f"a rollout needs layers in which the same tokens choose among themselves; {said}")
    if bool((call.weights < 0).any()):
        raise ValueError(f"a rollout needs weights that are shares, at least 0; {name} has smaller ones")


def _lead(call: Call) -> torch.Size:
    return call.index.shape[: -2 if call.heads is None else -3]


def _matrix(call: Call, lead: torch.Size) -> Tensor:
    """One layer with its residual for the whole batch, sparse and block by block on the diagonal."""
    heads = 1 if call.heads is None else call.heads
    size, slots = call.index.shape[-2:]
    index, weights = (
        tensor.reshape(*_lead(call), heads, size, slots)
        .expand(*lead, heads, size, slots)
        .reshape(-1, heads, size, slots)
        for tensor in (call.index, call.weights)
    )
    first = torch.arange(index.shape[0], device=index.device)[:, None, None, None] * size
    rows = first + torch.arange(size, device=index.device)[:, None]
    total = weights.sum((1, 3), keepdim=True)  # over heads and slots
    alone = total == 0
    shares = weights / torch.where(alone, 1.0, total) / 2
    # What nobody was chosen with is kept by oneself.
    own = 0.5 + 0.5 * alone.to(weights.dtype).flatten()
    diagonal = torch.arange(own.numel(), device=own.device)
    filled = (index >= 0).flatten()
    places = torch.stack([rows.expand_as(index).flatten()[filled], (first + index).flatten()[filled]])
    places = torch.cat([places, diagonal.expand(2, -1)], 1)
    values = torch.cat([shares.flatten()[filled], own])
    return _sparse(places, values, (own.numel(),) * 2)


@contextmanager
def _calmly() -> Iterator[None]:
    """Without what torch says of its own ways with sparse tensors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse (CSR tensor support is in beta|invariant checks are implicitly)")
        yield


def _sparse(places: Tensor, values: Tensor, size: tuple[int, ...]) -> Tensor:
    """A sparse tensor; what is at one place is summed."""
    with _calmly():
        return torch.sparse_coo_tensor(places, values, size, check_invariants=False).coalesce()


def _times(left: Tensor, right: Tensor) -> Tensor:
    with _calmly():
        return torch.sparse.mm(left, right)


def _start(tokens: Tensor, batch: int, size: int, dtype: torch.dtype) -> Tensor:
    rows = torch.zeros(batch, size, tokens.numel(), dtype=dtype, device=tokens.device)
    rows[:, tokens, torch.arange(tokens.numel(), device=tokens.device)] = 1
    return rows.flatten(0, 1)


def _unblocked(whole: Tensor, batch: int, size: int) -> Tensor:
    """From blocks on a diagonal to a batch."""
    rows, columns = whole.indices()
    places = torch.stack([rows // size, rows % size, columns % size])
    return _sparse(places, whole.values(), (batch, size, size))

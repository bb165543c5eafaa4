"""ConvNN as the thesis describes it, in plain PyTorch: the baseline every faster way is measured against.

All scores of a head, their K largest, the values gathered and weighed, and a convolution whose stride is its size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def convnn(
    query: Tensor, key: Tensor, value: Tensor, kernel: Tensor, k: int, candidates: Tensor | None = None
) -> Tensor:
    """Scaled dot product, softmax over the K nearest, depthwise kernel.

    Shape:
        query, key, value ``(B, H, N, d)``, kernel ``(d, 1, K)``, candidates ``(r,)``.
    """
    if candidates is not None:
        key, value = key.index_select(-2, candidates), value.index_select(-2, candidates)
    batch, heads, n, channels = query.shape
    scores = query @ key.mT * channels**-0.5  # (B, H, N, N)
    best, index = scores.topk(k, dim=-1)
    weights = best.softmax(-1)
    flat = index.flatten(-2)[..., None].expand(-1, -1, -1, channels)
    taken = value.gather(-2, flat).unflatten(-2, (n, k)) * weights[..., None]  # (B, H, N, K, d)
    laid = taken.flatten(2, 3).mT.reshape(batch * heads, channels, n * k)
    return F.conv1d(laid, kernel, stride=k, groups=channels).mT.unflatten(0, (batch, heads))


def kvt(query: Tensor, key: Tensor, value: Tensor, k: int) -> Tensor:
    """KVT attention by a mask: everything below the K-th largest score of a row is forbidden."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    least = scores.topk(k, dim=-1).values[..., -1:]
    return scores.masked_fill(scores < least, -torch.inf).softmax(-1) @ value


def mixed(query: Tensor, cells: Tensor, kernel: Tensor, k: int, weighting: str) -> Tensor:
    """The most similar cells by cosine, and a kernel that mixes their channels.

    Shape:
        query ``(B, N, C)``, cells ``(B, M, C)``, kernel ``(O, C, K)``.
    """
    taken = _alike(query, cells, k, weighting)
    return F.conv1d(taken.flatten(1, 2).mT, kernel, stride=k).mT


def contracted(query: Tensor, cells: Tensor, kernel: Tensor, k: int, weighting: str) -> Tensor:
    """The same, the convolution written as a product."""
    return torch.einsum("bnkc,ock->bno", _alike(query, cells, k, weighting), kernel)


def _alike(query: Tensor, cells: Tensor, k: int, weighting: str) -> Tensor:
    scores = F.normalize(query, dim=-1) @ F.normalize(cells, dim=-1).mT  # (B, N, M)
    best, index = scores.topk(k, dim=-1)
    flat = index.flatten(1)[..., None].expand(-1, -1, cells.shape[-1])
    taken = cells.gather(1, flat).unflatten(1, index.shape[1:])  # (B, N, K, C)
    return taken if weighting == "uniform" else taken * best.softmax(-1)[..., None]

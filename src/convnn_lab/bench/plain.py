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

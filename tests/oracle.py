"""The operator once more, as loops over Python numbers: nothing here is shared with the library."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Vector = Sequence[float]


def _dot(a: Vector, b: Vector) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def _cosine(a: Vector, b: Vector) -> float:
    lengths = math.hypot(*a) * math.hypot(*b)
    return _dot(a, b) / lengths if lengths else 0.0


def _pearson(a: Vector, b: Vector) -> float:
    return _cosine([x - math.fsum(a) / len(a) for x in a], [x - math.fsum(b) / len(b) for x in b])


SIMILARITIES: dict[str, Callable[[Vector, Vector], float]] = {
    "dot": _dot,
    "scaled_dot": lambda a, b: _dot(a, b) / math.sqrt(len(a)),
    "cosine": _cosine,
    "euclidean": lambda a, b: -math.dist(a, b),
    "sqeuclidean": lambda a, b: -math.fsum((x - y) ** 2 for x, y in zip(a, b, strict=True)),
    "pearson": _pearson,
    "manhattan": lambda a, b: -math.fsum(abs(x - y) for x, y in zip(a, b, strict=True)),
    "chebyshev": lambda a, b: -max(abs(x - y) for x, y in zip(a, b, strict=True)),
}


def _softmax(scores: Vector) -> list[float]:
    powers = [math.exp(s - max(scores)) for s in scores]
    return [p / math.fsum(powers) for p in powers]


def _sparsemax(scores: Vector) -> list[float]:
    """The threshold t at which the parts above it sum to 1, by bisection."""
    low, high = max(scores) - 1.0, max(scores)
    for _ in range(200):
        middle = (low + high) / 2
        above = math.fsum(max(s - middle, 0.0) for s in scores)
        low, high = (middle, high) if above > 1 else (low, middle)
    return [max(s - low, 0.0) for s in scores]


WEIGHTINGS: dict[str, Callable[[Vector], list[float]]] = {
    "uniform": lambda s: [1.0] * len(s),
    "softmax": _softmax,
    "softmin": lambda s: _softmax([-x for x in s]),
    "sparsemax": _sparsemax,
}


def neighbors(
    query: Tensor,
    key: Tensor,
    k: int,
    similarity: str,
    mask: Tensor | None = None,
    order: str = "score",
    *,
    candidates: Sequence[int] | None = None,
    own: Sequence[int] | None = None,
    own_score: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Scores and indices for one query matrix (N, E) and one key matrix (M, E)."""
    near = SIMILARITIES[similarity]
    scores, index = [], []
    for i, q in enumerate(query.tolist()):
        oneself = -1 if own is None else own[i]
        row = []
        for j, x in enumerate(key.tolist()):
            if candidates is not None and j not in candidates and j != oneself:
                continue
            shift = 0.0 if mask is None else mask[i, j].item()
            if mask is not None and mask.dtype == torch.bool:
                shift = 0.0 if mask[i, j] else -math.inf
            if shift != -math.inf:
                score = own_score if j == oneself and own_score is not None else near(q, x)
                row.append((j != oneself, -(score + shift), j))
        chosen = sorted(row)[:k]
        if order == "key":
            chosen.sort(key=lambda found: found[2])
        empty = k - len(chosen)
        scores.append([-s for _, s, _ in chosen] + [-math.inf] * empty)
        index.append([j for _, _, j in chosen] + [-1] * empty)
    return torch.tensor(scores, dtype=torch.float64), torch.tensor(index)


def aggregate(
    value: Tensor, scores: Tensor, index: Tensor, weighting: str, kernel: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Combine for one value matrix (M, C)."""
    channels = value.shape[1]
    per_group = channels if kernel is None else kernel.shape[1]
    outputs = channels if kernel is None else kernel.shape[0]
    out = torch.zeros(index.shape[0], outputs, dtype=torch.float64)
    for i, (row, slots) in enumerate(zip(scores.tolist(), index.tolist(), strict=True)):
        filled = [slot for slot, j in enumerate(slots) if j >= 0]
        weights = WEIGHTINGS[weighting]([row[slot] for slot in filled]) if filled else []
        for o in range(outputs):
            total = 0.0 if bias is None else bias[o].item()
            for slot, w in zip(filled, weights, strict=True):
                if kernel is None:
                    total += w * value[slots[slot], o].item()
                    continue
                group = o // (outputs // (channels // per_group))
                for c in range(per_group):
                    total += w * value[slots[slot], group * per_group + c].item() * kernel[o, c, slot].item()
            out[i, o] = total
    return out


def over_leading(function: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    """Call a function of matrices for every leading index, broadcast."""
    given = [t for t in tensors if t is not None]
    lead = torch.broadcast_shapes(*(t.shape[:-2] for t in given))
    whole = [None if t is None else t.expand(*lead, *t.shape[-2:]) for t in tensors]
    places = itertools.product(*map(range, lead))
    results = [function(*(None if t is None else t[place] for t in whole)) for place in places]
    return torch.stack(results).unflatten(0, lead) if lead else results[0]

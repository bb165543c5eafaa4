"""What the kernels share that work slot by slot: who is gathered, scores of pairs, and dropout."""

import triton
import triton.language as tl

# How pairs are scored, and how scores become weights.
DOT = tl.constexpr(0)
DISTANCE = tl.constexpr(1)
SQUARE = tl.constexpr(2)
UNIFORM = tl.constexpr(0)
SOFTMAX = tl.constexpr(1)
GIVEN = tl.constexpr(2)


@triton.jit
def score_pairs(q, k, scale, KIND: tl.constexpr):
    """Scores of rows and keys, and what one's gradient is multiplied with on its way to either."""
    if KIND == DOT:
        s = tl.sum(q * k, axis=1) * scale
        factor = tl.zeros_like(s) + scale
    else:
        d = q - k
        square = tl.sum(d * d, axis=1)
        if KIND == DISTANCE:
            root = tl.sqrt(square)
            s = -root
            factor = tl.where(root > 0, 1.0 / tl.where(root > 0, root, 1.0), 0.0)
        else:
            s = -square
            factor = tl.zeros_like(s) + 2.0
    return s, factor


@triton.jit
def kept(SEED, place, dropout):
    """1/(1 - p) where a weight is kept, 0 where it is dropped."""
    return tl.where(tl.rand(tl.load(SEED), place) >= dropout, 1.0 / (1.0 - dropout), 0.0)


@triton.jit
def load_slots(P, j, stride, C, CP: tl.constexpr, FULL: tl.constexpr):
    """The rows that fill some slots, ``(rows, slots, channels)``: a thread holds all slots of its row and channels."""
    c = tl.arange(0, CP)
    place = P + j[:, :, None] * stride + c[None, None, :]
    if FULL:
        return tl.load(place, mask=(j >= 0)[:, :, None], other=0.0)
    return tl.load(place, mask=(j >= 0)[:, :, None] & (c < C)[None, None, :], other=0.0)


@triton.jit
def score_slots(q, k, scale, KIND: tl.constexpr):
    """Scores of some slots, and what gradients of scores are multiplied with on their way to queries and keys."""
    if KIND == DOT:
        s = tl.sum(q[:, None, :] * k, axis=2) * scale
        factor = tl.zeros_like(s) + scale
    else:
        d = q[:, None, :] - k
        s = -tl.sum(d * d, axis=2)
        factor = tl.zeros_like(s) + 2.0
        if KIND == DISTANCE:
            s = -tl.sqrt(-s)
            factor = tl.where(s < 0, 1.0 / tl.where(s < 0, -s, 1.0), 0.0)
    return s, factor

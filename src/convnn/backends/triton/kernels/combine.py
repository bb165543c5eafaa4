"""Score the chosen pairs, weigh them, and combine their values."""

import triton
import triton.language as tl

from convnn.backends.triton.kernels.tiles import load_line, load_rows

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
def combine_rows(
    Q,
    K,
    V,
    W,
    I,
    S,
    P,
    BETA,
    SEED,
    OWN,
    Y,
    L,
    row,
    row_ok,
    z,
    N,
    scale,
    own_score,
    dropout,
    sqn,
    skn,
    svn,
    syn,
    E: tl.constexpr,
    EP: tl.constexpr,
    C: tl.constexpr,
    CP: tl.constexpr,
    KK: tl.constexpr,
    BM: tl.constexpr,
    KIND: tl.constexpr,
    WEIGHT: tl.constexpr,
    SORTED: tl.constexpr,
    SCORED: tl.constexpr,
    HAS_W: tl.constexpr,
    HAS_S: tl.constexpr,
    HAS_BETA: tl.constexpr,
    HAS_OWN: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Combine the neighbours of BM rows; I, S, P and OWN start at row 0 of this entry.

    P holds given weights, or the scores of the search where these are what is weighed.
    """
    c = tl.arange(0, CP)
    acc = tl.zeros([BM, CP], tl.float32)
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    lost = tl.zeros([BM], tl.float32)
    beta = 1.0
    if WEIGHT != GIVEN:
        if not SCORED:
            q = load_rows(Q, row, row_ok, sqn, E, EP, 0, E == EP).to(tl.float32)
        if HAS_BETA:
            beta = tl.load(BETA)
        if HAS_OWN:
            own = tl.load(OWN + row, mask=row_ok, other=-1)
    for slot in tl.range(KK, loop_unroll_factor=1):
        j = tl.load(I + row * KK + slot, mask=row_ok, other=-1).to(tl.int32)
        filled = j >= 0
        v = load_rows(V, j, filled, svn, C, CP, 0, C == CP).to(tl.float32)
        if WEIGHT == GIVEN:
            p = tl.load(P + row * KK + slot, mask=filled, other=0.0).to(tl.float32)
        else:
            if SCORED:
                s = tl.load(P + row * KK + slot, mask=filled, other=0.0) * scale
            else:
                k = load_rows(K, j, filled, skn, E, EP, 0, E == EP).to(tl.float32)
                s, _ = score_pairs(q, k, scale, KIND)
            if HAS_OWN:
                s = tl.where((j == own) & (s == s), own_score, s)
            if HAS_S:
                s += tl.load(S + row * KK + slot, mask=filled, other=0.0)
            if WEIGHT == UNIFORM:
                # A NaN reaches the row whatever the weights are.
                p = tl.where(filled, tl.where(s == s, 1.0, s), 0.0)
                lost += tl.where(filled & (s != s), s, 0.0)
            else:
                s = tl.where(filled, s * beta, float("-inf"))
                if SORTED:
                    if slot == 0:
                        top = tl.where(filled, s, 0.0)
                else:
                    # Softmax as it goes: what was summed is scaled whenever the largest score grows.
                    higher = tl.maximum(top, s)
                    safe = tl.where(higher == float("-inf"), 0.0, higher)
                    old = tl.exp(top - safe)
                    acc *= old[:, None]
                    total *= old
                    top = higher
                p = tl.exp(s - tl.where(top == float("-inf"), 0.0, top))
                total += p
        if DROPOUT:
            p *= kept(SEED, ((z * N + row) * KK + slot), dropout)
        if HAS_W:
            w = load_line(W + slot * C, c, C, C == CP)
            acc += (p[:, None] * v) * w[None, :]
        else:
            acc += p[:, None] * v
    if WEIGHT == SOFTMAX:
        full = total != 0.0
        acc = acc * (1.0 / tl.where(full, total, 1.0))[:, None]
        tl.store(L + row, tl.where(full, top + tl.log(tl.where(full, total, 1.0)), float("-inf")), mask=row_ok)
    if WEIGHT == UNIFORM:
        acc += lost[:, None]
    tl.store(Y + row[:, None] * syn + c[None, :], acc.to(Y.dtype.element_ty), mask=row_ok[:, None] & (c < C)[None, :])


@triton.jit
def combine(
    Q,
    K,
    V,
    W,
    I,
    S,
    P,
    BETA,
    SEED,
    OWN,
    Y,
    L,
    N,
    H,
    scale,
    own_score,
    dropout,
    sqb,
    sqh,
    sqn,
    skb,
    skh,
    skn,
    svb,
    svh,
    svn,
    syb,
    syh,
    syn,
    sib,
    sih,
    E: tl.constexpr,
    EP: tl.constexpr,
    C: tl.constexpr,
    CP: tl.constexpr,
    KK: tl.constexpr,
    BM: tl.constexpr,
    KIND: tl.constexpr,
    WEIGHT: tl.constexpr,
    SORTED: tl.constexpr,
    SCORED: tl.constexpr,
    HAS_W: tl.constexpr,
    HAS_S: tl.constexpr,
    HAS_BETA: tl.constexpr,
    HAS_OWN: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Combine the neighbours of every row."""
    pid, z = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = z // H, z % H
    row = pid * BM + tl.arange(0, BM)
    combine_rows(
        Q + b * sqb + h * sqh, K + b * skb + h * skh, V + b * svb + h * svh, W, I + b * sib + h * sih,
        S + z * N * KK, P + z * N * KK, BETA, SEED, OWN + z * N, Y + b * syb + h * syh, L + z * N,
        row, row < N, z, N, scale, own_score, dropout, sqn, skn, svn, syn,
        E, EP, C, CP, KK, BM, KIND, WEIGHT, SORTED, SCORED, HAS_W, HAS_S, HAS_BETA, HAS_OWN, DROPOUT,
    )  # fmt: skip

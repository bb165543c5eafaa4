"""Score the chosen pairs, weigh them, and combine their values."""

import triton
import triton.language as tl

from convnn.backends.triton.kernels.slots import GIVEN, SOFTMAX, UNIFORM, kept, load_slots, score_slots
from convnn.backends.triton.kernels.tiles import load_rows

# Up to such scores, 15 of their digits move weights by less than half types can tell.
NEAR = tl.constexpr(8.0)


@triton.jit
def add_slots(
    acc,
    top,
    total,
    lost,
    q,
    own,
    beta,
    K,
    V,
    W,
    I,
    S,
    P,
    SEED,
    slots,
    row,
    row_ok,
    place,
    scale,
    own_score,
    dropout,
    skn,
    svn,
    E: tl.constexpr,
    EP: tl.constexpr,
    C: tl.constexpr,
    CP: tl.constexpr,
    KK: tl.constexpr,
    KIND: tl.constexpr,
    WEIGHT: tl.constexpr,
    SORTED: tl.constexpr,
    SCORED: tl.constexpr,
    HAS_W: tl.constexpr,
    HAS_S: tl.constexpr,
    HAS_OWN: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Add some slots of every row to what the slots before them came to."""
    at = row[:, None] * KK + slots[None, :]
    j = tl.load(I + at, mask=row_ok[:, None] & (slots < KK)[None, :], other=-1).to(tl.int32)
    filled = j >= 0
    v = load_slots(V, j, svn, C, CP, C == CP).to(tl.float32)
    if WEIGHT == GIVEN:
        p = tl.load(P + at, mask=filled, other=0.0).to(tl.float32)
    else:
        if SCORED:
            s = tl.load(P + at, mask=filled, other=0.0) * scale
        else:
            s, _ = score_slots(q, load_slots(K, j, skn, E, EP, E == EP).to(tl.float32), scale, KIND)
        if HAS_OWN:
            s = tl.where((j == own[:, None]) & (s == s), own_score, s)
        if HAS_S:
            s += tl.load(S + at, mask=filled, other=0.0)
        if WEIGHT == UNIFORM:
            # A NaN reaches the row whatever the weights are.
            p = tl.where(filled, tl.where(s == s, 1.0, s), 0.0)
            lost += tl.sum(tl.where(filled & (s != s), s, 0.0), axis=1)
        else:
            s = tl.where(filled, s * beta, float("-inf"))
            if not SORTED:
                # Softmax as it goes: what was summed is scaled whenever the largest score grows.
                higher = tl.maximum(top, tl.max(tl.where(s == s, s, float("-inf")), axis=1))
                old = tl.exp(top - tl.where(higher == float("-inf"), 0.0, higher))
                acc *= old[:, None, None]
                total *= old
                top = higher
            p = tl.exp(s - tl.where(top == float("-inf"), 0.0, top)[:, None])
            total += tl.sum(p, axis=1)
    if DROPOUT:
        p *= kept(SEED, place + at, dropout)
    v *= p[:, :, None]
    if HAS_W:
        c = tl.arange(0, CP)
        shown = (slots < KK)[:, None] & (c < C)[None, :]
        v *= tl.load(W + c[None, :] * KK + slots[:, None], mask=shown, other=0.0).to(tl.float32)[None, :, :]
    return acc + tl.sum(v, axis=1, keep_dims=True), top, total, lost


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
    row,
    row_ok,
    place,
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
    BS: tl.constexpr,
    REST: tl.constexpr,
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
    """Combine the neighbours of BM rows, BS slots at a time and then the rest; pointers are those of this entry.

    P holds given weights, or the scores of the search where these are what is weighed.
    """
    c = tl.arange(0, CP)
    # Three dimensions throughout: of two, Triton gives every thread whole rows once a number of a row scales them.
    acc = tl.zeros([BM, 1, CP], tl.float32)
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    lost = tl.zeros([BM], tl.float32)
    beta = 1.0
    if HAS_BETA:
        beta = tl.load(BETA)
    q = tl.zeros([BM, EP], tl.float32)
    if WEIGHT != GIVEN and not SCORED:
        q = load_rows(Q, row, row_ok, sqn, E, EP, 0, E == EP).to(tl.float32)
    own = tl.load(OWN + row, mask=row_ok, other=-1) if HAS_OWN else row
    if SORTED:
        top = tl.load(P + row * KK, mask=row_ok, other=0.0) * scale * beta
    for first in tl.range(0, KK - KK % BS, BS, loop_unroll_factor=1):
        acc, top, total, lost = add_slots(
            acc, top, total, lost, q, own, beta, K, V, W, I, S, P, SEED, first + tl.arange(0, BS), row, row_ok, place,
            scale, own_score, dropout, skn, svn, E, EP, C, CP, KK,
            KIND, WEIGHT, SORTED, SCORED, HAS_W, HAS_S, HAS_OWN, DROPOUT,
        )  # fmt: skip
    if REST > 0:
        acc, top, total, lost = add_slots(
            acc, top, total, lost, q, own, beta, K, V, W, I, S, P, SEED, KK - KK % BS + tl.arange(0, REST), row, row_ok,
            place, scale, own_score, dropout, skn, svn, E, EP, C, CP, KK,
            KIND, WEIGHT, SORTED, SCORED, HAS_W, HAS_S, HAS_OWN, DROPOUT,
        )  # fmt: skip
    if WEIGHT == SOFTMAX:
        acc = acc * (1.0 / tl.where(total != 0.0, total, 1.0))[:, None, None]
    if WEIGHT == UNIFORM:
        acc += lost[:, None, None]
    place = Y + row[:, None, None] * syn + c[None, None, :]
    tl.store(place, acc.to(Y.dtype.element_ty), mask=row_ok[:, None, None] & (c < C)[None, None, :])


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
    BS: tl.constexpr,
    REST: tl.constexpr,
    KIND: tl.constexpr,
    WEIGHT: tl.constexpr,
    SORTED: tl.constexpr,
    SCORED: tl.constexpr,
    ROUGH: tl.constexpr,
    HAS_W: tl.constexpr,
    HAS_S: tl.constexpr,
    HAS_BETA: tl.constexpr,
    HAS_OWN: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Combine the neighbours of every row; where scores are rough, those of rows whose scores are large are computed again."""
    pid, z = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = z // H, z % H
    row = pid * BM + tl.arange(0, BM)
    Q += b * sqb + h * sqh
    K += b * skb + h * skh
    V += b * svb + h * svh
    I += b * sib + h * sih
    S += z * N * KK
    P += z * N * KK
    OWN += z * N
    Y += b * syb + h * syh
    near = True
    if ROUGH:
        # The largest score of a row comes first; where it is small, so is what its lost digits change.
        top = tl.load(P + row * KK, mask=row < N, other=0.0) * scale
        if HAS_BETA:
            top *= tl.load(BETA)
        near = tl.min(((tl.abs(top) <= NEAR) | (top == float("-inf"))).to(tl.int32)) > 0
    if near:
        combine_rows(
            Q, K, V, W, I, S, P, BETA, SEED, OWN, Y, row, row < N, z * N * KK, scale, own_score, dropout, sqn, skn, svn,
            syn, E, EP, C, CP, KK, BM, BS, REST, KIND, WEIGHT, SORTED, SCORED, HAS_W, HAS_S, HAS_BETA, HAS_OWN, DROPOUT,
        )  # fmt: skip
    else:
        combine_rows(
            Q, K, V, W, I, S, P, BETA, SEED, OWN, Y, row, row < N, z * N * KK, scale, own_score, dropout, sqn, skn, svn,
            syn, E, EP, C, CP, KK, BM, BS, REST, KIND, WEIGHT, False, False, HAS_W, HAS_S, HAS_BETA, HAS_OWN, DROPOUT,
        )  # fmt: skip

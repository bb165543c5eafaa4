"""Backward by query, a few rows at a time with all their slots, which come in up to three pieces with little padding."""

import triton
import triton.language as tl

from convnn.backends.triton.kernels.slots import DOT, kept, load_slots, score_slots
from convnn.backends.triton.kernels.tiles import load_rows


@triton.jit
def score_piece(
    q, K, I, S, slots, row, ok, own, scale, own_score, beta, skn,
    E: tl.constexpr, EP: tl.constexpr, KK: tl.constexpr, KIND: tl.constexpr, HAS_S: tl.constexpr, HAS_OWN: tl.constexpr,
):  # fmt: skip
    """Who fills some slots, their keys and scores, what gradients of scores are multiplied with, and the largest."""
    at = row[:, None] * KK + slots[None, :]
    j = tl.load(I + at, mask=ok[:, None] & (slots < KK)[None, :], other=-1).to(tl.int32)
    k = load_slots(K, j, skn, E, EP, E == EP)
    s, factor = score_slots(q, k.to(tl.float32), scale, KIND)
    if HAS_OWN:
        fixed = (j == own[:, None]) & (s == s)
        s = tl.where(fixed, own_score, s)
        factor = tl.where(fixed, 0.0, factor)
    if HAS_S:
        s += tl.load(S + at, mask=j >= 0, other=0.0)
    u = tl.where(j >= 0, s * beta, float("-inf"))
    return j, k, s, factor, u, tl.max(tl.where(u == u, u, float("-inf")), axis=1)


@triton.jit
def pull_piece(
    V, W, SEED, dy, slots, j, at, dropout, svn,
    C: tl.constexpr, CP: tl.constexpr, KK: tl.constexpr, HAS_W: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Gradients of the weights of some slots, and which of them are kept."""
    t = load_slots(V, j, svn, C, CP, C == CP).to(tl.float32) * dy[:, None, :]
    if HAS_W:
        w = load_rows(W, slots, slots < KK, C, C, CP, 0, C == CP).to(tl.float32)
        t *= w[None, :, :]
    dp = tl.sum(t, axis=2)
    keep = tl.where(j >= 0, 1.0, 0.0)
    if DROPOUT:
        keep *= kept(SEED, at, dropout)
    return dp * keep, keep


@triton.jit
def give_piece(
    q, k, j, ds, factor, weight, PE, GE, DS, slots, row, ok, KK: tl.constexpr, KIND: tl.constexpr, HAS_S: tl.constexpr
):
    """Write what the pass by key needs of some slots; their part of the queries' gradients."""
    at = row[:, None] * KK + slots[None, :]
    ok = ok[:, None] & (slots < KK)[None, :]
    tl.store(PE + at, weight.to(PE.dtype.element_ty), mask=ok)
    if HAS_S:
        tl.store(DS + at, ds, mask=ok)
    g = ds * factor
    tl.store(GE + at, g.to(GE.dtype.element_ty), mask=ok)
    k = k.to(tl.float32)
    if KIND != DOT:
        k = tl.where((j >= 0)[:, :, None], k - q[:, None, :], 0.0)
    return tl.sum(g[:, :, None] * k, axis=1)


@triton.jit
def by_row(
    Q,
    K,
    V,
    W,
    I,
    S,
    BETA,
    SEED,
    OWN,
    DY,
    DQ,
    DS,
    DBETA,
    PE,
    GE,
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
    sdb,
    sdh,
    sdn,
    sib,
    sih,
    E: tl.constexpr,
    EP: tl.constexpr,
    C: tl.constexpr,
    CP: tl.constexpr,
    KK: tl.constexpr,
    P1: tl.constexpr,
    P2: tl.constexpr,
    P3: tl.constexpr,
    BM: tl.constexpr,
    TILES: tl.constexpr,
    KIND: tl.constexpr,
    WEIGHT: tl.constexpr,
    HAS_W: tl.constexpr,
    HAS_S: tl.constexpr,
    HAS_BETA: tl.constexpr,
    HAS_OWN: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Gradients of queries and slots; weights PE and gradients of scores GE for the pass by key.

    Weights are computed again from the scores alone.
    """
    pid, z = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = z // H, z % H
    Q += b * sqb + h * sqh
    K += b * skb + h * skh
    V += b * svb + h * svh
    DY += b * sdb + h * sdh
    I += b * sib + h * sih
    S += z * N * KK
    PE += z * N * KK
    GE += z * N * KK
    DS += z * N * KK
    e = tl.arange(0, EP)
    x1 = tl.arange(0, P1)
    if P2 > 0:
        x2 = P1 + tl.arange(0, P2)
    if P3 > 0:
        x3 = P1 + P2 + tl.arange(0, P3)
    beta = 1.0
    if HAS_BETA:
        beta = tl.load(BETA)
    for tile in range(TILES):
        row = (pid * TILES + tile) * BM + tl.arange(0, BM)
        ok = row < N
        place = z * N * KK + row[:, None] * KK
        dy = load_rows(DY, row, ok, sdn, C, CP, 0, C == CP).to(tl.float32)
        q = load_rows(Q, row, ok, sqn, E, EP, 0, E == EP).to(tl.float32)
        own = tl.load(OWN + z * N + row, mask=ok, other=-1) if HAS_OWN else row
        j1, k1, s1, f1, u1, m1 = score_piece(
            q, K, I, S, x1, row, ok, own, scale, own_score, beta, skn, E, EP, KK, KIND, HAS_S, HAS_OWN
        )
        top = m1
        if P2 > 0:
            j2, k2, s2, f2, u2, m2 = score_piece(
                q, K, I, S, x2, row, ok, own, scale, own_score, beta, skn, E, EP, KK, KIND, HAS_S, HAS_OWN
            )
            top = tl.maximum(top, m2)
        if P3 > 0:
            j3, k3, s3, f3, u3, m3 = score_piece(
                q, K, I, S, x3, row, ok, own, scale, own_score, beta, skn, E, EP, KK, KIND, HAS_S, HAS_OWN
            )
            top = tl.maximum(top, m3)
        top = tl.where(top == float("-inf"), 0.0, top)[:, None]
        p1 = tl.exp(u1 - top)
        total = tl.sum(p1, axis=1)
        if P2 > 0:
            p2 = tl.exp(u2 - top)
            total += tl.sum(p2, axis=1)
        if P3 > 0:
            p3 = tl.exp(u3 - top)
            total += tl.sum(p3, axis=1)
        share = (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
        d1, r1 = pull_piece(V, W, SEED, dy, x1, j1, place + x1[None, :], dropout, svn, C, CP, KK, HAS_W, DROPOUT)
        p1 *= share
        mean = tl.sum(p1 * d1, axis=1)
        if P2 > 0:
            d2, r2 = pull_piece(V, W, SEED, dy, x2, j2, place + x2[None, :], dropout, svn, C, CP, KK, HAS_W, DROPOUT)
            p2 *= share
            mean += tl.sum(p2 * d2, axis=1)
        if P3 > 0:
            d3, r3 = pull_piece(V, W, SEED, dy, x3, j3, place + x3[None, :], dropout, svn, C, CP, KK, HAS_W, DROPOUT)
            p3 *= share
            mean += tl.sum(p3 * d3, axis=1)
        d1 = p1 * (d1 - mean[:, None])  # of beta times the score
        dq = give_piece(q, k1, j1, d1 * beta, f1, p1 * r1, PE, GE, DS, x1, row, ok, KK, KIND, HAS_S)
        dbeta = tl.sum(d1 * tl.where(j1 >= 0, s1, 0.0), axis=1)
        if P2 > 0:
            d2 = p2 * (d2 - mean[:, None])
            dq += give_piece(q, k2, j2, d2 * beta, f2, p2 * r2, PE, GE, DS, x2, row, ok, KK, KIND, HAS_S)
            dbeta += tl.sum(d2 * tl.where(j2 >= 0, s2, 0.0), axis=1)
        if P3 > 0:
            d3 = p3 * (d3 - mean[:, None])
            dq += give_piece(q, k3, j3, d3 * beta, f3, p3 * r3, PE, GE, DS, x3, row, ok, KK, KIND, HAS_S)
            dbeta += tl.sum(d3 * tl.where(j3 >= 0, s3, 0.0), axis=1)
        into = DQ + (z * N + row)[:, None] * E + e[None, :]
        tl.store(into, dq.to(DQ.dtype.element_ty), mask=ok[:, None] & (e < E)[None, :])
        if HAS_BETA:
            tl.store(DBETA + z * N + row, dbeta, mask=ok)

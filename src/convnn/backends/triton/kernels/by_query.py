"""Backward by query, slot after slot: gradients of queries and slots."""

import triton
import triton.language as tl

from convnn.backends.triton.kernels.slots import DOT, SOFTMAX, kept, score_pairs
from convnn.backends.triton.kernels.tiles import load_line, load_rows


@triton.jit
def by_query(
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
    KP: tl.constexpr,
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

    Weights are computed again from the scores alone: what was summed before is scaled when a larger score comes.
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
    c = tl.arange(0, CP)
    e = tl.arange(0, EP)
    slots = tl.arange(0, KP)
    for tile in range(TILES):
        row = (pid * TILES + tile) * BM + tl.arange(0, BM)
        row_ok = row < N
        dy = load_rows(DY, row, row_ok, sdn, C, CP, 0, C == CP).to(tl.float32)
        beta = 1.0
        if WEIGHT == SOFTMAX:
            q = load_rows(Q, row, row_ok, sqn, E, EP, 0, E == EP).to(tl.float32)
            if HAS_BETA:
                beta = tl.load(BETA)
            if HAS_OWN:
                own = tl.load(OWN + z * N + row, mask=row_ok, other=-1)
            pull = tl.zeros([BM, EP], tl.float32)
            rest = tl.zeros([BM, EP], tl.float32)
            pulls = tl.zeros([BM, KP], tl.float32)
            logits = tl.full([BM, KP], float("-inf"), tl.float32)
            scores = tl.zeros([BM, KP], tl.float32)
            factors = tl.zeros([BM, KP], tl.float32)
            mean = tl.zeros([BM], tl.float32)
            total = tl.zeros([BM], tl.float32)
            top = tl.full([BM], float("-inf"), tl.float32)
        for slot in tl.range(KK, loop_unroll_factor=1):
            j = tl.load(I + row * KK + slot, mask=row_ok, other=-1).to(tl.int32)
            filled = j >= 0
            v = load_rows(V, j, filled, svn, C, CP, 0, C == CP).to(tl.float32)
            dyv = dy * v
            if HAS_W:
                w = load_line(W + slot * C, c, C, C == CP)
                dp = tl.sum(dyv * w[None, :], axis=1)
            else:
                dp = tl.sum(dyv, axis=1)
            if WEIGHT == SOFTMAX:
                if DROPOUT:
                    dp *= kept(SEED, (z * N + row) * KK + slot, dropout)
                k = load_rows(K, j, filled, skn, E, EP, 0, E == EP).to(tl.float32)
                s, factor = score_pairs(q, k, scale, KIND)
                if HAS_OWN:
                    fixed = (j == own) & (s == s)
                    s = tl.where(fixed, own_score, s)
                    factor = tl.where(fixed, 0.0, factor)
                if HAS_S:
                    s += tl.load(S + row * KK + slot, mask=filled, other=0.0)
                logit = tl.where(filled, s * beta, float("-inf"))
                higher = tl.maximum(top, logit)
                base = tl.where(higher == float("-inf"), 0.0, higher)
                fade = tl.exp(top - base)
                p = tl.exp(logit - base)
                top = higher
                total = total * fade + p
                mean = mean * fade + p * dp
                here = slots[None, :] == slot
                pulls = tl.where(here, dp[:, None], pulls)
                logits = tl.where(here, logit[:, None], logits)
                factors = tl.where(here, factor[:, None], factors)
                if HAS_BETA:
                    scores = tl.where(here, tl.where(filled, s, 0.0)[:, None], scores)
                if KIND != DOT:
                    k = tl.where(filled[:, None], k - q, 0.0)
                pull = pull * fade[:, None] + (p * dp * factor)[:, None] * k
                rest = rest * fade[:, None] + (p * factor)[:, None] * k
            else:
                tl.store(DS + row * KK + slot, tl.where(filled, dp, 0.0), mask=row_ok)
        if WEIGHT == SOFTMAX:
            share = 1.0 / tl.where(total == 0.0, 1.0, total)
            mean *= share
            ps = tl.exp(logits - tl.where(top == float("-inf"), 0.0, top)[:, None]) * share[:, None]
            ds = ps * (pulls - mean[:, None])  # of beta times the score
            if HAS_BETA:
                tl.store(DBETA + z * N + row, tl.sum(ds * scores, axis=1), mask=row_ok)
                ds *= beta
            ok = row_ok[:, None] & (slots < KK)[None, :]
            if DROPOUT:
                ps *= kept(SEED, (z * N + row)[:, None] * KK + slots[None, :], dropout)
            tl.store(PE + row[:, None] * KK + slots[None, :], ps.to(PE.dtype.element_ty), mask=ok)
            if HAS_S:
                tl.store(DS + row[:, None] * KK + slots[None, :], ds, mask=ok)
            g = ds * factors
            tl.store(GE + row[:, None] * KK + slots[None, :], g.to(GE.dtype.element_ty), mask=ok)
            dq = (pull - rest * mean[:, None]) * (share * beta)[:, None]
            tl.store(
                DQ + (z * N + row)[:, None] * E + e[None, :],
                dq.to(DQ.dtype.element_ty),
                mask=row_ok[:, None] & (e < E)[None, :],
            )

"""Backward by query for few slots: all of a row at once."""

import triton
import triton.language as tl

from convnn.backends.triton.kernels.combine import DOT, GIVEN, SOFTMAX, kept, score_pairs
from convnn.backends.triton.kernels.tiles import load_line, load_rows


@triton.jit
def by_row(
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
    L,
    DY,
    DQ,
    DW,
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
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
    WEIGHT: tl.constexpr,
    HAS_W: tl.constexpr,
    HAS_S: tl.constexpr,
    HAS_BETA: tl.constexpr,
    HAS_OWN: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """As ``by_query``, for few slots: all of a row at once, so that sums for the kernel stay in registers."""
    pid, z = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = z // H, z % H
    Q += b * sqb + h * sqh
    K += b * skb + h * skh
    V += b * svb + h * svh
    DY += b * sdb + h * sdh
    I += b * sib + h * sih
    S += z * N * KK
    P += z * N * KK
    PE += z * N * KK
    GE += z * N * KK
    DS += z * N * KK
    c = tl.arange(0, CP)
    e = tl.arange(0, EP)
    slots = tl.arange(0, KP)
    beta = 1.0
    if HAS_BETA:
        beta = tl.load(BETA)
    if HAS_W:
        dw = tl.zeros([KP, CP], tl.float32)
    for row in range(pid * ROWS, tl.minimum(pid * ROWS + ROWS, N)):
        at = row * KK + slots
        j = tl.load(I + at, mask=slots < KK, other=-1).to(tl.int32)
        filled = j >= 0
        v = load_rows(V, j, filled, svn, C, CP, 0, C == CP).to(tl.float32)
        dy = load_line(DY + row * sdn, c, C, C == CP)
        v *= dy[None, :]
        if HAS_W:
            taps = W + slots[:, None] * C + c[None, :]
            w = tl.load(taps, mask=(slots < KK)[:, None] & (c < C)[None, :], other=0.0).to(tl.float32)
            dp = tl.sum(v * w, axis=1)
        else:
            dp = tl.sum(v, axis=1)
        keep = 1.0
        if DROPOUT:
            keep = kept(SEED, z * N * KK + at, dropout)
        if WEIGHT == SOFTMAX:
            q = load_line(Q + row * sqn, e, E, E == EP)
            k = load_rows(K, j, filled, skn, E, EP, 0, E == EP).to(tl.float32)
            s, factor = score_pairs(q[None, :], k, scale, KIND)
            if HAS_OWN:
                fixed = (j == tl.load(OWN + z * N + row)) & (s == s)
                s = tl.where(fixed, own_score, s)
                factor = tl.where(fixed, 0.0, factor)
            if HAS_S:
                s += tl.load(S + at, mask=filled, other=0.0)
            p = tl.exp(tl.where(filled, s * beta - tl.load(L + z * N + row), float("-inf")))
            dp = dp * keep
            ds = p * (dp - tl.sum(p * dp, axis=0))  # of beta times the score
            weight = p * keep
            tl.store(PE + at, weight, mask=slots < KK)
            if HAS_BETA:
                tl.store(DBETA + z * N + row, tl.sum(ds * tl.where(filled, s, 0.0), axis=0))
                ds *= beta
            if HAS_S:
                tl.store(DS + at, ds, mask=slots < KK)
            g = ds * factor
            tl.store(GE + at, g, mask=slots < KK)
            if KIND != DOT:
                k = tl.where(filled[:, None], k - q[None, :], 0.0)
            dq = tl.sum(g[:, None] * k, axis=0)
            tl.store(DQ + (z * N + row) * E + e, dq.to(DQ.dtype.element_ty), mask=e < E)
        elif WEIGHT == GIVEN:
            weight = tl.load(P + at, mask=filled, other=0.0).to(tl.float32)
            tl.store(DS + at, tl.where(filled, dp, 0.0), mask=slots < KK)
        else:
            weight = tl.where(filled, 1.0, 0.0) * keep
        if HAS_W:
            dw += v * weight[:, None]
    if HAS_W:
        part = DW + (z * tl.num_programs(0) + pid) * KK * C
        ok = (slots < KK)[:, None] & (c < C)[None, :]
        tl.store(part + slots[:, None] * C + c[None, :], dw, mask=ok)

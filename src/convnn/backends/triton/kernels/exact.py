"""Rows that bins cannot compare, or with too many neighbours for them: a list that grows by insertion."""

import triton
import triton.language as tl

from convnn.backends.triton.kernels.tiles import LIMIT, lay, load_rows, score_tile


@triton.jit
def select_exact(
    Q,
    K,
    B,
    CAND,
    MASK,
    SHIFT,
    OWN,
    I,
    S,
    FLAGGED,
    COUNT,
    BAD,
    N,
    M,
    H,
    row0,
    sqb,
    sqh,
    sqn,
    skb,
    skh,
    skn,
    sbb,
    sbh,
    scb,
    sch,
    smb,
    smh,
    smn,
    ssb,
    ssh,
    ssn,
    sob,
    soh,
    sib,
    sih,
    tiles,
    E: tl.constexpr,
    EP: tl.constexpr,
    BE: tl.constexpr,
    KK: tl.constexpr,
    KP: tl.constexpr,
    BR: tl.constexpr,
    G: tl.constexpr,
    TP: tl.constexpr,
    ALL: tl.constexpr,
    HAS_B: tl.constexpr,
    HAS_CAND: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    HAS_OWN: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    DIFFERENCE: tl.constexpr,
    ROLLED: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The K best keys of all rows, BR at a time, where some key or query cannot be compared by bins.

    A list of K grows by insertion.
    """
    pid, z = tl.program_id(0), tl.program_id(1)
    b, h = (z // H).to(tl.int64), (z % H).to(tl.int64)
    Q += b * sqb + h * sqh
    K += b * skb + h * skh
    B += b * sbb + h * sbh
    CAND += b * scb + h * sch
    MASK += b * smb + h * smh
    SHIFT += b * ssb + h * ssh
    I += b * sib + h * sih
    S += z.to(tl.int64) * N * KK
    total = N
    if not ALL:
        tile = tl.arange(0, TP)
        bad = tl.max(tl.load(BAD + z * tiles + tile, mask=tile < tiles, other=0), axis=0)
        total = tl.where(bad > 0, N, 0)
    lane = tl.arange(0, G)
    slot = tl.arange(0, KP)
    for start in range(pid * BR, total, tl.num_programs(0) * BR):
        row = start + tl.arange(0, BR)
        row_ok = row < total
        own = tl.load(OWN + b * sob + h * soh + row, mask=row_ok, other=-1) if HAS_OWN else row
        q = load_rows(Q, row, row_ok, sqn, E, BE, 0, E == EP)
        # Slots beyond K are never the worst.
        best = tl.where((slot < KK)[None, :], float("-inf"), float("inf")) + tl.zeros([BR, KP], tl.float32)
        index = tl.full([BR, KP], -1, tl.int32)
        worst = tl.full([BR], float("-inf"), tl.float32)
        for t in range(tl.cdiv(M, G)):
            col = t * G + lane
            num, ok = tl.minimum(col, M - 1), col < M
            if HAS_CAND:
                num = tl.load(CAND + col, mask=ok, other=-1).to(tl.int32)
                ok = num >= 0
                num = tl.maximum(num, 0)
            s = score_tile(
                q, Q, K, row, num, row_ok, sqn, skn, E, EP, BE, BR, G, DIFFERENCE, ROLLED, INTERPRETED, PRECISION
            )  # fmt: skip
            lost = s != s
            s = tl.where(lost, 0.0, s)
            s = lay(
                s, B, MASK, SHIFT, row, col, num, row_ok, ok, own, row0, smn, ssn,
                HAS_B, HAS_MASK, HAS_SHIFT, HAS_OWN, CAUSAL, WINDOW, True,
            )  # fmt: skip
            allowed = (s > LIMIT) & row_ok[:, None]
            # NaN that may be chosen comes first.
            s = tl.where(lost, 3.4e38, tl.minimum(s, 3.3e38))
            fresh = allowed & (s > worst[:, None])
            while tl.max(fresh.to(tl.int32)) > 0:
                v = tl.max(tl.where(fresh, s, float("-inf")), axis=1)
                c = tl.min(tl.where(fresh & (s == v[:, None]), lane[None, :], G), axis=1)
                any_left = c < G
                # The last of the worst slots gives way.
                out = tl.max(tl.where(best == worst[:, None], slot[None, :], -1), axis=1)
                here = (slot[None, :] == out[:, None]) & any_left[:, None]
                best = tl.where(here, v[:, None], best)
                index = tl.where(here, (t * G + c)[:, None], index)
                worst = tl.min(best, axis=1)
                fresh = fresh & (lane[None, :] != c[:, None]) & (s > worst[:, None])
        best = tl.where((slot < KK)[None, :], best, float("-inf"))
        for k in range(KK):
            v = tl.max(best, axis=1)
            c = tl.min(tl.where(best == v[:, None], index, 2147483647), axis=1)
            found = (v > float("-inf")) & row_ok
            tl.store(I + row * KK + k, tl.where(found, c, -1).to(I.dtype.element_ty), mask=row_ok)
            tl.store(S + row * KK + k, tl.where(v == 3.4e38, float("nan"), v), mask=row_ok)
            best = tl.where((index == c[:, None]) & (best == v[:, None]), float("-inf"), best)

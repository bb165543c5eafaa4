"""Rows the stream could not certify: all keys of their drained bins."""

import triton
import triton.language as tl

from convnn.backends.triton.kernels.tiles import LIMIT, lay


@triton.jit
def repair(
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
    BM: tl.constexpr,
    G: tl.constexpr,
    T: tl.constexpr,
    BITS: tl.constexpr,
    TP: tl.constexpr,
    DEPTH: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_B: tl.constexpr,
    HAS_CAND: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    HAS_OWN: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    DIFFERENCE: tl.constexpr,
    PLAIN: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Make flagged rows exact: look at all keys of the bins that were drained, and choose again.

    A bin holds one key of every tile, so this is the G-th part of a row; and no more than K / T bins can be drained.
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
    tile = tl.arange(0, TP)
    count = tl.load(COUNT + z * tiles + tile, mask=tile < tiles, other=0)
    until = tl.cumsum(count, axis=0)
    slots = tl.arange(0, KP)
    depth = tl.arange(0, DEPTH)
    LOW: tl.constexpr = (1 << BITS) - 1
    for which in range(pid, tl.sum(count, axis=0), tl.num_programs(0)):
        # The tile a flagged row stands in, and its place there.
        inside = tl.sum((until <= which).to(tl.int32), axis=0)
        before = tl.sum(tl.where(until <= which, count, 0), axis=0)
        one = tl.load(FLAGGED + (z * tiles + inside).to(tl.int64) * BM + which - before)
        row = one + tl.zeros([1], tl.int32)
        row_ok = row >= 0
        own = tl.load(OWN + b * sob + h * soh + row, mask=row_ok, other=-1) if HAS_OWN else row
        index = tl.load(I + one * KK + slots, mask=slots < KK, other=-1).to(tl.int32)
        score = tl.load(S + one * KK + slots, mask=slots < KK, other=float("-inf"))
        lane = tl.where(index >= 0, (index % G + G - (13 * (index // G)) % G) % G, -1 - slots)
        drained = tl.where(tl.sum((lane[None, :] == lane[:, None]).to(tl.int32), axis=0) >= T, lane, -1)
        while tl.max(drained, axis=0) >= 0:
            c = tl.max(drained, axis=0)
            drained = tl.where(drained == c, -1, drained)
            lane = tl.where(index >= 0, (index % G + G - (13 * (index // G)) % G) % G, -1)
            score = tl.where(lane == c, float("-inf"), score)
            col = depth * G + (c + 13 * depth) % G
            ok = col < M
            num = tl.minimum(col, M - 1)
            if HAS_CAND:
                num = tl.load(CAND + col, mask=ok, other=-1).to(tl.int32)
                ok = num >= 0
                num = tl.maximum(num, 0)
            s = tl.zeros([DEPTH], tl.float32)
            for first in range(0, E, CHUNK):
                e = first + tl.arange(0, CHUNK)
                inner = e < E
                q = tl.load(Q + one * sqn + e, mask=inner, other=0.0).to(tl.float32)
                k = tl.load(K + num[:, None] * skn + e[None, :], mask=inner[None, :] & ok[:, None], other=0.0).to(
                    tl.float32
                )
                if DIFFERENCE:
                    d = k - q[None, :]
                    s -= tl.sum(tl.where(inner[None, :], d * d, 0.0), axis=1)
                else:
                    s += tl.sum(k * q[None, :], axis=1)
            s = lay(
                s[None, :], B, MASK, SHIFT, row, col, num, row_ok, ok, own, row0, smn, ssn,
                HAS_B, HAS_MASK, HAS_SHIFT, HAS_OWN, CAUSAL, WINDOW, True,
            )  # fmt: skip
            s = tl.sum(s, axis=0)
            if not PLAIN:
                s = (s.to(tl.int32, bitcast=True) & (-1 - LOW)).to(tl.float32, bitcast=True)
            s = tl.where(s > LIMIT, s, float("-inf"))
            better = tl.full([KP], float("-inf"), tl.float32)
            chosen = tl.full([KP], -1, tl.int32)
            for slot in range(KK):
                v = tl.maximum(tl.max(score, axis=0), tl.max(s, axis=0))
                mine = tl.min(tl.where(score == v, index, 2147483647), axis=0)
                theirs = tl.min(tl.where(s == v, col, 2147483647), axis=0)
                j = tl.minimum(mine, theirs)
                better = tl.where(slots == slot, v, better)
                chosen = tl.where(slots == slot, tl.where(v > LIMIT, j, -1), chosen)
                score = tl.where(index == j, float("-inf"), score)
                s = tl.where(col == j, float("-inf"), s)
            score = better
            index = chosen
        tl.store(I + one * KK + slots, index.to(I.dtype.element_ty), mask=slots < KK)
        tl.store(S + one * KK + slots, score, mask=slots < KK)

"""Any number of keys: a stream of tiles through bins in registers, and a certificate for every row."""

import triton
import triton.language as tl

from convnn.backends.triton.kernels.tiles import DRAINED, HUGE, LIMIT, NEVER, lay, load_rows, score_tile


@triton.jit
def insert(m1, m2, m3, m4, x, T: tl.constexpr):
    """Keep the T largest of each bin, three or four."""
    h = tl.maximum(m1, x)
    x = tl.minimum(m1, x)
    m1 = h
    h = tl.maximum(m2, x)
    x = tl.minimum(m2, x)
    m2 = h
    if T == 4:
        h = tl.maximum(m3, x)
        x = tl.minimum(m3, x)
        m3 = h
        m4 = tl.maximum(m4, x)
    else:
        m3 = tl.maximum(m3, x)
    return m1, m2, m3, m4


@triton.jit
def exchange(m, i, x, t):
    """Put the larger of two numbers into the bin, with the number of its tile, and hand on the other."""
    larger = x > m
    return tl.where(larger, x, m), tl.where(larger, t, i), tl.where(larger, m, x), tl.where(larger, i, t)


@triton.jit
def select_stream(
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
    E: tl.constexpr,
    EP: tl.constexpr,
    BE: tl.constexpr,
    KK: tl.constexpr,
    BM: tl.constexpr,
    G: tl.constexpr,
    T: tl.constexpr,
    BITS: tl.constexpr,
    HAS_B: tl.constexpr,
    HAS_CAND: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    HAS_OWN: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    DIFFERENCE: tl.constexpr,
    ROLLED: tl.constexpr,
    PLAIN: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The K best keys of each of BM rows.

    A bin keeps the best T of the keys it sees, each with the number of its tile in the low bits; then the best of all
    bins is taken K times. A bin of which all T were taken may hide a better key: that row is flagged.
    """
    pid, z = tl.program_id(0), tl.program_id(1)
    b, h = (z // H).to(tl.int64), (z % H).to(tl.int64)
    row = pid * BM + tl.arange(0, BM)
    lane = tl.arange(0, G)
    row_ok = row < N
    Q += b * sqb + h * sqh
    K += b * skb + h * skh
    B += b * sbb + h * sbh
    CAND += b * scb + h * sch
    MASK += b * smb + h * smh
    SHIFT += b * ssb + h * ssh
    own = tl.load(OWN + b * sob + h * soh + row, mask=row_ok, other=-1) if HAS_OWN else row
    q = load_rows(Q, row, row_ok, sqn, E, BE, 0, E == EP)

    LOW: tl.constexpr = (1 << BITS) - 1
    m1 = tl.full([BM, G], NEVER, tl.float32)
    m2 = tl.full([BM, G], NEVER, tl.float32)
    m3 = tl.full([BM, G], NEVER, tl.float32)
    m4 = tl.full([BM, G], DRAINED, tl.float32)
    if T == 4:
        m4 = tl.full([BM, G], NEVER, tl.float32)
    if PLAIN:
        i1 = tl.zeros([BM, G], tl.int32)
        i2 = tl.zeros([BM, G], tl.int32)
        i3 = tl.zeros([BM, G], tl.int32)
        i4 = tl.zeros([BM, G], tl.int32)
    first, full, last = 0, M // G, tl.cdiv(M, G)
    if (CAUSAL or WINDOW >= 0) and not HAS_CAND:
        reach = row0 + pid * BM + BM - 1 + (0 if CAUSAL else WINDOW)
        last = tl.minimum(last, reach // G + 1)
        full = tl.minimum(full, last)
        if WINDOW >= 0:
            first = tl.minimum(tl.maximum(row0 + pid * BM - WINDOW, 0) // G, full)
    for t in tl.range(first, full, num_stages=STAGES):
        # Turned from tile to tile, so that a period of the keys, as of an image, does not meet one bin.
        col = t * G + (lane + 13 * t) % G
        num, ok = col, col >= 0
        if HAS_CAND:
            num = tl.load(CAND + col).to(tl.int32)
            ok = num >= 0
            num = tl.maximum(num, 0)
        s = score_tile(
            q, Q, K, row, num, row_ok, sqn, skn, E, EP, BE, BM, G, DIFFERENCE, ROLLED, INTERPRETED, PRECISION
        )  # fmt: skip
        s = lay(
            s, B, MASK, SHIFT, row, col, num, row_ok, ok, own, row0, smn, ssn,
            HAS_B, HAS_MASK, HAS_SHIFT, HAS_OWN, CAUSAL, WINDOW, HAS_CAND,
        )  # fmt: skip
        if PLAIN:
            m1, i1, s, u = exchange(m1, i1, s, tl.zeros_like(i1) + t)
            m2, i2, s, u = exchange(m2, i2, s, u)
            m3, i3, s, u = exchange(m3, i3, s, u)
            if T == 4:
                m4, i4, s, u = exchange(m4, i4, s, u)
        else:
            x = ((s.to(tl.int32, bitcast=True) & (-1 - LOW)) | t).to(tl.float32, bitcast=True)
            if INTERPRETED:
                x = tl.where(x == x, x, NEVER)
            m1, m2, m3, m4 = insert(m1, m2, m3, m4, x, T)
    if full < last:
        col = full * G + (lane + 13 * full) % G
        num, ok = tl.minimum(col, M - 1), col < M
        if HAS_CAND:
            num = tl.load(CAND + col, mask=ok, other=-1).to(tl.int32)
            ok = num >= 0
            num = tl.maximum(num, 0)
        s = score_tile(
            q, Q, K, row, num, row_ok, sqn, skn, E, EP, BE, BM, G, DIFFERENCE, ROLLED, INTERPRETED, PRECISION
        )  # fmt: skip
        s = lay(
            s, B, MASK, SHIFT, row, col, num, row_ok, ok, own, row0, smn, ssn,
            HAS_B, HAS_MASK, HAS_SHIFT, HAS_OWN, CAUSAL, WINDOW, True,
        )  # fmt: skip
        if PLAIN:
            m1, i1, s, u = exchange(m1, i1, s, tl.zeros_like(i1) + full)
            m2, i2, s, u = exchange(m2, i2, s, u)
            m3, i3, s, u = exchange(m3, i3, s, u)
            if T == 4:
                m4, i4, s, u = exchange(m4, i4, s, u)
        else:
            x = ((s.to(tl.int32, bitcast=True) & (-1 - LOW)) | full).to(tl.float32, bitcast=True)
            if INTERPRETED:
                x = tl.where(x == x, x, NEVER)
            m1, m2, m3, m4 = insert(m1, m2, m3, m4, x, T)

    I += b * sib + h * sih
    S += z.to(tl.int64) * N * KK
    v = tl.zeros([BM], tl.float32)
    for slot in range(KK):
        v = tl.max(m1, axis=1)
        c = tl.min(tl.where(m1 == v[:, None], lane[None, :], G), axis=1)
        if PLAIN:
            number = tl.max(tl.where(lane[None, :] == c[:, None], i1, 0), axis=1)
        else:
            number = v.to(tl.int32, bitcast=True) & LOW
        place = number * G + (c + 13 * number) % G
        found = v > LIMIT
        tl.store(I + row * KK + slot, tl.where(found, place, -1).to(I.dtype.element_ty), mask=row_ok)
        cut = v
        if not PLAIN:
            cut = (v.to(tl.int32, bitcast=True) & (-1 - LOW)).to(tl.float32, bitcast=True)
        tl.store(S + row * KK + slot, tl.where(found, cut, float("-inf")), mask=row_ok)
        hit = (lane[None, :] == c[:, None]) & found[:, None]
        m1 = tl.where(hit, m2, m1)
        m2 = tl.where(hit, m3, m2)
        m3 = tl.where(hit, m4, m3)
        if T == 4:
            m4 = tl.where(hit, DRAINED, m4)
        if PLAIN:
            i1 = tl.where(hit, i2, i1)
            i2 = tl.where(hit, i3, i2)
            if T == 4:
                i3 = tl.where(hit, i4, i3)

    # Which rows are flagged. A long query may overflow, which nothing here can compare.
    flag = row_ok & (tl.min(m1, axis=1) <= DRAINED)
    place = tl.cumsum(flag.to(tl.int32), axis=0) - 1
    tile = z * tl.num_programs(0) + pid
    tl.store(FLAGGED + tile.to(tl.int64) * BM + place, row, mask=flag)
    tl.store(COUNT + tile, tl.sum(flag.to(tl.int32), axis=0))
    square = tl.zeros([BM], tl.float32)
    for e in tl.static_range(0, EP, BE):
        part = load_rows(Q, row, row_ok, sqn, E, BE, e, E == EP).to(tl.float32)
        square += tl.sum(part * part, axis=1)
    bad = tl.max(1 - (square < HUGE).to(tl.int32), axis=0)
    # Each program looks at its share of the keys for what the stream cannot compare.
    for start in range(pid * BM, M, tl.num_programs(0) * BM):
        col = start + tl.arange(0, BM)
        ok = col < M
        if HAS_CAND:
            col = tl.load(CAND + col, mask=ok, other=-1).to(tl.int32)
            ok = col >= 0
        square = tl.zeros([BM], tl.float32)
        for e in tl.static_range(0, EP, BE):
            part = load_rows(K, col, ok, skn, E, BE, e, E == EP).to(tl.float32)
            square += tl.sum(part * part, axis=1)
        bad = tl.maximum(bad, tl.max(1 - (square < HUGE).to(tl.int32), axis=0))
    tl.store(BAD + tile, bad)

"""Up to 256 keys: a whole row of scores in registers."""

import triton
import triton.language as tl

from convnn.backends.triton.kernels.tiles import DRAINED, LIMIT, lay, load_rows, score_tile

# The numbers of scores above LIMIT are larger.
LEAST = tl.constexpr(0x00A60000)


@triton.jit
def numbers(s, low, LOW: tl.constexpr, INTERPRETED: tl.constexpr):
    """Turn scores into unsigned numbers of the same order, with a place in their low bits so that no two are alike.

    NaN, positive as the device makes it, comes first.
    """
    if INTERPRETED:
        s = tl.where(s != s, float("inf"), s)
    b = s.to(tl.int32, bitcast=True)
    b = b ^ ((b >> 31) | -2147483648)
    return ((b & (-1 - LOW)) | low).to(tl.uint32, bitcast=True)


@triton.jit
def scores(
    q,
    Q,
    K,
    B,
    CAND,
    MASK,
    SHIFT,
    own,
    row,
    row_ok,
    col,
    M,
    row0,
    sqn,
    skn,
    smn,
    ssn,
    E: tl.constexpr,
    EP: tl.constexpr,
    BE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
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
    LOW: tl.constexpr,
):
    """Scores of BN columns; as they are if plain, as numbers otherwise."""
    ok = col < M
    num = tl.minimum(col, M - 1)
    if HAS_CAND:
        num = tl.load(CAND + col, mask=ok, other=-1).to(tl.int32)
        ok = num >= 0
        num = tl.maximum(num, 0)
    s = score_tile(
        q, Q, K, row, num, row_ok, sqn, skn, E, EP, BE, BM, BN, DIFFERENCE, ROLLED, INTERPRETED, PRECISION
    )  # fmt: skip
    s = lay(
        s, B, MASK, SHIFT, row, col, num, row_ok, ok, own, row0, smn, ssn,
        HAS_B, HAS_MASK, HAS_SHIFT, HAS_OWN, CAUSAL, WINDOW, True,
    )  # fmt: skip
    if PLAIN:
        x = tl.where(s != s, 3.4e38, tl.minimum(s, 3.3e38))
    else:
        x = numbers(s, (LOW - col)[None, :], LOW, INTERPRETED)
    return x


@triton.jit
def select_whole(
    Q,
    K,
    B,
    CAND,
    MASK,
    SHIFT,
    OWN,
    I,
    S,
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
    N1: tl.constexpr,
    N2: tl.constexpr,
    N3: tl.constexpr,
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
):
    """The K best keys of BM rows: K times the largest number below the last, in unsigned arithmetic.

    Numbers are scores cut short; plain scores are compared as they are, which takes longer. The columns come in up to
    three pieces, so that fewer of them are padding.
    """
    z = tl.program_id(1)
    b, h = (z // H).to(tl.int64), (z % H).to(tl.int64)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    row_ok = row < N
    Q += b * sqb + h * sqh
    K += b * skb + h * skh
    B += b * sbb + h * sbh
    CAND += b * scb + h * sch
    MASK += b * smb + h * smh
    SHIFT += b * ssb + h * ssh
    I += b * sib + h * sih
    S += z.to(tl.int64) * N * KK
    own = tl.load(OWN + b * sob + h * soh + row, mask=row_ok, other=-1) if HAS_OWN else row
    q = load_rows(Q, row, row_ok, sqn, E, BE, 0, E == EP)
    LOW: tl.constexpr = 255
    c1 = tl.arange(0, N1)
    x1 = scores(
        q, Q, K, B, CAND, MASK, SHIFT, own, row, row_ok, c1, M, row0, sqn, skn, smn, ssn, E, EP, BE, BM, N1,
        HAS_B, HAS_CAND, HAS_MASK, HAS_SHIFT, HAS_OWN, CAUSAL, WINDOW, DIFFERENCE, ROLLED, PLAIN, INTERPRETED, PRECISION,
        LOW,
    )  # fmt: skip
    if N2 > 0:
        c2 = N1 + tl.arange(0, N2)
        x2 = scores(
            q, Q, K, B, CAND, MASK, SHIFT, own, row, row_ok, c2, M, row0, sqn, skn, smn, ssn, E, EP, BE, BM, N2,
            HAS_B, HAS_CAND, HAS_MASK, HAS_SHIFT, HAS_OWN, CAUSAL, WINDOW, DIFFERENCE, ROLLED, PLAIN, INTERPRETED, PRECISION,
            LOW,
        )  # fmt: skip
    if N3 > 0:
        c3 = N1 + N2 + tl.arange(0, N3)
        x3 = scores(
            q, Q, K, B, CAND, MASK, SHIFT, own, row, row_ok, c3, M, row0, sqn, skn, smn, ssn, E, EP, BE, BM, N3,
            HAS_B, HAS_CAND, HAS_MASK, HAS_SHIFT, HAS_OWN, CAUSAL, WINDOW, DIFFERENCE, ROLLED, PLAIN, INTERPRETED, PRECISION,
            LOW,
        )  # fmt: skip
    prev = tl.zeros([BM], tl.uint32)
    for slot in range(KK):
        if PLAIN:
            v = tl.max(x1, axis=1)
            if N2 > 0:
                v = tl.maximum(v, tl.max(x2, axis=1))
            if N3 > 0:
                v = tl.maximum(v, tl.max(x3, axis=1))
            place = tl.min(tl.where(x1 == v[:, None], c1[None, :], LOW), axis=1)
            if N2 > 0:
                place = tl.minimum(place, tl.min(tl.where(x2 == v[:, None], c2[None, :], LOW), axis=1))
                x2 = tl.where(c2[None, :] == place[:, None], DRAINED, x2)
            if N3 > 0:
                place = tl.minimum(place, tl.min(tl.where(x3 == v[:, None], c3[None, :], LOW), axis=1))
                x3 = tl.where(c3[None, :] == place[:, None], DRAINED, x3)
            x1 = tl.where(c1[None, :] == place[:, None], DRAINED, x1)
            found = v > LIMIT
            v = tl.where(v == 3.4e38, float("nan"), v)
        else:
            m = tl.max(x1 - prev[:, None], axis=1)
            if N2 > 0:
                m = tl.maximum(m, tl.max(x2 - prev[:, None], axis=1))
            if N3 > 0:
                m = tl.maximum(m, tl.max(x3 - prev[:, None], axis=1))
            prev += m
            place = LOW - (prev & LOW).to(tl.int32)
            found = prev > LEAST
            bits = (prev.to(tl.int32, bitcast=True)) & (-1 - LOW)
            v = tl.where(bits < 0, bits ^ -2147483648, ~bits).to(tl.float32, bitcast=True)
        if HAS_CAND:
            place = tl.load(CAND + place, mask=found & (place < M), other=-1).to(tl.int32)
        tl.store(I + row * KK + slot, tl.where(found, place, -1).to(I.dtype.element_ty), mask=row_ok)
        tl.store(S + row * KK + slot, tl.where(found, v, float("-inf")), mask=row_ok)

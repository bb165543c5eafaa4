"""Few keys, backwards: all gradients in one program, which sums them in a fixed order."""

import triton
import triton.language as tl

from convnn.backends.triton.kernels.few import load_taps, product, searched, unpacked
from convnn.backends.triton.kernels.few_keys import clear, put
from convnn.backends.triton.kernels.slots import SOFTMAX
from convnn.backends.triton.kernels.tiles import load_rows, score_tile

INFINITE = tl.constexpr(3.4e38)


@triton.jit
def scores(q, k, INTERPRETED: tl.constexpr, PRECISION: tl.constexpr):
    """Dot products of queries and keys."""
    if INTERPRETED:  # its dot is wrong for bfloat16
        q = q.to(tl.float32)
        k = k.to(tl.float32)
    return tl.dot(q, tl.trans(k), input_precision=PRECISION)


@triton.jit
def attend_few_backward(
    Q,
    K,
    V,
    W,
    CAND,
    SHIFT,
    BETA,
    I,
    L,
    DY,
    DQ,
    DK,
    DV,
    DW,
    DSHIFT,
    DBETA,
    N,
    M,
    width,
    H,
    per,
    scale,
    beta,
    sqb,
    sqh,
    sqn,
    skb,
    skh,
    skn,
    svb,
    svh,
    svn,
    scb,
    sch,
    ssb,
    ssh,
    ssn,
    sdb,
    sdh,
    sdn,
    E: tl.constexpr,
    EP: tl.constexpr,
    BE: tl.constexpr,
    C: tl.constexpr,
    CP: tl.constexpr,
    KK: tl.constexpr,
    KP: tl.constexpr,
    PER: tl.constexpr,
    R: tl.constexpr,
    BM: tl.constexpr,
    PARTS: tl.constexpr,
    WEIGHT: tl.constexpr,
    HAS_W: tl.constexpr,
    HAS_CAND: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    HAS_BETA: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of ``per`` tiles of BM rows; those of keys and values are parts of a sum if ``PARTS``.

    A slot is a matrix with one number in a row, so that what it gathers and what it adds to are matrix products.
    """
    pid, z = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = z // H, z % H
    Q += b * sqb + h * sqh
    K += b * skb + h * skh
    V += b * svb + h * svh
    CAND += b * scb + h * sch
    SHIFT += b * ssb + h * ssh
    DY += b * sdb + h * sdh
    I += z * N * (KK // PER)
    col = tl.arange(0, R)
    c = tl.arange(0, CP)
    e = tl.arange(0, EP)
    slots = tl.arange(0, KP)
    num, ok = searched(CAND, col, width, HAS_CAND)
    # What is not a number says so in the weights of those who chose it, and is 0 to all others.
    v = load_rows(V, num, ok, svn, C, CP, 0, C == CP)
    strange = tl.sum(v.to(tl.float32) * 0.0, axis=1)
    v = tl.where((strange == 0.0)[:, None], v, 0.0)
    dv = tl.zeros([CP, R], tl.float32)
    if HAS_W:
        turned = tl.trans(v).to(tl.float32)
        dw = tl.zeros([CP, KP], tl.float32)
    if HAS_BETA:
        beta = tl.load(BETA)
    if WEIGHT == SOFTMAX:
        k = load_rows(K, num, ok, skn, E, EP, 0, E == EP)
        k = tl.where(tl.abs(k.to(tl.float32)) < INFINITE, k, 0.0)
        dk = tl.zeros([EP, R], tl.float32)
    for tile in range(pid * per, tl.minimum(pid * per + per, tl.cdiv(N, BM))):
        row = tile * BM + tl.arange(0, BM)
        row_ok = row < N
        dy = load_rows(DY, row, row_ok, sdn, C, CP, 0, C == CP)
        lost = tl.sum(dy.to(tl.float32) * 0.0, axis=1)
        dy = load_rows(DY, row, row_ok & (lost == 0.0), sdn, C, CP, 0, C == CP)
        p = tl.zeros([BM, R], tl.float32) + (lost[:, None] + strange[None, :])
        if WEIGHT == SOFTMAX:
            lse = tl.load(L + z * N + row, mask=row_ok, other=0.0)
            # A query that is not a number has said so in its sum of weights. Its tile is held for the keys' gradient:
            # where slots took its place, ptxas 12.8 let a descriptor start from a register that nobody wrote.
            q = load_rows(Q, row, row_ok & (tl.abs(lse) < INFINITE), sqn, E, EP, 0, E == EP)
            if EP == BE:
                s = scores(q, k, INTERPRETED, PRECISION) * scale
            else:
                s = score_tile(
                    q, Q, K, row, num, row_ok, sqn, skn, E, EP, BE, BM, R, False, False, INTERPRETED, PRECISION
                )
                s *= scale
            if HAS_SHIFT:
                shown = row_ok[:, None] & ok[None, :]
                s += tl.load(SHIFT + row.to(tl.int64)[:, None] * ssn + col[None, :], mask=shown, other=0.0)
        bits = tl.zeros([BM], tl.int64 if R > 32 else tl.int32)
        for slot in tl.range(KK, loop_unroll_factor=1):
            place = unpacked(tl.load(I + slot // PER * N + row, mask=row_ok, other=0), slot, PER)
            bits |= tl.where(place >= 0, tl.full([BM], 1, bits.dtype) << tl.maximum(place, 0), 0)
        chosen = ((bits[:, None] >> col[None, :]) & 1) != 0
        if WEIGHT == SOFTMAX:
            # The sum is computed again: of large scores, its logarithm has lost the digits that count.
            far = tl.where(chosen, s * beta, float("-inf"))
            top = tl.max(far, axis=1)
            far = tl.exp(far - tl.where(top == float("-inf"), 0.0, top)[:, None])
            total = tl.sum(far, axis=1)
            p += far / tl.where(total == 0.0, 1.0, total)[:, None] + tl.where(lse == lse, 0.0, lse)[:, None]
        else:
            p += 1.0
        pull = tl.zeros([BM, R], tl.float32)
        if HAS_W:
            for slot in tl.range(KK, loop_unroll_factor=1):
                place = unpacked(tl.load(I + slot // PER * N + row, mask=row_ok, other=0), slot, PER)
                one = tl.where(col[None, :] == place[:, None], p, 0.0)
                w = load_taps(W, slot, c, C, KK, C == CP)
                a = product(tl.trans(dy), one.to(dy.dtype), INTERPRETED)  # (C, R)
                dv += a * w[:, None]
                dw += tl.where(slots[None, :] == slot, tl.sum(a * turned, axis=1)[:, None], 0.0)
                if WEIGHT == SOFTMAX:
                    pull += one * product(dy, (turned * w[:, None]).to(dy.dtype), INTERPRETED)
        weight = tl.where(chosen, p, 0.0)
        if not HAS_W:
            dv += product(tl.trans(dy), weight.to(dy.dtype), INTERPRETED)
            pull = weight * product(dy, tl.trans(v), INTERPRETED)
        if WEIGHT == SOFTMAX:
            # Of beta times the score; a NaN of another slot is no matter of those who were not chosen.
            ds = tl.where(chosen, pull - weight * tl.sum(pull, axis=1)[:, None], 0.0)
            if HAS_BETA:
                tl.store(DBETA + z * N + row, tl.sum(tl.where(chosen, ds * s, 0.0), axis=1), mask=row_ok)
            if HAS_SHIFT:
                place = DSHIFT + (z * N + row)[:, None] * width + col[None, :]
                tl.store(place, ds * beta, mask=row_ok[:, None] & (col < width)[None, :])
            dq = product(ds, k, INTERPRETED)
            if k.dtype != tl.float32:
                # They sum to 0: of keys much alike, what rounding leaves would be all there is.
                dq += product(ds - ds.to(k.dtype).to(tl.float32), k, INTERPRETED)
            dq *= scale * beta
            place = DQ + (z * N + row)[:, None] * E + e[None, :]
            tl.store(place, dq.to(DQ.dtype.element_ty), mask=row_ok[:, None] & (e < E)[None, :])
            dk += product(tl.trans(q), ds.to(q.dtype), INTERPRETED)
    part = z * tl.num_programs(0) + pid
    if HAS_W:
        place = DW + part * KK * C + c[:, None] * KK + slots[None, :]
        tl.store(place, dw, mask=(c < C)[:, None] & (slots < KK)[None, :])
    if PARTS:
        tl.store(DV + (part * R + col)[None, :] * C + c[:, None], dv, mask=(c < C)[:, None])
        if WEIGHT == SOFTMAX:
            tl.store(DK + (part * R + col)[None, :] * E + e[:, None], dk * (scale * beta), mask=(e < E)[:, None])
    else:
        put(DV + z * M * C, tl.trans(dv), num, ok, C, CP, 0, R, HAS_CAND)
        if HAS_CAND:
            clear(DV + z * M * C, num, ok, M, C, CP, BM)
        if WEIGHT == SOFTMAX:
            put(DK + z * M * E, tl.trans(dk) * (scale * beta), num, ok, E, EP, 0, R, HAS_CAND)
            if HAS_CAND:
                clear(DK + z * M * E, num, ok, M, E, EP, BM)

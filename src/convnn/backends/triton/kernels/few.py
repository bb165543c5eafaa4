"""Few keys: search, weights and combination in one program, the gathers as matrix products."""

import triton
import triton.language as tl

from convnn.backends.triton.kernels.slots import SOFTMAX
from convnn.backends.triton.kernels.tiles import DRAINED, LIMIT, lay, load_rows, score_tile
from convnn.backends.triton.kernels.whole import LEAST, numbers

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def product(a, b, INTERPRETED: tl.constexpr):
    """A matrix product on the matrix units, in the type of ``b``: single precision keeps its digits."""
    a = a.to(b.dtype)
    if INTERPRETED:  # its dot is wrong for bfloat16
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def searched(CAND, col, width, HAS_CAND: tl.constexpr):
    """The numbers of the keys that are searched, and which columns hold one."""
    ok = col < width
    num = tl.minimum(col, width - 1)
    if HAS_CAND:
        num = tl.load(CAND + col, mask=ok, other=-1).to(tl.int32)
        ok = num >= 0
        num = tl.maximum(num, 0)
    return num, ok


@triton.jit
def weights(s, beta, WEIGHT: tl.constexpr):
    """Softmax weights of scores before they are divided by their sum, and the largest score; or 1 each.

    What is forbidden weighs 0, and a NaN is kept.
    """
    top = tl.max(s, axis=1)
    top = tl.where(top > LIMIT, top, 0.0)
    if WEIGHT == SOFTMAX:
        far = tl.where(s <= LIMIT, float("-inf"), s - top[:, None])
        p = tl.exp2(far * (beta * LOG2E))
    else:
        p = tl.where(s <= LIMIT, 0.0, tl.where(s == s, 1.0, s))
    return p, top


@triton.jit
def load_taps(W, slot, c, C, KK: tl.constexpr, FULL: tl.constexpr):
    """The kernel's numbers for a slot."""
    place = W + slot + c * KK
    line = tl.load(place) if FULL else tl.load(place, mask=c < C, other=0.0)
    return line.to(tl.float32)


@triton.jit
def unpacked(word, slot, PER: tl.constexpr):
    """The place of a slot among the PER places of a number, seven bits each, or -1."""
    return ((word >> (slot % PER * 7)) & 127) - 1


@triton.jit
def placed(weight, place, col, FAST: tl.constexpr):
    """A matrix with one number in a row: the weight of the column that was found."""
    if FAST:
        # Two columns at a time: equal numbers give 1, others 0. What is added keeps them from being denormal.
        row, column = (place + 0x4000).to(tl.int16)[:, None], (col + 0x4000).to(tl.int16)[None, :]
        if weight.dtype == tl.bfloat16:
            code: tl.constexpr = "{.reg .b32 t; set.eq.bf16x2.bf16x2 t, $1, $2; mul.rn.bf16x2 $0, t, $3;}"
        else:
            code: tl.constexpr = "{.reg .b32 t; set.eq.f16x2.f16x2 t, $1, $2; mul.rn.f16x2 $0, t, $3;}"
        one = tl.inline_asm_elementwise(code, "=r,r,r,r", [row, column, weight], weight.dtype, is_pure=True, pack=2)
    else:
        one = tl.where(col[None, :] == place[:, None], weight, 0.0)
    return one


@triton.jit
def gathered(
    V, W, CAND, I, p, row, row_ok, col, N, svn,
    C: tl.constexpr, CP: tl.constexpr, KK: tl.constexpr, PER: tl.constexpr, BM: tl.constexpr,
    HAS_W: tl.constexpr, HAS_CAND: tl.constexpr,
):  # fmt: skip
    """Combine value by value: a matrix product would spread a NaN to rows that did not choose it."""
    c = tl.arange(0, CP)
    acc = tl.zeros([BM, CP], tl.float32)
    for slot in tl.range(KK, loop_unroll_factor=1):
        place = unpacked(tl.load(I + slot // PER * N + row, mask=row_ok, other=0), slot, PER)
        weight = tl.sum(tl.where(col[None, :] == place[:, None], p, 0.0), axis=1)
        filled = place >= 0
        if HAS_CAND:
            place = tl.load(CAND + place, mask=filled, other=0).to(tl.int32)
        v = load_rows(V, place, filled, svn, C, CP, 0, C == CP).to(tl.float32) * weight[:, None]
        if HAS_W:
            v *= load_taps(W, slot, c, C, KK, C == CP)[None, :]
        acc += v
    return acc


@triton.jit
def attend_few(
    Q,
    K,
    V,
    W,
    B,
    CAND,
    MASK,
    SHIFT,
    BETA,
    Y,
    I,
    L,
    N,
    width,
    H,
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
    E: tl.constexpr,
    EP: tl.constexpr,
    BE: tl.constexpr,
    C: tl.constexpr,
    CP: tl.constexpr,
    KK: tl.constexpr,
    PER: tl.constexpr,
    R: tl.constexpr,
    BM: tl.constexpr,
    FAST: tl.constexpr,
    WEIGHT: tl.constexpr,
    HAS_W: tl.constexpr,
    HAS_B: tl.constexpr,
    HAS_CAND: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    HAS_BETA: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    PLAIN: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Choose, weigh and combine the keys of BM rows.

    In every pass the next best column of a row is found as in ``select_whole``; its weight is then the only number in a
    row of a matrix, which times the values is the weighted neighbour.
    """
    z = tl.program_id(1).to(tl.int64)
    b, h = z // H, z % H
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    row_ok = row < N
    Q += b * sqb + h * sqh
    K += b * skb + h * skh
    V += b * svb + h * svh
    B += b * sbb + h * sbh
    CAND += b * scb + h * sch
    MASK += b * smb + h * smh
    SHIFT += b * ssb + h * ssh
    Y += z * N * C
    I += z * N * (KK // PER)
    L += z * N
    col = tl.arange(0, R)
    c = tl.arange(0, CP)
    num, ok = searched(CAND, col, width, HAS_CAND)
    q = load_rows(Q, row, row_ok, sqn, E, BE, 0, E == EP)
    s = score_tile(q, Q, K, row, num, row_ok, sqn, skn, E, EP, BE, BM, R, False, False, INTERPRETED, PRECISION) * scale
    s = lay(
        s, B, MASK, SHIFT, row, col, num, row_ok, ok, row, 0, smn, ssn,
        HAS_B, HAS_MASK, HAS_SHIFT, False, CAUSAL, WINDOW, True,
    )  # fmt: skip
    v = load_rows(V, num, ok, svn, C, CP, 0, C == CP)
    if HAS_BETA:
        beta = tl.load(BETA)
    p, top = weights(s, beta, WEIGHT)
    LOW: tl.constexpr = R - 1
    if PLAIN:
        x = tl.where(s != s, 3.4e38, tl.minimum(s, 3.3e38))
    else:
        x = numbers(s, (LOW - col)[None, :], LOW, INTERPRETED)
    half = p.to(v.dtype)
    prev = tl.zeros([BM], tl.uint32)
    acc = tl.zeros([BM, CP], tl.float32)
    for group in tl.range(KK // PER, loop_unroll_factor=1):
        word = tl.zeros([BM], tl.int32)
        for one in tl.static_range(PER):
            if PLAIN:
                best = tl.max(x, axis=1)
                place = tl.min(tl.where(x == best[:, None], col[None, :], LOW), axis=1)
                x = tl.where(col[None, :] == place[:, None], DRAINED, x)
                found = best > LIMIT
            else:
                prev += tl.max(x - prev[:, None], axis=1)
                place = LOW - (prev & LOW).to(tl.int32)
                found = prev > LEAST
            word |= tl.where(found, place + 1, 0) << (one * 7)
            if HAS_W:
                w = load_taps(W, group * PER + one, c, C, KK, C == CP)
                acc += product(placed(half, place, col, FAST), v, INTERPRETED) * w[None, :]
        tl.store(I + group * N + row, word, mask=row_ok)
    p = tl.where(x == DRAINED, p, 0.0) if PLAIN else tl.where(x >= prev[:, None], p, 0.0)
    if not HAS_W:
        acc = product(p, v, INTERPRETED)
    whole = tl.sum(acc, axis=1)
    if tl.max(tl.where(whole == whole, 0, 1), axis=0) > 0:
        tl.debug_barrier()
        acc = gathered(
            V, W, CAND, I, p, row, row_ok, col, N, svn, C, CP, KK, PER, BM, HAS_W, HAS_CAND
        )  # fmt: skip
    if WEIGHT == SOFTMAX:
        total = tl.sum(p, axis=1)
        full = total != 0.0
        total = tl.where(full, total, 1.0)
        acc = acc / total[:, None]
        tl.store(L + row, tl.where(full, top * beta + tl.log(total), float("-inf")), mask=row_ok)
    ok_out = row_ok[:, None] & (c < C)[None, :]
    tl.store(Y + row[:, None] * C + c[None, :], acc.to(Y.dtype.element_ty), mask=ok_out)

"""What the kernels share: scores of a tile of queries and keys, and who may choose whom."""

import triton
import triton.language as tl

# Scores at or below LIMIT are forbidden; NEVER fills what nobody wrote, DRAINED what was taken out.
LIMIT = tl.constexpr(-2.9e38)
NEVER = tl.constexpr(-3.0e38)
FORBIDDEN = tl.constexpr(-3.2e38)
DRAINED = tl.constexpr(-3.4e38)
# Beyond such a squared length a dot product may overflow.
HUGE = tl.constexpr(1e37)


@triton.jit
def load_line(P, c, C, FULL: tl.constexpr):
    """C numbers in a row; 0 beyond."""
    line = tl.load(P + c) if FULL else tl.load(P + c, mask=c < C, other=0.0)
    return line.to(tl.float32)


@triton.jit
def load_rows(P, row, ok, stride, E, EP: tl.constexpr, first, FULL: tl.constexpr):
    """Rows of a matrix, channels from ``first`` on; 0 where there are none."""
    e = first + tl.arange(0, EP)
    place = P + row[:, None] * stride + e[None, :]
    if FULL:
        return tl.load(place, mask=ok[:, None], other=0.0)
    return tl.load(place, mask=ok[:, None] & (e < E)[None, :], other=0.0)


@triton.jit
def load_all(P, row, stride, E, EP: tl.constexpr, first, FULL: tl.constexpr):
    """Rows that are there, channels from ``first`` on."""
    e = first + tl.arange(0, EP)
    place = P + row[:, None] * stride + e[None, :]
    if FULL:
        return tl.load(place)
    return tl.load(place, mask=(e < E)[None, :], other=0.0)


@triton.jit
def add_products(
    s,
    Q,
    K,
    row,
    num,
    row_ok,
    sq,
    sk,
    first,
    E: tl.constexpr,
    BE: tl.constexpr,
    FULL: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add the dot products of BE channels."""
    a = load_rows(Q, row, row_ok, sq, E, BE, first, FULL)
    b = load_all(K, num, sk, E, BE, first, FULL)
    if INTERPRETED:  # its dot is wrong for bfloat16
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, tl.trans(b), s, input_precision=PRECISION)


@triton.jit
def score_tile(
    q,
    Q,
    K,
    row,
    num,
    row_ok,
    sq,
    sk,
    E: tl.constexpr,
    EP: tl.constexpr,
    BE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    DIFFERENCE: tl.constexpr,
    ROLLED: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Dot products of a tile, or minus the squared distances by difference; ``num`` are keys that are there.

    Channels are taken BE at a time, one after the other where they are rolled: else their loads run ahead, and all
    of them need a place at once.
    """
    if DIFFERENCE:
        s = tl.zeros([BM, BN], tl.float32)
        for e in tl.static_range(E):
            a = tl.load(Q + row * sq + e, mask=row_ok, other=0.0).to(tl.float32)
            b = tl.load(K + num * sk + e).to(tl.float32)
            d = a[:, None] - b[None, :]
            s -= d * d
    elif EP == BE:
        k = load_all(K, num, sk, E, EP, 0, E == EP)
        if INTERPRETED:  # its dot is wrong for bfloat16
            q = q.to(tl.float32)
            k = k.to(tl.float32)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    else:
        s = tl.zeros([BM, BN], tl.float32)
        if ROLLED:
            for first in tl.range(0, EP, BE, num_stages=1):
                s = add_products(
                    s, Q, K, row, num, row_ok, sq, sk, first, E, BE, E == EP, INTERPRETED, PRECISION
                )  # fmt: skip
        else:
            for first in tl.static_range(0, EP, BE):
                s = add_products(
                    s, Q, K, row, num, row_ok, sq, sk, first, E, BE, E == EP, INTERPRETED, PRECISION
                )  # fmt: skip
    return s


@triton.jit
def lay(
    s,
    B,
    MASK,
    SHIFT,
    row,
    col,
    num,
    row_ok,
    ok,
    own,
    row0,
    smask,
    sshift,
    HAS_B: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    HAS_OWN: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CHECKED: tl.constexpr,
):
    """Lay masks over the scores of a tile; what is forbidden falls below LIMIT.

    A number per key is added (``HAS_B`` 1) or multiplied with (2); multiplied with, a negative one may forbid (3).
    """
    if HAS_B >= 2:
        factor = tl.load(B + num, mask=ok, other=0.0)
        s *= factor[None, :]
        if HAS_B == 3:
            s = tl.where((factor >= 0.0)[None, :], s, FORBIDDEN)
    elif HAS_B:
        shift = tl.load(B + num, mask=ok, other=0.0)
        s += shift[None, :]
        if CHECKED:
            # A NaN nobody may choose is not seen.
            s = tl.where((shift > LIMIT)[None, :], s, FORBIDDEN)
    if HAS_SHIFT:
        place = SHIFT + row.to(tl.int64)[:, None] * sshift + col[None, :]
        s += tl.load(place, mask=row_ok[:, None] & ok[None, :], other=0.0)
    if CHECKED:
        s = tl.where(ok[None, :], s, FORBIDDEN)
    if CAUSAL:
        s = tl.where(num[None, :] <= (row0 + row)[:, None], s, FORBIDDEN)
    if WINDOW >= 0:
        far = tl.abs(num[None, :] - (row0 + row)[:, None]) > WINDOW
        s = tl.where(far, FORBIDDEN, s)
    if HAS_MASK:
        place = MASK + row.to(tl.int64)[:, None] * smask + col[None, :]
        said = tl.load(place, mask=row_ok[:, None] & ok[None, :], other=0)
        s = tl.where(said != 0, s, FORBIDDEN)
    if HAS_OWN:
        s = tl.where(num[None, :] == own[:, None], FORBIDDEN, s)
    return s

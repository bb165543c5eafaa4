"""The best of several lists of neighbours."""

import triton
import triton.language as tl

# Above all scores: a NaN comes first.
LOST = tl.constexpr(3.4e38)


@triton.jit
def merge(
    FROM,
    OF,
    I,
    S,
    N,
    H,
    size,
    sib,
    sih,
    PARTS: tl.constexpr,
    KK: tl.constexpr,
    WIDTH: tl.constexpr,
    BM: tl.constexpr,
):
    """The K best of BM rows among K of each part; FROM numbers the keys of a part from 0, and OF is what ranks them."""
    z = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    row_ok = row < N
    c = tl.arange(0, WIDTH)
    part, slot = c // KK, c % KK
    ok = row_ok[:, None] & (part < PARTS)[None, :]
    at = ((z * PARTS + part)[None, :] * N + row[:, None]) * KK + slot[None, :]
    s = tl.load(OF + at, mask=ok, other=float("-inf"))
    j = tl.load(FROM + at, mask=ok, other=0) + (part * size)[None, :]
    s = tl.where(s != s, LOST, s)
    I += (z // H) * sib + (z % H) * sih
    S += z * N * KK
    for rank in range(KK):
        v = tl.max(s, axis=1)
        place = tl.min(tl.where(s == v[:, None], c[None, :], WIDTH), axis=1)
        here = c[None, :] == place[:, None]
        found = v > float("-inf")
        number = tl.where(found, tl.sum(tl.where(here, j, 0), axis=1), -1)
        tl.store(I + row * KK + rank, number.to(I.dtype.element_ty), mask=row_ok)
        tl.store(S + row * KK + rank, tl.where(v == LOST, float("nan"), v), mask=row_ok)
        s = tl.where(here, float("-inf"), s)

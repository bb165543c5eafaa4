"""Small things said of rows: their directions, and which of them are lost to a NaN."""

import triton
import triton.language as tl


@triton.jit
def unit_rows(X, Y, LOST, R, N, sxz, sxn, E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr):
    """Scale BM rows to length 1, but leave the zero vector; LOST is NaN where the length is, and 0 elsewhere."""
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    e = tl.arange(0, EP)
    ok = (row < R)[:, None] & (e < E)[None, :]
    x = tl.load(X + ((row // N) * sxz + (row % N) * sxn)[:, None] + e[None, :], mask=ok, other=0.0).to(tl.float32)
    # The largest entry first, as the definition does: squares of tiny and huge vectors stay in range.
    largest = tl.max(tl.abs(x), axis=1)
    x = x / tl.where(largest == 0.0, 1.0, largest)[:, None]
    length = tl.sqrt(tl.sum(x * x, axis=1))
    x = x / tl.where(length == 0.0, 1.0, length)[:, None]
    tl.store(Y + row[:, None] * E + e[None, :], x, mask=ok)
    tl.store(LOST + row, tl.where(length == length, 0.0, float("nan")), mask=row < R)


@triton.jit
def add_to_rows(A, B, I, S, R, N, M, KK: tl.constexpr, BM: tl.constexpr):
    """What a row brings and the key brings, over all slots of a row that are filled."""
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    ok = row < R
    own = tl.load(A + row, mask=ok, other=0.0)
    total = tl.zeros([BM], tl.float32)
    start = B + (row // N) * M
    for slot in range(KK):
        j = tl.load(I + row * KK + slot, mask=ok, other=-1).to(tl.int32)
        total += tl.where(j >= 0, own + tl.load(start + j, mask=j >= 0, other=0.0), 0.0)
    tl.store(S + row, total, mask=ok)

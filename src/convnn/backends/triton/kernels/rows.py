"""Small things said of rows: their directions, which of them are lost to a NaN, and who comes first."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["R", "N"])
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


@triton.jit(do_not_specialize=["R", "N"])
def level_rows(X, Y, FACTOR, LOST, R, N, sxz, sxn, E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr):
    """Scale BM rows by a power of two, which loses nothing, so that their largest entry is between 1 and 2.

    FACTOR is what then scales them to length 1, and 1 for the zero vector; LOST is as in ``unit_rows``.
    """
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    e = tl.arange(0, EP)
    ok = (row < R)[:, None] & (e < E)[None, :]
    x = tl.load(X + ((row // N) * sxz + (row % N) * sxn)[:, None] + e[None, :], mask=ok, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), axis=1)
    power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    ends = power == float("inf")  # what is infinite has no direction
    power = tl.where(ends, 1.0, tl.where(power == 0.0, 1.1754943508222875e-38, power))
    x = tl.where(ends[:, None], float("nan"), x / power[:, None])
    length = tl.sqrt(tl.sum(tl.where(ok, x * x, 0.0), axis=1))
    tl.store(Y + row[:, None] * E + e[None, :], x.to(Y.dtype.element_ty), mask=ok)
    tl.store(FACTOR + row, 1.0 / tl.where(length > 0.0, length, 1.0), mask=row < R)
    tl.store(LOST + row, tl.where(length == length, 0.0, float("nan")), mask=row < R)


@triton.jit(do_not_specialize=["R", "N"])
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


@triton.jit(do_not_specialize=["R"])
def own_first(OWN, I, J, R, KK: tl.constexpr, BM: tl.constexpr):
    """Put one's own key, where there is one, before the others, of which the last gives way."""
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    ok = row < R
    own = tl.load(OWN + row, mask=ok, other=-1)
    before = own.to(J.dtype.element_ty)
    for slot in range(KK):
        found = tl.load(I + row * KK + slot, mask=ok, other=-1)
        tl.store(J + row * KK + slot, tl.where(own < 0, found, before), mask=ok)
        before = found

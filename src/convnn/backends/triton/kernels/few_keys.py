"""Few keys, backwards: gradients of candidates on their way to the keys they are."""

import triton
import triton.language as tl

from convnn.backends.triton.kernels.few import searched


@triton.jit
def alike(sums, num, ok, R: tl.constexpr):
    """Where several candidates are one key, let each of them hold the sum of all."""
    j = tl.arange(0, R)
    same = (num[:, None] == num[None, :]) & ok[:, None] & ok[None, :]
    if tl.sum(tl.sum(same.to(tl.int32), axis=1), axis=0) > tl.sum(ok.to(tl.int32), axis=0):
        total = tl.zeros_like(sums)
        for one in range(R):
            # No matrix product: a NaN belongs to its own key.
            line = tl.sum(tl.where((j == one)[:, None], sums, 0.0), axis=0)
            twin = tl.max(tl.where((j == one)[None, :] & same, 1, 0), axis=1) > 0
            total += tl.where(twin[:, None], line[None, :], 0.0)
        sums = total
    return sums


@triton.jit
def put(P, sums, num, ok, C, CP: tl.constexpr, first, R: tl.constexpr, HAS_CAND: tl.constexpr):
    """Store sums of channels from ``first`` on at the rows of their keys."""
    if HAS_CAND:
        sums = alike(sums, num, ok, R)
    c = first + tl.arange(0, CP)
    tl.store(P + num[:, None] * C + c[None, :], sums.to(P.dtype.element_ty), mask=ok[:, None] & (c < C)[None, :])


@triton.jit
def clear(P, num, ok, M, C, CP: tl.constexpr, ROWS: tl.constexpr):
    """Store 0 at the rows of keys that are no candidates."""
    c = tl.arange(0, CP)
    number = tl.where(ok, num, -1)
    nothing = tl.zeros([ROWS, CP], P.dtype.element_ty)
    for first in range(0, M, ROWS):
        key = first + tl.arange(0, ROWS)
        taken = tl.max(tl.where(key[:, None] == number[None, :], 1, 0), axis=1) > 0
        tl.store(P + key[:, None] * C + c[None, :], nothing, mask=((key < M) & ~taken)[:, None] & (c < C)[None, :])


@triton.jit
def add_few(
    PARTS,
    CAND,
    OUT,
    parts,
    M,
    width,
    H,
    scb,
    sch,
    C: tl.constexpr,
    BC: tl.constexpr,
    R: tl.constexpr,
    HAS_CAND: tl.constexpr,
):
    """Sum the parts of the gradient of BC channels of keys or values in a fixed order."""
    pid, z = tl.program_id(0), tl.program_id(1).to(tl.int64)
    CAND += (z // H) * scb + (z % H) * sch
    OUT += z * M * C
    col = tl.arange(0, R)
    c = pid * BC + tl.arange(0, BC)
    num, ok = searched(CAND, col, width, HAS_CAND)
    total = tl.zeros([R, BC], tl.float32)
    for part in range(parts):
        place = PARTS + ((z * parts + part) * R + col)[:, None] * C + c[None, :]
        total += tl.load(place, mask=(c < C)[None, :], other=0.0)
    put(OUT, total, num, ok, C, BC, pid * BC, R, HAS_CAND)

"""Backward by slot: the kernel's gradient, which sums over all rows."""

import triton
import triton.language as tl

from convnn.backends.triton.kernels.slots import UNIFORM, kept, load_slots
from convnn.backends.triton.kernels.tiles import load_rows


@triton.jit
def sum_slots(
    V,
    I,
    DY,
    PE,
    SEED,
    PART,
    begin,
    slots,
    N,
    place,
    dropout,
    svn,
    sdn,
    C: tl.constexpr,
    CP: tl.constexpr,
    KK: tl.constexpr,
    BM: tl.constexpr,
    TILES: tl.constexpr,
    WEIGHT: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """The part of some rows, from ``begin`` on, in the gradient of some taps."""
    c = tl.arange(0, CP)
    acc = tl.zeros([BM, slots.shape[0], CP], tl.float32)
    for tile in range(TILES):
        row = begin + tile * BM + tl.arange(0, BM)
        at = row[:, None] * KK + slots[None, :]
        j = tl.load(I + at, mask=(row < N)[:, None] & (slots < KK)[None, :], other=-1).to(tl.int32)
        if WEIGHT == UNIFORM:
            p = tl.where(j >= 0, 1.0, 0.0)
            if DROPOUT:
                p *= kept(SEED, place + at, dropout)
        else:
            p = tl.load(PE + at, mask=j >= 0, other=0.0).to(tl.float32)
        dy = load_rows(DY, row, row < N, sdn, C, CP, 0, C == CP).to(tl.float32)
        v = load_slots(V, j, svn, C, CP, C == CP).to(tl.float32)
        acc += (v * p[:, :, None]) * dy[:, None, :]
    into = PART + slots[:, None] * C + c[None, :]
    tl.store(into, tl.sum(acc, axis=0), mask=(slots < KK)[:, None] & (c < C)[None, :])


@triton.jit
def by_slot(
    V,
    I,
    DY,
    PE,
    DW,
    SEED,
    N,
    H,
    dropout,
    svb,
    svh,
    svn,
    sdb,
    sdh,
    sdn,
    sib,
    sih,
    C: tl.constexpr,
    CP: tl.constexpr,
    KK: tl.constexpr,
    BM: tl.constexpr,
    TILES: tl.constexpr,
    BS: tl.constexpr,
    REST: tl.constexpr,
    WEIGHT: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Parts of the kernel's gradient: TILES times BM rows, BS slots; the last program of a row takes the rest of them."""
    pid, z, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    b, h = z // H, z % H
    V += b * svb + h * svh
    DY += b * sdb + h * sdh
    I += b * sib + h * sih
    PE += z * N * KK
    DW += (z * tl.num_programs(0) + pid) * KK * C
    begin = pid * TILES * BM
    if chunk < KK // BS:
        sum_slots(
            V, I, DY, PE, SEED, DW, begin, chunk * BS + tl.arange(0, BS), N, z * N * KK, dropout, svn, sdn,
            C, CP, KK, BM, TILES, WEIGHT, DROPOUT,
        )  # fmt: skip
    elif REST > 0:
        sum_slots(
            V, I, DY, PE, SEED, DW, begin, KK - KK % BS + tl.arange(0, REST), N, z * N * KK, dropout, svn, sdn,
            C, CP, KK, BM, TILES, WEIGHT, DROPOUT,
        )  # fmt: skip


@triton.jit
def add_parts(DW, OUT, parts, size, C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Sum the parts of the kernel's gradient in a fixed order; with ``C`` channels in a row, the sum is turned."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = at < size
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    per = tl.cdiv(parts, tl.num_programs(1))
    first = tl.program_id(1) * per
    last = tl.minimum(first + per, parts)
    for start in range(first, last, ROWS):
        part = start + tl.arange(0, ROWS)
        place = DW + part.to(tl.int64)[:, None] * size + at[None, :]
        total += tl.load(place, mask=(part < last)[:, None] & ok[None, :], other=0.0)
    into = OUT + tl.program_id(1) * size + at
    if C > 0:
        into = OUT + at % C * (size // C) + at // C
    tl.store(into, tl.sum(total, axis=0).to(OUT.dtype.element_ty), mask=ok)

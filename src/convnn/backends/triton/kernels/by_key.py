"""Backward by key, over the slots that chose it: no sum depends on who comes first, unless that is asked for."""

import triton
import triton.language as tl

from convnn.backends.triton.kernels.slots import DOT, UNIFORM, kept, load_slots
from convnn.backends.triton.kernels.tiles import load_line, load_rows


@triton.jit
def by_key(
    Q,
    K,
    W,
    DY,
    PE,
    GE,
    UNTIL,
    EDGE,
    SORTED,
    DK,
    DV,
    SEED,
    N,
    M,
    H,
    dropout,
    sqb,
    sqh,
    sqn,
    skb,
    skh,
    skn,
    sdb,
    sdh,
    sdn,
    E: tl.constexpr,
    EP: tl.constexpr,
    C: tl.constexpr,
    CP: tl.constexpr,
    KK: tl.constexpr,
    BJ: tl.constexpr,
    BS: tl.constexpr,
    SHORT: tl.constexpr,
    KIND: tl.constexpr,
    WEIGHT: tl.constexpr,
    HAS_W: tl.constexpr,
    DROPOUT: tl.constexpr,
    WANTS_K: tl.constexpr,
):
    """Gradients of BJ keys and values: the sum over the slots that chose each, in their order, BS at a time.

    Lists up to SHORT come in any order: the next slot is the smallest number above the last, in unsigned arithmetic.
    """
    pid, z = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = z // H, z % H
    key = pid * BJ + tl.arange(0, BJ)
    ok = key < M
    Q += b * sqb + h * sqh
    DY += b * sdb + h * sdh
    PE += z * N * KK
    GE += z * N * KK
    EDGE += z * N * KK
    SORTED += z * N * KK
    UNTIL += z * M
    first = tl.load(UNTIL + key - 1, mask=ok & (key > 0), other=0)
    count = tl.where(ok, tl.load(UNTIL + key, mask=ok, other=0) - first, 0)
    dv = tl.zeros([BJ, CP], tl.float32)
    dk = tl.zeros([BJ, EP], tl.float32)
    if WANTS_K and KIND != DOT:
        k = load_rows(K + b * skb + h * skh, key, ok, skn, E, EP, 0, E == EP).to(tl.float32)
    few = count <= SHORT
    if SHORT > 0:
        spots = tl.arange(0, SHORT)
        listed = (spots[None, :] < count[:, None]) & few[:, None]
        lists = tl.load(EDGE + first[:, None] + spots[None, :], mask=listed, other=2147483647).to(tl.uint32)
        last = tl.zeros([BJ], tl.uint32) - 1
    for start in range(0, tl.max(count, axis=0), BS):
        spot = start + tl.arange(0, BS)
        live = spot[None, :] < count[:, None]
        edge = tl.load(SORTED + first[:, None] + spot[None, :], mask=live & (few == 0)[:, None], other=0)
        if SHORT > 0:
            for turn in tl.static_range(BS):
                last += 1 + tl.min(lists - last[:, None] - 1, axis=1)
                here = (tl.arange(0, BS)[None, :] == turn) & few[:, None]
                edge = tl.where(here, last.to(tl.int32)[:, None], edge)
        row = tl.where(live, edge // KK, -1)
        if WEIGHT == UNIFORM:
            p = tl.where(live, 1.0, 0.0)
            if DROPOUT:
                p *= kept(SEED, z * N * KK + edge, dropout)
        else:
            p = tl.load(PE + edge, mask=live, other=0.0).to(tl.float32)
        d = load_slots(DY, row, sdn, C, CP, C == CP).to(tl.float32) * p[:, :, None]
        if HAS_W:
            slot = tl.where(live, edge % KK, -1)
            d *= load_slots(W, slot, C, C, CP, C == CP).to(tl.float32)
        dv += tl.sum(d, axis=1)
        if WANTS_K:
            q = load_slots(Q, row, sqn, E, EP, E == EP).to(tl.float32)
            if KIND != DOT:
                q = tl.where(live[:, :, None], q - k[:, None, :], 0.0)
            dk += tl.sum(q * tl.load(GE + edge, mask=live, other=0.0).to(tl.float32)[:, :, None], axis=1)
    c = tl.arange(0, CP)
    e = tl.arange(0, EP)
    at = z * M + key
    tl.store(DV + at[:, None] * C + c[None, :], dv.to(DV.dtype.element_ty), mask=ok[:, None] & (c < C)[None, :])
    if WANTS_K:
        tl.store(DK + at[:, None] * E + e[None, :], dk.to(DK.dtype.element_ty), mask=ok[:, None] & (e < E)[None, :])


@triton.jit
def scatter(
    Q,
    K,
    W,
    I,
    DY,
    PE,
    GE,
    DK,
    DV,
    SEED,
    N,
    M,
    H,
    dropout,
    sqb,
    sqh,
    sqn,
    skb,
    skh,
    skn,
    sdb,
    sdh,
    sdn,
    sib,
    sih,
    E: tl.constexpr,
    EP: tl.constexpr,
    C: tl.constexpr,
    CP: tl.constexpr,
    KK: tl.constexpr,
    BM: tl.constexpr,
    KIND: tl.constexpr,
    WEIGHT: tl.constexpr,
    HAS_W: tl.constexpr,
    DROPOUT: tl.constexpr,
    WANTS_K: tl.constexpr,
):
    """What ``by_key`` sums, added up in float32 by whoever comes first."""
    pid, z = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = z // H, z % H
    row = pid * BM + tl.arange(0, BM)
    row_ok = row < N
    Q += b * sqb + h * sqh
    K += b * skb + h * skh
    I += b * sib + h * sih
    c = tl.arange(0, CP)
    e = tl.arange(0, EP)
    dy = load_rows(DY + b * sdb + h * sdh, row, row_ok, sdn, C, CP, 0, C == CP).to(tl.float32)
    if WANTS_K:
        q = load_rows(Q, row, row_ok, sqn, E, EP, 0, E == EP).to(tl.float32)
    for slot in tl.range(KK, loop_unroll_factor=1):
        j = tl.load(I + row * KK + slot, mask=row_ok, other=-1).to(tl.int32)
        filled = j >= 0
        at = z * N * KK + row * KK + slot
        if WEIGHT == UNIFORM:
            p = tl.where(filled, 1.0, 0.0)
            if DROPOUT:
                p *= kept(SEED, at, dropout)
        else:
            p = tl.load(PE + at, mask=filled, other=0.0).to(tl.float32)
        dv = p[:, None] * dy
        if HAS_W:
            dv *= load_line(W + slot * C, c, C, C == CP)[None, :]
        place = (z * M + j)[:, None]
        tl.atomic_add(DV + place * C + c[None, :], dv, mask=filled[:, None] & (c < C)[None, :], sem="relaxed")
        if WANTS_K:
            dk = q
            if KIND != DOT:
                dk = q - load_rows(K, j, filled, skn, E, EP, 0, E == EP).to(tl.float32)
            dk = tl.load(GE + at, mask=filled, other=0.0)[:, None] * dk
            tl.atomic_add(DK + place * E + e[None, :], dk, mask=filled[:, None] & (e < E)[None, :], sem="relaxed")

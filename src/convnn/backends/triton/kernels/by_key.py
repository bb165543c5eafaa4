"""Backward by key, over the slots that chose it: no sum depends on who comes first, unless that is asked for."""

import triton
import triton.language as tl

from convnn.backends.triton.kernels.combine import DOT, UNIFORM, kept
from convnn.backends.triton.kernels.tiles import load_line, load_rows


@triton.jit
def count_edges(I, COUNT, RANK, M, NK, sib, sih, H, BLOCK: tl.constexpr):
    """Count how often each key was chosen; who came first decides the rank, for now."""
    z = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = place < NK
    j = tl.load(I + (z // H) * sib + (z % H) * sih + place, mask=ok, other=-1).to(tl.int32)
    rank = tl.atomic_add(COUNT + z * M + j, 1, mask=ok & (j >= 0), sem="relaxed")
    tl.store(RANK + z * NK + place, rank, mask=ok)


@triton.jit
def fill_edges(I, UNTIL, COUNT, RANK, EDGE, M, NK, sib, sih, H, BLOCK: tl.constexpr):
    """Put each slot among those that chose the same key."""
    z = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = place < NK
    j = tl.load(I + (z // H) * sib + (z % H) * sih + place, mask=ok, other=-1).to(tl.int32)
    ok = ok & (j >= 0)
    first = tl.load(UNTIL + z * M + j, mask=ok, other=0) - tl.load(COUNT + z * M + j, mask=ok, other=0)
    rank = tl.load(RANK + z * NK + place, mask=ok, other=0)
    tl.store(EDGE + first.to(tl.int64) + rank, place, mask=ok)


@triton.jit
def sort_edges(UNTIL, COUNT, EDGE, SORTED, keys, LONG: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr):
    """Sort the slots of keys chosen more than LONG times, each by counting those before it."""
    own = tl.program_id(0).to(tl.int64) * KEYS + tl.arange(0, KEYS)
    counts = tl.load(COUNT + own, mask=own < keys, other=0)
    longest = tl.max(counts, axis=0)
    while longest > LONG:
        key = tl.max(tl.where(counts == longest, own, -1), axis=0)
        counts = tl.where(own == key, 0, counts)
        first = (tl.load(UNTIL + key) - longest).to(tl.int64)
        for start in range(tl.program_id(1) * BLOCK, longest, tl.num_programs(1) * BLOCK):
            mine = start + tl.arange(0, BLOCK)
            edge = tl.load(EDGE + first + mine, mask=mine < longest, other=2147483647)
            rank = tl.zeros([BLOCK], tl.int32)
            for other in range(0, longest, BLOCK):
                theirs = other + tl.arange(0, BLOCK)
                against = tl.load(EDGE + first + theirs, mask=theirs < longest, other=2147483647)
                rank += tl.sum((against[None, :] < edge[:, None]).to(tl.int32), axis=1)
            tl.store(SORTED + first + rank, edge, mask=mine < longest)
        longest = tl.max(counts, axis=0)


@triton.jit
def by_key(
    Q,
    K,
    W,
    DY,
    PE,
    GE,
    UNTIL,
    COUNT,
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
    LONG: tl.constexpr,
    KIND: tl.constexpr,
    WEIGHT: tl.constexpr,
    HAS_W: tl.constexpr,
    DROPOUT: tl.constexpr,
    WANTS_K: tl.constexpr,
):
    """Gradients of BJ keys and values: the sum over the slots that chose each, in the order of slots."""
    pid, z = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = z // H, z % H
    key = pid * BJ + tl.arange(0, BJ)
    ok = key < M
    Q += b * sqb + h * sqh
    DY += b * sdb + h * sdh
    PE += z * N * KK
    GE += z * N * KK
    c = tl.arange(0, CP)
    e = tl.arange(0, EP)
    count = tl.load(COUNT + z * M + key, mask=ok, other=0)
    first = (tl.load(UNTIL + z * M + key, mask=ok, other=0) - count).to(tl.int64)
    few, many = count <= LONG, count > LONG
    spot = tl.arange(0, LONG)
    listed = (spot[None, :] < count[:, None]) & few[:, None]
    # Short lists are kept here, and the next slot is the smallest number above the last, in unsigned arithmetic.
    edges = tl.load(EDGE + first[:, None] + spot[None, :], mask=listed, other=2147483647).to(tl.uint32)
    dv = tl.zeros([BJ, CP], tl.float32)
    dk = tl.zeros([BJ, EP], tl.float32)
    if WANTS_K and KIND != DOT:
        k = load_rows(K + b * skb + h * skh, key, ok, skn, E, EP, 0, E == EP).to(tl.float32)
    prev = tl.zeros([BJ], tl.uint32) - 1
    for turn in range(tl.max(count, axis=0)):
        live = turn < count
        prev = prev + 1 + tl.min(edges - prev[:, None] - 1, axis=1)
        edge = tl.where(few, prev.to(tl.int32), 0)
        edge = tl.where(few, edge, tl.load(SORTED + first + turn, mask=live & many, other=0))
        row, slot = edge // KK, edge % KK
        dy = load_rows(DY, row, live, sdn, C, CP, 0, C == CP).to(tl.float32)
        if WEIGHT == UNIFORM:
            p = tl.where(live, 1.0, 0.0)
            if DROPOUT:
                p *= kept(SEED, z * N * KK + edge, dropout)
        else:
            p = tl.load(PE + edge, mask=live, other=0.0).to(tl.float32)
        if HAS_W:
            w = load_rows(W, slot, live, C, C, CP, 0, C == CP).to(tl.float32)
            dv += p[:, None] * (dy * w)
        else:
            dv += p[:, None] * dy
        if WANTS_K:
            q = load_rows(Q, row, live, sqn, E, EP, 0, E == EP).to(tl.float32)
            g = tl.load(GE + edge, mask=live, other=0.0)
            if KIND != DOT:
                q = tl.where(live[:, None], q - k, 0.0)
            dk += g[:, None] * q
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

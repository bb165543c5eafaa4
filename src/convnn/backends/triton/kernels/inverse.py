"""For every key, the slots that chose it, in their order."""

import triton
import triton.language as tl


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
    tl.store(EDGE + z * NK + first + rank, place, mask=ok)


@triton.jit
def sort_edges(UNTIL, COUNT, EDGE, SORTED, M, NK, SHORT: tl.constexpr, LONG: tl.constexpr, KEYS: tl.constexpr):
    """Sort the slots of keys chosen more than SHORT times, but not more than LONG, each by counting those before it."""
    z = tl.program_id(1).to(tl.int64)
    EDGE += z * NK
    SORTED += z * NK
    keys = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    counts = tl.load(COUNT + z * M + keys, mask=keys < M, other=0)
    counts = tl.where(counts > LONG, 0, counts)
    longest = tl.max(counts, axis=0)
    while longest > SHORT:
        key = tl.max(tl.where(counts == longest, keys, -1), axis=0)
        counts = tl.where(keys == key, 0, counts)
        first = tl.load(UNTIL + z * M + key) - longest
        for start in range(0, longest, KEYS):
            mine = start + tl.arange(0, KEYS)
            edge = tl.load(EDGE + first + mine, mask=mine < longest, other=2147483647)
            rank = tl.zeros([KEYS], tl.int32)
            for other in range(0, longest, KEYS):
                theirs = other + tl.arange(0, KEYS)
                against = tl.load(EDGE + first + theirs, mask=theirs < longest, other=2147483647)
                # A thread holds whole columns: along them it sums without the others.
                rank += tl.sum((against[:, None] < edge[None, :]).to(tl.int32), axis=0)
            tl.store(SORTED + first + rank, edge, mask=mine < longest)
        longest = tl.max(counts, axis=0)


@triton.jit
def order_hubs(
    I, UNTIL, COUNT, SORTED, M, NK, sib, sih, H, LONG: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr
):
    """Find the slots of keys chosen more than LONG times by going through all slots in order."""
    z = tl.program_id(1).to(tl.int64)
    I += (z // H) * sib + (z % H) * sih
    keys = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    counts = tl.load(COUNT + z * M + keys, mask=keys < M, other=0)
    longest = tl.max(counts, axis=0)
    while longest > LONG:
        key = tl.max(tl.where(counts == longest, keys, -1), axis=0)
        counts = tl.where(keys == key, 0, counts)
        spot = tl.load(UNTIL + z * M + key) - longest
        for start in range(0, NK, BLOCK):
            place = start + tl.arange(0, BLOCK)
            hit = (tl.load(I + place, mask=place < NK, other=-1).to(tl.int32) == key).to(tl.int32)
            tl.store(SORTED + z * NK + spot + tl.cumsum(hit, axis=0) - hit, place, mask=hit > 0)
            spot += tl.sum(hit, axis=0)
        longest = tl.max(counts, axis=0)


@triton.jit
def scan(COUNT, UNTIL, M, BLOCK: tl.constexpr):
    """Up to where the slots of each key reach."""
    z = tl.program_id(0).to(tl.int64)
    before = 0
    for start in range(0, M, BLOCK):
        key = start + tl.arange(0, BLOCK)
        count = tl.load(COUNT + z * M + key, mask=key < M, other=0)
        tl.store(UNTIL + z * M + key, before + tl.cumsum(count, axis=0), mask=key < M)
        before += tl.sum(count, axis=0)

"""For every key, the rows that chose it, where few rows choose each key at most once."""

import triton
import triton.language as tl


@triton.jit
def ones(x):
    """How many bits of a number are set."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def invert(
    I, CHOSEN, BEFORE, UNTIL, SORTED, M, NK, sib, sih, H,
    KK: tl.constexpr, WORDS: tl.constexpr, MP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The slots of one entry by key and in order, and up to where those of each key reach.

    Which rows chose a key is a bit for every row; how many bits are set before its own is the place of a slot. Threads
    wait for each other in between, and read from the second cache what others wrote.
    """
    z = tl.program_id(0).to(tl.int64)
    CHOSEN += z * M * WORDS
    BEFORE += z * M * WORDS
    UNTIL += z * M
    place = tl.arange(0, BLOCK)
    key = tl.arange(0, MP)
    word = tl.arange(0, WORDS)
    bits = CHOSEN + key[:, None] * WORDS + word[None, :]
    tl.store(bits, tl.zeros([MP, WORDS], tl.int32), mask=(key < M)[:, None])
    j = tl.load(I + (z // H) * sib + (z % H) * sih + place, mask=place < NK, other=-1).to(tl.int32)
    ok = j >= 0
    own, bit = (place // KK) // 32, ((place // KK) % 32).to(tl.uint32)
    tl.debug_barrier()
    flag = tl.full([BLOCK], 1, tl.uint32) << bit
    tl.atomic_or(CHOSEN + j * WORDS + own, flag.to(tl.int32, bitcast=True), mask=ok, sem="relaxed")
    tl.debug_barrier()
    rows = ones(tl.load(bits, mask=(key < M)[:, None], other=0, cache_modifier=".cg").to(tl.uint32, bitcast=True))
    count = tl.sum(rows, axis=1)
    until = tl.cumsum(count, axis=0)
    tl.store(UNTIL + key, until, mask=key < M)
    before = (until - count)[:, None] + tl.cumsum(rows, axis=1) - rows
    tl.store(BEFORE + key[:, None] * WORDS + word[None, :], before, mask=(key < M)[:, None])
    tl.debug_barrier()
    mine = tl.load(CHOSEN + j * WORDS + own, mask=ok, other=0, cache_modifier=".cg").to(tl.uint32, bitcast=True)
    first = tl.load(BEFORE + j * WORDS + own, mask=ok, other=0, cache_modifier=".cg")
    tl.store(SORTED + z * NK + first + ones(mine & (flag - 1)), place, mask=ok)

"""What the matrix products of the backward pass are made of, and what becomes of them: one row per slot."""

import triton
import triton.language as tl

from convnn.backends.triton.kernels.mix import load_piece


@triton.jit
def take_slots(
    V,
    I,
    P,
    U,
    A,
    DP,
    edges,
    skip,
    NK,
    H,
    svb,
    svh,
    svm,
    first,
    C: tl.constexpr,
    CN: tl.constexpr,
    G: tl.constexpr,
    BE: tl.constexpr,
    BC: tl.constexpr,
    WEIGHTED: tl.constexpr,
    TAKES: tl.constexpr,
    PULLS: tl.constexpr,
    ADDS: tl.constexpr,
):
    """Lay the weighted values of all slots side by side in A, and add to DP what U, likewise, says of the weights.

    Of each of G groups of C channels there are the CN from ``first`` on; A and U are (G, edges, CN), and there are
    ``skip`` edges before them.
    """
    own = tl.program_id(0).to(tl.int64) * BE + tl.arange(0, BE)
    ok = own < edges
    edge = own + skip
    z = edge // NK
    j = tl.load(I + edge, mask=ok, other=-1).to(tl.int32)
    filled = j >= 0
    V += first
    start = (z // H) * svb + (z % H) * svh + j * svm
    if WEIGHTED:
        p = tl.load(P + edge, mask=filled, other=0.0).to(tl.float32)
    pull = tl.zeros([BE], tl.float32)
    for begin in tl.range(0, G * CN, BC):
        channel = begin + tl.arange(0, BC)
        here = channel < G * CN
        # One group is told apart, so that its channels are seen to lie side by side.
        g = 0 if G == 1 else channel // CN
        c = channel if G == 1 else channel % CN
        v = tl.load(V + start[:, None] + (g * C + c)[None, :], mask=filled[:, None] & here[None, :], other=0.0)
        if G == 1:
            place = own[:, None] * CN + c[None, :]
        else:
            place = own[:, None] * CN + (g.to(tl.int64) * edges * CN + c)[None, :]
        if PULLS:
            u = tl.load(U + place, mask=filled[:, None] & here[None, :], other=0.0)
            pull += tl.sum(u.to(tl.float32) * v.to(tl.float32), axis=1)
        if TAKES:
            if WEIGHTED:
                v = (p[:, None] * v.to(tl.float32)).to(A.dtype.element_ty)
            tl.store(A + place, v, mask=ok[:, None] & here[None, :])
    if PULLS:
        if ADDS:
            pull += tl.load(DP + edge, mask=ok, other=0.0)
        tl.store(DP + edge, pull, mask=ok)


@triton.jit
def sum_by_key(
    U,
    P,
    UNTIL,
    EDGE,
    DV,
    keys,
    skip,
    skip_edges,
    M,
    NK,
    first,
    C: tl.constexpr,
    CN: tl.constexpr,
    G: tl.constexpr,
    BJ: tl.constexpr,
    BE: tl.constexpr,
    BC: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """Gradients of BJ values: the weighted rows of U of the slots that chose them, in the order of slots."""
    own = tl.program_id(0).to(tl.int64) * BJ + tl.arange(0, BJ)
    ok = own < keys
    key = own + skip
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    here = channel < G * CN
    g = 0 if G == 1 else channel // CN
    c = channel if G == 1 else channel % CN
    offset = c if G == 1 else g.to(tl.int64) * (keys // M) * NK * CN + c
    begin = tl.load(UNTIL + key - 1, mask=ok & (own % M > 0), other=0)
    end = tl.load(UNTIL + key, mask=ok, other=0)
    before = (own // M) * NK
    EDGE += skip_edges
    total = tl.zeros([BJ, BC], tl.float32)
    for turn in range(0, tl.max(end - begin, axis=0), BE):
        spot = begin[:, None] + turn + tl.arange(0, BE)[None, :]
        live = spot < end[:, None]
        edge = before[:, None] + tl.load(EDGE + before[:, None] + spot, mask=live, other=0)
        place = (edge * CN)[:, :, None] + offset[None, None, :]
        u = tl.load(U + place, mask=live[:, :, None] & here[None, None, :], other=0.0).to(tl.float32)
        if WEIGHTED:
            u *= tl.load(P + skip_edges + edge, mask=live, other=0.0).to(tl.float32)[:, :, None]
        total += tl.sum(u, axis=1)
    place = DV + key[:, None] * (G * C) + (first + g * C + c)[None, :]
    tl.store(place, total.to(DV.dtype.element_ty), mask=ok[:, None] & here[None, :])


@triton.jit
def order_short(I, UNTIL, EDGE, ORDERED, M, NK, SHORT: tl.constexpr, BLOCK: tl.constexpr):
    """Put the slots of keys chosen at most SHORT times in order: each by counting those before it."""
    z = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = tl.load(I + z * NK + slot, mask=slot < NK, other=-1).to(tl.int32)
    begin = tl.load(UNTIL + z * M + j - 1, mask=j > 0, other=0)
    count = tl.load(UNTIL + z * M + j, mask=j >= 0, other=0) - begin
    count = tl.where(count <= SHORT, count, 0)
    rank = tl.zeros([BLOCK], tl.int32)
    for turn in range(tl.max(count, axis=0)):
        other = tl.load(EDGE + z * NK + begin + turn, mask=turn < count, other=2147483647)
        rank += (other < slot).to(tl.int32)
    tl.store(ORDERED + z * NK + begin + rank, slot, mask=count > 0)


@triton.jit
def mix_taps(
    V,
    I,
    P,
    DY,
    PART,
    R,
    per,
    N,
    H,
    svb,
    svh,
    svm,
    C: tl.constexpr,
    O: tl.constexpr,
    G: tl.constexpr,
    KK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    WEIGHTED: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """BN outputs and BC channels of the gradient of a slot's tap, over ``per`` of the R rows; PART is (splits, G O, K, C)."""
    tiles: tl.constexpr = (O + BN - 1) // BN
    pid, split, g = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = pid % KK
    o = pid // KK % tiles * BN + tl.arange(0, BN)
    c = pid // (KK * tiles) * BC + tl.arange(0, BC)
    acc = tl.zeros([BN, BC], tl.float32)
    begin = split.to(tl.int64) * per
    for turn in tl.range(0, per, BM):
        row = begin + turn + tl.arange(0, BM)
        ok = (row < R) & (turn + tl.arange(0, BM) < per)
        z = row // N
        j = tl.load(I + row * KK + slot, mask=ok, other=-1).to(tl.int32)
        v = load_piece(V + g * C + (z // H) * svb + (z % H) * svh + j * svm, j >= 0, c, C, C % BC == 0)
        if WEIGHTED:
            p = tl.load(P + row * KK + slot, mask=j >= 0, other=0.0).to(tl.float32)
            v = (p[:, None] * v.to(tl.float32)).to(v.dtype)
        dy = load_piece(DY + row * (G * O) + g * O, ok, o, O, O % BN == 0)
        if INTERPRETED:  # its dot is wrong for bfloat16
            v = v.to(tl.float32)
            dy = dy.to(tl.float32)
        acc = tl.dot(tl.trans(dy), v, acc, input_precision=PRECISION)
    place = PART + ((split * (G * O) + g * O + o).to(tl.int64) * KK + slot)[:, None] * C + c[None, :]
    tl.store(place, acc, mask=(o < O)[:, None] & (c < C)[None, :])

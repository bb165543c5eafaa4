"""Combine gathered values with a kernel that mixes channels: a matrix product whose rows are looked up."""

import triton
import triton.language as tl


@triton.jit
def product(a, w, acc, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    """Rows times the transpose of rows, in float32."""
    if INTERPRETED:  # its dot is wrong for bfloat16
        a = a.to(tl.float32)
        w = w.to(tl.float32)
    return tl.dot(a, tl.trans(w), acc, input_precision=PRECISION)


@triton.jit
def load_piece(P, ok, c, C, FULL: tl.constexpr):
    """A piece of the channels of some rows, which start at P; 0 where there are none."""
    if FULL:
        return tl.load(P[:, None] + c[None, :], mask=ok[:, None], other=0.0)
    return tl.load(P[:, None] + c[None, :], mask=ok[:, None] & (c < C)[None, :], other=0.0)


@triton.jit
def add_piece(
    part,
    V,
    W,
    filled,
    o_ok,
    first,
    C: tl.constexpr,
    BC: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Add the products of the BC channels from ``first`` on of rows that start at V and W."""
    c = first + tl.arange(0, BC)
    v = load_piece(V, filled, c, C, C % BC == 0)
    w = load_piece(W, o_ok, c, C, C % BC == 0)
    return product(v, w, part, PRECISION, INTERPRETED)


@triton.jit
def mix_rows(
    V,
    I,
    P,
    W,
    S,
    Y,
    R,
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
    SHIFTED: tl.constexpr,
    ROLLED: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """BM of all R rows of all entries, BN of the O outputs of a group of C channels; W is (G O, K, C).

    The pieces of a slot's channels are taken one after the other where they are rolled: else all of them have a place.
    """
    tiles: tl.constexpr = (O + BN - 1) // BN
    parts: tl.constexpr = (C + BC - 1) // BC
    pid, g = tl.program_id(0), tl.program_id(1)
    row = (pid // tiles).to(tl.int64) * BM + tl.arange(0, BM)
    o = (pid % tiles) * BN + tl.arange(0, BN)
    row_ok, o_ok = row < R, o < O
    z = row // N
    V += g * C
    start = (z // H) * svb + (z % H) * svh
    taps = W + (g * O + o) * (KK * C)
    acc = tl.zeros([BM, BN], tl.float32)
    if WEIGHTED:
        for slot in tl.range(KK):
            j = tl.load(I + row * KK + slot, mask=row_ok, other=-1).to(tl.int32)
            p = tl.load(P + row * KK + slot, mask=j >= 0, other=0.0).to(tl.float32)
            part = tl.zeros([BM, BN], tl.float32)
            taken, tap = V + start + j * svm, taps + slot * C
            if ROLLED:
                for first in tl.range(0, parts * BC, BC):
                    part = add_piece(part, taken, tap, j >= 0, o_ok, first, C, BC, PRECISION, INTERPRETED)
            else:
                for first in tl.static_range(0, parts * BC, BC):
                    part = add_piece(part, taken, tap, j >= 0, o_ok, first, C, BC, PRECISION, INTERPRETED)
            acc += p[:, None] * part
    else:
        for turn in tl.range(KK * parts):
            slot, first = turn // parts, (turn % parts) * BC
            j = tl.load(I + row * KK + slot, mask=row_ok, other=-1).to(tl.int32)
            taken, tap = V + start + j * svm, taps + slot * C
            acc = add_piece(acc, taken, tap, j >= 0, o_ok, first, C, BC, PRECISION, INTERPRETED)
    if SHIFTED:
        acc += tl.load(S + row, mask=row_ok, other=0.0)[:, None]
    place = Y + row[:, None] * (G * O) + (g * O + o)[None, :]
    tl.store(place, acc.to(Y.dtype.element_ty), mask=row_ok[:, None] & o_ok[None, :])

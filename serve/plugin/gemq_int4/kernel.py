"""The matrix-vector kernel: y = x @ W^T for 1 to 8 rows of bf16 activations and int4 or int8 weights, in one launch.

A nibble becomes a float without a conversion: placed into the mantissa of 128.0 or 2048.0 it adds its own value (bits 16-19 of a float32
weigh 1 to 8 where the exponent is 7, bits 12-15 where it is 11), one logical operation a weight. What the offsets (128 or 2048, and the 8 of
offset binary) add up to, `sum(offset * x)`, is the same for every row of W and is taken off once a word. Bytes go into 32768.0 likewise.

A program owns R x BP rows of W and the whole of K, so nothing is added across programs: no atomics, and the same bits in every run. Every
operation's order along K is set by LANES and U alone and every multiply-add is an explicit fma, so a row of x gets the same bits in every batch.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _split4(v, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    """The 4 planes of v [A, B, C, 4], in order."""
    even, odd = tl.split(tl.reshape(v, (A, B, C, 2, 2)))
    v0, v2 = tl.split(even)
    v1, v3 = tl.split(odd)
    return v0, v1, v2, v3


@triton.jit
def _low(v):
    return (v << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(v):
    return (v & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _at(q, MASK: tl.constexpr, magic):
    return ((q & MASK) | magic).to(tl.float32, bitcast=True)


@triton.jit
def _dot4(q, x, t, F, G):
    """t plus the 8 nibbles of q [UL, BP, R] times their x [UL, BP, 1]; offsets 128 for even nibbles, 2048 for odd ones."""
    E: tl.constexpr = 0x000F0000
    D: tl.constexpr = 0x0000F000
    t = tl.fma(_at(q << 16, E, F), x[0], t)
    a = q << 8
    t = tl.fma(_at(a, D, G), x[1], t)
    t = tl.fma(_at(a, E, F), x[2], t)
    t = tl.fma(_at(q, D, G), x[3], t)
    t = tl.fma(_at(q, E, F), x[4], t)
    a = q >> 8
    t = tl.fma(_at(a, D, G), x[5], t)
    t = tl.fma(_at(a, E, F), x[6], t)
    return tl.fma(_at(q >> 16, D, G), x[7], t)


@triton.jit
def _dot8(q, x, t, F):
    """t plus the 4 bytes of q [UL, BP, R] times their x [UL, BP, 1]; offset 32768."""
    B: tl.constexpr = 0x0000FF00
    t = tl.fma(_at(q << 8, B, F), x[0], t)
    t = tl.fma(_at(q, B, F), x[1], t)
    t = tl.fma(_at(q >> 8, B, F), x[2], t)
    return tl.fma(_at(q >> 16, B, F), x[3], t)


@triton.jit
def gemv(x_ptr, w_ptr, s_ptr, b_ptr, y_ptr, N, M, K: tl.constexpr, BITS: tl.constexpr, GC: tl.constexpr, LANES: tl.constexpr,
         MP: tl.constexpr, R: tl.constexpr, U: tl.constexpr, STAGES: tl.constexpr, UNROLL: tl.constexpr, HAS_BIAS: tl.constexpr,
         WARPS: tl.constexpr):  # fmt: skip
    """y [M, N] (bf16; float32 shows the sum unrounded) from x [M, K / 2] int32 (pairs of bf16), w and s as `layout.arrange` makes them, M <= MP.

    A block is LANES x 4 words of a row; GC: groups in a block's quarter, 0 where a row has one scale. U blocks are read at once, R rows a
    thread.
    """
    PER: tl.constexpr = 32 // BITS  # weights in a word
    QUARTER: tl.constexpr = LANES * PER
    BLOCKS: tl.constexpr = (K + 4 * QUARTER - 1) // (4 * QUARTER)
    EVEN: tl.constexpr = BLOCKS % U == 0
    WHOLE: tl.constexpr = K % (4 * QUARTER * U) == 0
    UL: tl.constexpr = U * LANES
    BP: tl.constexpr = 32 * WARPS // UL  # rows side by side, one a set of UL threads
    HALF: tl.constexpr = PER // 2
    row = tl.program_id(0) * (R * BP) + tl.arange(0, BP)[:, None] + tl.arange(0, R)[None, :] * BP
    n = tl.where(row < N, row, 0)
    lane = tl.arange(0, UL)
    four = tl.arange(0, 4)
    # The magic floats plus a zero that the compiler can't know to be one: two constants in `(q & mask) | magic` would make two instructions of
    # it, a constant and a register make one. Added, not or'ed: an or would be taken apart again.
    zero = ((tl.program_id(0) + lane) >> 30)[:, None, None]
    F = (0x43000000 if BITS == 4 else 0x47000000) + zero
    G = 0x45000000 + zero
    acc = ()
    for _ in tl.static_range(MP):
        acc += (tl.zeros((UL, BP, R), tl.float32),)
    w_at = w_ptr + n[None, :, :, None] * (BLOCKS * LANES * 4) + (lane * 4)[:, None, None, None] + four[None, None, None, :]
    s_lane = (lane // LANES) * (4 * GC) + ((lane % LANES) * GC // LANES) * 4
    s_at = s_ptr + n[None, :, :, None] * (BLOCKS * 4 * GC) + s_lane[:, None, None, None] + four[None, None, None, :]
    x_lane = (lane // LANES) * (2 * QUARTER) + (lane % LANES) * HALF
    # every one of the BP rows' threads reads x itself: the same addresses, in the layout in which it is used
    x_pair = tl.zeros((1, BP, 1, 1), tl.int32) + x_lane[:, None, None, None] + tl.arange(0, HALF)[None, None, None, :]
    for first in tl.range(0, BLOCKS, U, num_stages=STAGES, loop_unroll_factor=UNROLL):
        there = (first + lane // LANES < BLOCKS)[:, None, None, None]
        if EVEN:
            q = tl.load(w_at + first * (LANES * 4), eviction_policy="evict_first")
        else:
            q = tl.load(w_at + first * (LANES * 4), mask=there, other=0, eviction_policy="evict_first")
        q = _split4(q, UL, BP, R)
        if GC > 0:
            if EVEN:
                s = tl.load(s_at + first * (4 * GC))
            else:
                s = tl.load(s_at + first * (4 * GC), mask=there, other=0.0)
            s = _split4(s.to(tl.float32), UL, BP, R)
        for c in tl.static_range(4):
            pair = first * (2 * QUARTER) + c * (QUARTER // 2) + x_pair
            new = ()
            for m in tl.static_range(MP):
                if WHOLE and MP == 1:
                    v = tl.load(x_ptr + pair)
                else:
                    v = tl.load(x_ptr + m * (K // 2) + pair, mask=pair < tl.where(m < M, K // 2, 0), other=0)
                if BITS == 4:
                    v0, v1, v2, v3 = _split4(v, UL, BP, 1)
                    x = (_low(v0), _high(v0), _low(v1), _high(v1), _low(v2), _high(v2), _low(v3), _high(v3))
                    off = -136.0 * ((x[0] + x[2]) + (x[4] + x[6])) - 2056.0 * ((x[1] + x[3]) + (x[5] + x[7]))
                    t = _dot4(q[c], x, tl.broadcast_to(off, (UL, BP, R)), F, G)
                else:
                    v0, v1 = tl.split(v)
                    x = (_low(v0), _high(v0), _low(v1), _high(v1))
                    off = -32896.0 * ((x[0] + x[2]) + (x[1] + x[3]))
                    t = _dot8(q[c], x, tl.broadcast_to(off, (UL, BP, R)), F)
                if GC > 0:
                    new += (tl.fma(t, s[c], acc[m]),)
                else:
                    new += (acc[m] + t,)
            acc = new
    for m in tl.static_range(MP):
        r = tl.sum(acc[m], 0)
        if GC == 0:
            r = r * tl.load(s_ptr + n).to(tl.float32)
        if HAS_BIAS:
            r = r + tl.load(b_ptr + n).to(tl.float32)
        tl.store(y_ptr + m * N + row, r.to(y_ptr.dtype.element_ty), mask=row < tl.where(m < M, N, 0))


@triton.jit
def expand(w_ptr, s_ptr, out_ptr, K: tl.constexpr, BITS: tl.constexpr, GC: tl.constexpr, LANES: tl.constexpr, U: tl.constexpr):
    """out [N, K] bf16: the weights themselves, one program a row and U blocks; for batches that a matrix product of the library's takes."""
    PER: tl.constexpr = 32 // BITS
    QUARTER: tl.constexpr = LANES * PER
    BLOCKS: tl.constexpr = (K + 4 * QUARTER - 1) // (4 * QUARTER)
    UL: tl.constexpr = U * LANES
    n = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, UL)
    block = tl.program_id(1) * U + lane // LANES
    c = tl.arange(0, 4)
    there = (block < BLOCKS)[:, None]
    q = tl.load(w_ptr + n * (BLOCKS * LANES * 4) + (block * (LANES * 4) + (lane % LANES) * 4)[:, None] + c[None, :], mask=there, other=0)
    if GC > 0:
        s_at = n * (BLOCKS * 4 * GC) + (block * (4 * GC) + ((lane % LANES) * GC // LANES) * 4)[:, None] + c[None, :]
        s = tl.load(s_ptr + s_at, mask=there, other=0.0).to(tl.float32)[:, :, None]
    else:
        s = tl.load(s_ptr + n).to(tl.float32)
    j = tl.arange(0, PER)[None, None, :]
    value = ((q[:, :, None] >> (BITS * j)) & ((1 << BITS) - 1)) - (1 << (BITS - 1))
    k = (block * (4 * QUARTER) + (lane % LANES) * PER)[:, None, None] + c[None, :, None] * QUARTER + j
    tl.store(out_ptr + n * K + k, (value.to(tl.float32) * s).to(out_ptr.dtype.element_ty), mask=there[:, :, None] & (k < K))

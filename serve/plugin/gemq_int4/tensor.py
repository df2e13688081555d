"""The matrix-vector kernel on tensor cores: y = x @ W^T for 1 to 8 rows of bf16 and int4 weights, at one price for all of them.

Sixteen rows of W by sixteen of K are the left operand of `mma.m16n8k16`, eight rows of x the right one. A pair of nibbles becomes a pair of
bf16 by one logical operation (placed into the mantissa of 128.0, where a bf16 counts in ones) and loses its offset of 136 by one exact
multiply-add; products are exact and are summed in float32. Every column of the product is a row of x, so none depends on the others.

Triton can't be told in which thread a fragment lies, so the instruction is written out: the tensors' first two axes are the four and the eight
threads of a warp that the instruction means, which is how Triton lays out a load of [4, 8, ...] that is contiguous along its last axis.
`linear` checks that on the card before it relies on it. Sums run along K in an order that S and P set; nothing is added across programs.
"""

from __future__ import annotations

import triton
import triton.language as tl

# two rows (r = 0, 1) of a word: $4 $5 words, $6 to $13 four pairs of x (twice each), $14 to $17 the sums, $18 $19 the bits of two 128.0
_TWO_PRODUCTS = tl.constexpr("""
{
.reg .b32 a<8>, u, v, one, off;
.reg .f32 d<4>;
mov.b32 one, 0x3f803f80;
mov.b32 off, 0xc308c308;
lop3.b32 a0, $4, 0x000f000f, $18, 0xea;
lop3.b32 a1, $5, 0x000f000f, $19, 0xea;
shr.u32 u, $4, 4;
shr.u32 v, $5, 4;
lop3.b32 a2, u, 0x000f000f, $18, 0xea;
lop3.b32 a3, v, 0x000f000f, $19, 0xea;
shr.u32 u, $4, 8;
shr.u32 v, $5, 8;
lop3.b32 a4, u, 0x000f000f, $18, 0xea;
lop3.b32 a5, v, 0x000f000f, $19, 0xea;
shr.u32 u, $4, 12;
shr.u32 v, $5, 12;
lop3.b32 a6, u, 0x000f000f, $18, 0xea;
lop3.b32 a7, v, 0x000f000f, $19, 0xea;
fma.rn.bf16x2 a0, a0, one, off;
fma.rn.bf16x2 a1, a1, one, off;
fma.rn.bf16x2 a2, a2, one, off;
fma.rn.bf16x2 a3, a3, one, off;
fma.rn.bf16x2 a4, a4, one, off;
fma.rn.bf16x2 a5, a5, one, off;
fma.rn.bf16x2 a6, a6, one, off;
fma.rn.bf16x2 a7, a7, one, off;
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {d0, d1, d2, d3}, {a0, a1, a2, a3}, {$6, $8}, {$14, $16, $15, $17};
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $2, $1, $3}, {a4, a5, a6, a7}, {$10, $12}, {d0, d1, d2, d3};
}
""")


@triton.jit
def _split4(v, S: tl.constexpr, R: tl.constexpr):
    """The 4 planes of v [4, 8, S, R, 4], in order."""
    even, odd = tl.split(tl.reshape(v, (4, 8, S, R, 2, 2)))
    v0, v2 = tl.split(even)
    v1, v3 = tl.split(odd)
    return v0, v1, v2, v3


@triton.jit
def _from(v, lane):
    """v of the warp's thread `lane`, both [4, 8, S, 1]."""
    return tl.inline_asm_elementwise("shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "=r,r,r", [v, lane], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["M"])
def gemv_tensor(x_ptr, w_ptr, s_ptr, b_ptr, y_ptr, N, M, K: tl.constexpr, GC: tl.constexpr, S: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
                SPREAD: tl.constexpr, HAS_BIAS: tl.constexpr):  # fmt: skip
    """y [M, N] from x [M, K / 2] int32 (pairs of bf16), w [N / 8, chunks, 8, 4, 4] as `layout.tile` makes it, s [N, chunks GC].

    A program owns 8 R rows of W, S warps share K, and a warp has P chunks of 128 of K on their way at once.
    GC: groups in a chunk (1, 2 or 4), 0 where a row has one scale.
    SPREAD, for M = 1: the eight threads that would hold eight rows of x hold the one row's next eight chunks instead, all read at the start, and
    each product takes its chunk from them; the other columns of a product then repeat the first, and nobody stores them.
    """
    CHUNKS: tl.constexpr = (K + 127) // 128
    EACH: tl.constexpr = (CHUNKS + S - 1) // S
    EVEN: tl.constexpr = (CHUNKS % S == 0) and (EACH % P == 0)
    pid = tl.program_id(0)
    t = tl.arange(0, 4)[:, None, None, None]
    g = tl.arange(0, 8)[None, :, None, None]
    part = tl.arange(0, S)[None, None, :, None]
    r = tl.arange(0, R)[None, None, None, :]
    four = tl.arange(0, 4)[None, None, None, None, :]
    eight = pid * R + r
    eight = tl.where(eight * 8 < N, eight, 0)
    w_at = (w_ptr + eight * (CHUNKS * 128) + part * (EACH * 128) + g * 16 + t * 4)[:, :, :, :, None] + four
    # rows far apart: so the load lies in the threads as the sums do
    s_at = s_ptr + (eight * 8 + g) * (CHUNKS * GC) + part * (EACH * GC) + t * 0
    x_at = (x_ptr + g * (K // 2) + part * (EACH * 64) + t * 4)[:, :, :, :, None] + four
    # two 128.0 and a zero that the compiler can't know to be one, so that they stay in a register
    magic = 0x43004300 + ((pid + t + g + part + r) >> 30)
    acc_a = tl.zeros((4, 8, S, R), tl.float32)
    acc_b = tl.zeros((4, 8, S, R), tl.float32)
    for first in tl.range(0, EACH, P, num_stages=1):
        words, scales = (), ()
        for p in tl.static_range(P):
            if EVEN:
                words += (tl.load(w_at + (first + p) * 128, eviction_policy="evict_first"),)
            else:
                there = (first + p < EACH) & (part * EACH + first + p < CHUNKS) & (r >= 0)
                words += (tl.load(w_at + (first + p) * 128, mask=there[:, :, :, :, None], other=0, eviction_policy="evict_first"),)
            if GC > 0:
                each = ()
                for i in tl.static_range(GC):
                    if EVEN:
                        each += (tl.load(s_at + (first + p) * GC + i),)
                    else:
                        each += (tl.load(s_at + (first + p) * GC + i, mask=there & (t >= 0) & (g >= 0), other=0.0),)
                scales += (each,)
        spread = ()
        if SPREAD:
            for j in tl.static_range((P + 7) // 8):
                for c in tl.static_range(4):
                    chunk = first + j * 8 + g
                    pair = (part * EACH + chunk) * 64 + c * 16 + t * 4
                    here = ((chunk < EACH) & (pair < K // 2))[:, :, :, :, None]
                    v = tl.load((x_ptr + pair)[:, :, :, :, None] + four, mask=here, other=0)
                    spread += (_split4(v, S, 1),)
        for p in tl.static_range(P):
            q = _split4(words[p], S, R)
            sum_a = tl.zeros((4, 8, S, R), tl.float32)
            sum_b = tl.zeros((4, 8, S, R), tl.float32)
            for c in tl.static_range(4):
                if SPREAD:
                    lane = t + (p % 8) * 4 + ((g + part) >> 30)
                    held = spread[(p // 8) * 4 + c]
                    x0, x1, x2, x3 = _from(held[0], lane), _from(held[1], lane), _from(held[2], lane), _from(held[3], lane)
                else:
                    if EVEN and K % 128 == 0:
                        here = (g < M)[:, :, :, :, None]
                    else:
                        pair = (part * EACH + first + p) * 64 + c * 16 + t * 4
                        here = ((g < M) & (first + p < EACH) & (pair < K // 2))[:, :, :, :, None]
                    v = tl.load(x_at + ((first + p) * 64 + c * 16), mask=here, other=0)
                    x0, x1, x2, x3 = _split4(v, S, 1)
                sum_a, sum_b = tl.inline_asm_elementwise(
                    _TWO_PRODUCTS, "=f,=f,=f,=f,r,r,r,r,r,r,r,r,r,r,f,f,f,f,r,r",
                    [q[c], tl.broadcast_to(x0, (4, 8, S, R)), tl.broadcast_to(x1, (4, 8, S, R)), tl.broadcast_to(x2, (4, 8, S, R)),
                     tl.broadcast_to(x3, (4, 8, S, R)), sum_a, sum_b, magic], dtype=(tl.float32, tl.float32), is_pure=False, pack=2)  # fmt: skip
                if GC > 0 and (c + 1) * GC % 4 == 0:
                    scale = scales[p][(c + 1) * GC // 4 - 1].to(tl.float32)
                    acc_a = tl.fma(sum_a, scale, acc_a)
                    acc_b = tl.fma(sum_b, scale, acc_b)
                    sum_a = tl.zeros((4, 8, S, R), tl.float32)
                    sum_b = tl.zeros((4, 8, S, R), tl.float32)
            if GC == 0:
                acc_a += sum_a
                acc_b += sum_b
    row = (pid * R + tl.arange(0, R)[None, None, :]) * 8 + tl.arange(0, 8)[None, :, None]
    known = tl.where(row < N, row, 0)
    # both columns of x in one sum over the warps: one exchange between them instead of two
    total = tl.sum(tl.join(acc_a, acc_b), 2)
    if GC == 0:
        total = total * tl.load(s_ptr + known).to(tl.float32)[:, :, :, None]
    if HAS_BIAS:
        total = total + tl.load(b_ptr + known).to(tl.float32)[:, :, :, None]
    m = (tl.arange(0, 4) * 2)[:, None, None, None] + tl.arange(0, 2)[None, None, None, :]
    tl.store(y_ptr + m * N + row[:, :, :, None], total.to(y_ptr.dtype.element_ty), mask=(row < N)[:, :, :, None] & (m < M))


@triton.jit
def expand_tile(w_ptr, s_ptr, out_ptr, K: tl.constexpr, GC: tl.constexpr):
    """out [N, K] bf16: the weights themselves, one program a row; for batches that a matrix product of the library's takes."""
    CHUNKS: tl.constexpr = (K + 127) // 128
    n = tl.program_id(0)
    word = tl.arange(0, 16)[:, None]  # of a chunk, as it lies along K
    j = tl.arange(0, 8)[None, :]
    w_at = w_ptr + (n // 8) * (CHUNKS * 128) + (n % 8) * 16 + (word % 4) * 4 + word // 4
    for chunk in tl.range(0, CHUNKS):
        value = ((tl.load(w_at + chunk * 128) >> ((j // 2) * 4 + (j % 2) * 16)) & 15) - 8
        if GC > 0:
            scale = tl.load(s_ptr + n * (CHUNKS * GC) + chunk * GC + word * GC // 16).to(tl.float32)
        else:
            scale = tl.load(s_ptr + n).to(tl.float32)
        k = chunk * 128 + word * 8 + j
        tl.store(out_ptr + n.to(tl.int64) * K + k, (value.to(tl.float32) * scale).to(out_ptr.dtype.element_ty), mask=k < K)

"""The solvers' column loops as Triton kernels: a block of columns in one launch, each program with a few rows of the weight.

A row's rounding depends on no other row. A program keeps its rows' block of columns in registers and takes the columns in turn there, where
the loops of gptq.py and refine.py launch a dozen kernels a column. What a block owes the columns after it is one matrix product, as there.
The results are those loops' up to the order of sums: an integer differs only where a weight lies on the border between two.

`add_outer_products` is the sum X^T X of bfloat16 inputs in float32, tile by tile of its upper triangle: products of bfloat16 numbers are
exact in float32, so that only the order of the sum differs from float32 arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore  # no stubs, and not there without a GPU build of torch
import triton.language as tl  # type: ignore

from gemq.quantize.scales import integer_range
from gemq.recipes.model import WeightScheme

_WIDTH = 128
_TILE, _DEPTH = 128, 64
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: added and taken away, it leaves the nearest integer, ties to even


@triton.jit
def _round(value, low, high):  # type: ignore[no-untyped-def]
    clipped = tl.minimum(tl.maximum(value, low), high)
    return (clipped + _ROUND) - _ROUND


@triton.jit
def _sweep_kernel(  # type: ignore[no-untyped-def]
    work, scales, factor, errors, first, width, out, size, low, high, WIDTH: tl.constexpr, ROWS: tl.constexpr
):
    """Columns `first` to `first + width` of `work` [in, out]: rounded in place; `errors` [width, out] takes (w - q) / U_jj."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = row < out
    place = (first + column).to(tl.int64)[:, None] * out + row[None, :]
    mask = (column < width)[:, None] & inside[None, :]
    held = tl.load(work + place, mask=mask, other=0.0)
    for index in range(WIDTH):  # past `width` the loads give ones and zeros, and nothing is stored
        here = column == index
        value = tl.sum(tl.where(here[:, None], held, 0.0), axis=0)
        there = inside & (index < width)
        scale = tl.load(scales + (first + index).to(tl.int64) * out + row, mask=there, other=1.0)
        line = factor + (first + index).to(tl.int64) * size + first
        rounded = _round(tl.div_rn(value, scale), low, high) * scale
        error = tl.div_rn(value - rounded, tl.load(line + index, mask=index < width, other=1.0))
        tl.store(errors + index * out + row, error, mask=there)
        ahead = tl.load(line + column, mask=(column > index) & (column < width), other=0.0)
        held = tl.where(here[:, None], rounded[None, :], held - ahead[:, None] * error[None, :])
    tl.store(work + place, held, mask=mask)


@triton.jit
def _descend_kernel(  # type: ignore[no-untyped-def]
    gradient, integers, scales, moments, curvature, steps, first, width, out, size, group, low, high,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Columns `first` to `first + width`: `integers` [in, out] take their best values, `steps` [width, out] what that moved the weights by."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = row < out
    place = (first + column).to(tl.int64)[:, None] * out + row[None, :]
    slope = tl.load(gradient + place, mask=(column < width)[:, None] & inside[None, :], other=0.0)
    for index in range(WIDTH):
        here = column == index
        value = tl.sum(tl.where(here[:, None], slope, 0.0), axis=0)
        there = inside & (index < width)
        scale = tl.load(scales + ((first + index) // group).to(tl.int64) * out + row, mask=there, other=1.0)
        lies = integers + (first + index).to(tl.int64) * out + row
        held = tl.load(lies, mask=there, other=0.0)
        best = _round(tl.div_rn(tl.div_rn(value, scale), tl.load(curvature + first + index, mask=index < width, other=1.0)) + held, low, high)
        step = (best - held) * scale
        tl.store(lies, best, mask=there)
        tl.store(steps + index * out + row, step, mask=there)
        line = moments + (first + index).to(tl.int64) * size + first
        ahead = tl.load(line + column, mask=(column > index) & (column < width), other=0.0)
        slope = slope - ahead[:, None] * step[None, :]


@triton.jit
def _outer_kernel(  # type: ignore[no-untyped-def]
    x, total, tokens, size, tiles, STEPS: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr
):
    """One tile [TILE, TILE] of `total` [size, size] += x^T x, x [tokens, size]; blocks of SPAN tiles below the diagonal are left out."""
    # tiles in groups of rows, so that programs that run together read the same columns of x
    number = tl.program_id(0)
    group = number // (GROUP * tiles)
    rows = min(tiles - group * GROUP, GROUP)
    down = group * GROUP + (number % (GROUP * tiles)) % rows
    across = (number % (GROUP * tiles)) // rows
    if across // SPAN < down // SPAN:
        return
    left = down * TILE + tl.arange(0, TILE)
    right = across * TILE + tl.arange(0, TILE)
    depth = tl.arange(0, DEPTH)
    sums = tl.zeros((TILE, TILE), tl.float32)
    for step in range(STEPS):
        start = step * DEPTH
        line = (start + depth).to(tl.int64)[:, None] * size
        there = ((start + depth) < tokens)[:, None]
        a = tl.load(x + line + left[None, :], mask=there & (left < size)[None, :], other=0.0)
        b = tl.load(x + line + right[None, :], mask=there & (right < size)[None, :], other=0.0)
        sums = tl.dot(tl.trans(a), b, sums)
    place = total + left.to(tl.int64)[:, None] * size + right[None, :]
    mask = (left < size)[:, None] & (right < size)[None, :]
    tl.store(place, tl.load(place, mask=mask, other=0.0) + sums, mask=mask)


def _launch(out: int) -> dict[str, int]:
    """Rows a program and warps: few rows need more programs than large ones to fill a card."""
    return {"ROWS": 16, "num_warps": 4} if out < 8192 else {"ROWS": 32, "num_warps": 4}


def sweep(work: torch.Tensor, factor: torch.Tensor, scales: torch.Tensor, scheme: WeightScheme) -> torch.Tensor:
    """What gptq._sweep gives for `work` [out, in] with `scales` [out, in], integers only."""
    low, high = integer_range(scheme)
    work, scales, factor = work.T.contiguous(), scales.T.contiguous(), factor.contiguous()
    size, out = work.shape
    launch: Any = _launch(out)
    errors = torch.empty(_WIDTH, out, dtype=work.dtype, device=work.device)
    for first in range(0, size, _WIDTH):
        width = min(_WIDTH, size - first)
        _sweep_kernel[(triton.cdiv(out, launch["ROWS"]),)](
            work, scales, factor, errors, first, width, out, size, float(low), float(high), WIDTH=_WIDTH, **launch
        )
        if first + width < size:
            work[first + width :].addmm_(factor[first : first + width, first + width :].T, errors[:width], alpha=-1)
    return work.T


def descend(
    gradient: torch.Tensor, integers: torch.Tensor, scales: torch.Tensor, moments: torch.Tensor, curvature: torch.Tensor, scheme: WeightScheme
) -> None:
    """One pass of refine._descend over `integers` [in, out] in place; `gradient` [in, out] is used up, `scales` are [groups, out]."""
    low, high = integer_range(scheme)
    size, out = gradient.shape
    launch: Any = _launch(out)
    moments, steps = moments.contiguous(), torch.empty(_WIDTH, out, dtype=gradient.dtype, device=gradient.device)
    for first in range(0, size, _WIDTH):
        width = min(_WIDTH, size - first)
        _descend_kernel[(triton.cdiv(out, launch["ROWS"]),)](
            gradient, integers, scales, moments, curvature, steps, first, width, out, size, size // scales.shape[0], float(low), float(high),
            WIDTH=_WIDTH, **launch,
        )  # fmt: skip
        if first + width < size:
            gradient[first + width :].addmm_(moments[first + width :, first : first + width], steps[:width], alpha=-1)


def add_outer_products(total: torch.Tensor, inputs: torch.Tensor, block: int) -> None:
    """Add x^T x over the rows x of `inputs` [tokens, in], a 16-bit float, to the blocks on and above the diagonal of `total` [in, in] float32.

    `block` is a multiple of 128.
    """
    inputs = inputs.contiguous()
    tokens, size = inputs.shape
    tiles = triton.cdiv(size, _TILE)
    launch: Any = {"TILE": _TILE, "DEPTH": _DEPTH, "GROUP": 8, "SPAN": block // _TILE, "num_warps": 8, "num_stages": 3}
    _outer_kernel[(tiles * tiles,)](inputs, total, tokens, size, tiles, STEPS=triton.cdiv(tokens, _DEPTH), **launch)

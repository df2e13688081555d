"""scales.find_scales' search as a Triton kernel: a group is read once and every clip is tried on it in registers."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton  # type: ignore  # no stubs, and not there without a GPU build of torch
import triton.language as tl  # type: ignore

_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: added and taken away, it leaves the nearest integer, ties to even
_TINY = tl.constexpr(torch.finfo(torch.bfloat16).tiny)


@triton.jit
def _stored(scale):  # type: ignore[no-untyped-def]
    """As bfloat16 stores it, never zero; rounded by hand, since the interpreter cuts off."""
    scale = tl.where(tl.abs(scale) < _TINY, _TINY, scale)
    bits = scale.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _error(value, cost, scale, low, high):  # type: ignore[no-untyped-def]
    ratio = tl.minimum(tl.maximum(tl.div_rn(value, scale[:, None] + tl.zeros_like(value)), low), high)
    off = ((ratio + _ROUND) - _ROUND) * scale[:, None] - value
    return tl.sum(off * off * cost, axis=1)


@triton.jit
def _search_kernel(  # type: ignore[no-untyped-def]
    weight, cost, divisors, found, count, groups, width, low, high, minmax, STEPS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr
):
    """`found` [count] takes the scale of each group of `weight` [count, width]; a row of the matrix has `groups` of them."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    place = tl.arange(0, WIDTH)
    inside = (group < count)[:, None] & (place < width)[None, :]
    value = tl.load(weight + group[:, None] * width + place[None, :], mask=inside, other=0.0)
    weighted = tl.load(cost + (group % groups)[:, None] * width + place[None, :], mask=inside, other=0.0)
    most, least = tl.max(value, axis=1), tl.min(value, axis=1)
    largest = tl.maximum(most, -least)
    signed = tl.where(most > -least, largest, -largest)
    best = _stored(tl.div_rn(largest, minmax))
    error = _error(value, weighted, best, low, high)
    for step in range(STEPS):
        # the extreme at the low end, which has one integer more, then at the high end
        scale = _stored(tl.div_rn(-signed, tl.load(divisors + 2 * step)))
        tried = _error(value, weighted, scale, low, high)
        best, error = tl.where(tried < error, scale, best), tl.minimum(tried, error)
        scale = _stored(tl.div_rn(signed, tl.load(divisors + 2 * step + 1)))
        tried = _error(value, weighted, scale, low, high)
        best, error = tl.where(tried < error, scale, best), tl.minimum(tried, error)
    tl.store(found + group, best, mask=group < count)


@cache
def _divisors(low: int, high: int, reaches: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor([end * reach for reach in reaches for end in (-low, high)], dtype=torch.float32, device=device)


def best_clips(grouped: torch.Tensor, cost: torch.Tensor, low: int, high: int, reaches: tuple[float, ...]) -> torch.Tensor:
    """The scales [out, groups] that scales._best_clip finds for `grouped` [out, groups, width] with `cost` [1, groups, width]."""
    out, groups, width = grouped.shape
    grouped, cost = grouped.contiguous(), cost.contiguous()
    found = torch.empty(out, groups, dtype=torch.float32, device=grouped.device)
    padded = triton.next_power_of_2(width)
    each = max(1, 4096 // padded)
    launch: Any = {"STEPS": len(reaches), "GROUPS": each, "WIDTH": padded, "num_warps": 4 if padded <= 4096 else 8}
    _search_kernel[(triton.cdiv(out * groups, each),)](
        grouped, cost, _divisors(low, high, reaches, grouped.device), found, out * groups, groups, width, float(low), float(high),
        (high - low) / 2, **launch,
    )  # fmt: skip
    return found

"""Large float32 products: torch's own on a CPU; on a GPU three products of tensor cores, which are as exact and four times as fast.

TF32 keeps 11 bits of a number's 24. With x = h + l, h its first 11 bits, a product is h h' + h l' + l h' up to 2^-22 of |x| |x'| (Ootomo and
Yokota, "Recovering single precision accuracy from Tensor Cores", 2022); what is an integer of few bits has no l.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

DEPTH = 2048  # of the pieces that are split at a time
_LOW_BITS = 0x1FFF


def product(left: torch.Tensor, right: torch.Tensor, *, left_is_short: bool = False) -> torch.Tensor:
    """`left` [m, k] @ `right` [k, n], float32. `left_is_short`: every number of it has 11 bits at most."""
    if not left.is_cuda:
        return left @ right
    made = torch.zeros(left.shape[0], right.shape[1], dtype=torch.float32, device=left.device)
    add_product(made, left, right, left_is_short=left_is_short)
    return made


def add_product(
    total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, left_is_short: bool = False, right_is_short: bool = False
) -> None:
    """Add `left` [m, k] @ `right` [k, n] to `total`, float32 all of them. `..._is_short`: every number of it has 11 bits at most."""
    if not total.is_cuda:
        total.addmm_(left, right)
        return
    with _tf32():
        add_in_parts(total, left, right, left_is_short=left_is_short, right_is_short=right_is_short)


def add_in_parts(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, left_is_short: bool, right_is_short: bool) -> None:
    """`add_product` in the parts that tensor cores multiply exactly: the small ones first."""
    for start in range(0, left.shape[1], DEPTH):
        columns, rows = left[:, start : start + DEPTH], right[start : start + DEPTH]
        left_high, left_low = (columns, None) if left_is_short else split(columns)
        right_high, right_low = (rows, None) if right_is_short else split(rows)
        if right_low is not None:
            total.addmm_(left_high, right_low)
        if left_low is not None:
            total.addmm_(left_low, right_high)
        total.addmm_(left_high, right_high)


def add_crossed(total: torch.Tensor, ours: torch.Tensor, source: torch.Tensor) -> None:
    """Add (y - x)^T x to `total` [in, in] float32 over the rows of `ours`, x [tokens, in], and of `source`, y [tokens, in].

    Of numbers in bfloat16 y - x is a sum of two such, and a GPU multiplies these three times as fast as parts of float32.
    """
    # as many rows at a time as are multiplied at once: in float32 a batch is larger than what it makes
    for x, y in zip(ours.split(DEPTH), source.split(DEPTH), strict=True):
        apart = y.to(torch.float32) - x.to(torch.float32)
        if total.is_cuda and x.dtype == y.dtype == torch.bfloat16:
            total.add_(torch.mm(torch.cat(halves(apart)).T, torch.cat([x, x]), out_dtype=torch.float32))
        else:
            add_product(total, apart.T, x.to(torch.float32), right_is_short=x.dtype == torch.bfloat16)


def halves(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(h, l) in bfloat16 with h + l = `value`, of float32, up to 2^-17 of it: exactly for the difference of two bfloat16 of like size."""
    high = value.to(torch.bfloat16)
    return high, (value - high.to(torch.float32)).to(torch.bfloat16)


def split(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(h, l) with h + l = `value`, h of 11 bits."""
    high = (value.contiguous().view(torch.int32) & ~_LOW_BITS).view(torch.float32)
    return high, value - high


@contextmanager
def _tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before

"""How far a quantized weight is from the weight that it replaces: squared errors of rows, and their share of the weight's own size.

With a row d of the difference and H the mean x x^T of the inputs, the mean squared error of that output is d H d^T; without inputs it is
d d^T. A row is divided by its largest magnitude before it is squared, so that weights of 1e30 don't overflow float32 and weights of 1e-30
don't vanish; what is summed over rows is float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from gemq.quantize.products import product

ErrorKind = Literal["output_error", "weight_error"]


def row_errors(difference: torch.Tensor, moments: torch.Tensor | None) -> torch.Tensor:
    """d H d^T of each row of `difference` [out, in] float32, [out] float64; d d^T where `moments` [in, in] is None. Never negative."""
    size = difference.abs().amax(1, keepdim=True)
    size = torch.where(size > 0, size, 1.0)
    unit = difference / size
    squares = unit.square() if moments is None else product(unit, moments).mul_(unit)
    return squares.sum(1).clamp_min(0).to(torch.float64) * size.squeeze(1).to(torch.float64).square()


@dataclass(frozen=True)
class ErrorSums:
    """Sums of `row_errors` over some rows, scalars on their device: of the difference and of the weight, with moments (or None) and without."""

    error: torch.Tensor | None
    signal: torch.Tensor | None
    plain_error: torch.Tensor
    plain_signal: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor, difference: torch.Tensor, moments: torch.Tensor | None) -> ErrorSums:
        """Of rows of a weight and its difference from what is stored, both [rows, in] float32."""
        plain_error, plain_signal = row_errors(difference, None).sum(), row_errors(weight, None).sum()
        if moments is None:
            return cls(None, None, plain_error, plain_signal)
        return cls(row_errors(difference, moments).sum(), row_errors(weight, moments).sum(), plain_error, plain_signal)


def measured_error(weight: torch.Tensor, restored: torch.Tensor, moments: torch.Tensor | None) -> tuple[ErrorKind, float]:
    """`share_of` for a weight and what is stored of it, both [out, in] float32, that are at hand at once."""
    return share_of([ErrorSums.of(weight, weight - restored, moments)])


def share_of(sums: Sequence[ErrorSums]) -> tuple[ErrorKind, float]:
    """(`output_error`, the error as a share of the weight's own output), over all rows.

    (`weight_error`, the same without moments) where there are none, or where the weight's own output is zero: then no error can be stated as a
    share of it.
    """
    def ratio(errors: Sequence[torch.Tensor], signals: Sequence[torch.Tensor]) -> float | None:
        error, signal = (sum(value.item() for value in values) for values in (errors, signals))
        return error / signal if signal > 0 and math.isfinite(signal) and math.isfinite(error) else None

    under = [(one.error, one.signal) for one in sums if one.error is not None and one.signal is not None]
    if under and (found := ratio(*zip(*under, strict=True))) is not None:
        return "output_error", found
    return "weight_error", ratio([one.plain_error for one in sums], [one.plain_signal for one in sums]) or 0.0

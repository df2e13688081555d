"""How far a quantized weight is from the weight that it replaces: squared errors of rows, and their share of the weight's own size.

With a row d of the difference and H the mean x x^T of the inputs, the mean squared error of that output is d H d^T; without inputs it is
d d^T. A row is divided by its largest magnitude before it is squared, so that weights of 1e30 don't overflow float32 and weights of 1e-30
don't vanish; what is summed over rows is float64.
"""

from __future__ import annotations

import math
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


def measured_error(weight: torch.Tensor, restored: torch.Tensor, moments: torch.Tensor | None) -> tuple[ErrorKind, float]:
    """(`output_error`, the sum of `row_errors` of `weight` - `restored` over that of `weight`), both [out, in] float32.

    (`weight_error`, the same without `moments`) where these are None, or where the weight's own output is zero: then no error of it can be
    stated as a share of it.
    """
    difference = weight - restored
    if moments is not None:
        error, signal = row_errors(difference, moments).sum().item(), row_errors(weight, moments).sum().item()
        if signal > 0 and math.isfinite(signal) and math.isfinite(error):
            return "output_error", error / signal
    error, signal = row_errors(difference, None).sum().item(), row_errors(weight, None).sum().item()
    return "weight_error", error / signal if signal > 0 else 0.0

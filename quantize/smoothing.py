"""Smoothing: scale the inputs of a unit down where they are large and its weights up, before anything is rounded; the model stays the same.

AWQ (Lin et al., "AWQ: Activation-aware Weight Quantization", 2023, section 3.2): with s = (size of each input) ** alpha, W diag(s) is rounded
and diag(s)^-1 x is read. Weights that meet large inputs so take more of their group's range. alpha is searched, and 0 always competes.

What made the input takes 1 / s. A norm does as its stored dtype allows: its weight is rounded first, and s is what became of it, so that the
weights make up for the rounding exactly (`fold_into_norm`). up_proj does in its scales, by powers of two, which no format rounds.

The loss that decides is that of what follows. Rounded to nearest, an error e of the weights costs e H e^T, H the second moment of the
inputs. GPTQ lets later columns make up for most of it, and what is left is e_j^2 times the variance of input j given the inputs that are
rounded after it, 1 / U_jj^2 of its factor. On Gemma 3 270M that forecast is within 3% of GPTQ's error on held-out inputs where e H e^T promises
gains of a third that GPTQ never sees, and picks an alpha twice too large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gemq.quantize.gptq import Factorization, degenerate
from gemq.quantize.scales import find_scales, restore, round_to_scales
from gemq.recipes.model import WeightScheme

LARGEST = 16.0  # no input is scaled further, up or down
_ROWS = 512  # of a unit are looked at: they are alike, and rounded one by one
_LEAST_GAIN = 0.01  # a smaller one is within what the sample of rows leaves open


@dataclass(frozen=True)
class Smoothed:
    """What the search came to: `scale` [in] for the unit's weights (None: as they are), its alpha, and relative losses before and after."""

    scale: torch.Tensor | None
    alpha: float
    before: float
    after: float
    note: str = ""  # why nothing could be searched

    def report(self, tensor: str) -> dict[str, Any]:
        """For the manifest; `tensor` is the producer's in the source."""
        found = {"producer": tensor, "loss_before": self.before, "loss_after": self.after, "alpha": self.alpha}
        return found if self.scale is not None else {**found, "kept": self.note or "no alpha lowers the loss by 1%"}


def wanted_scale(moments: torch.Tensor, alpha: float) -> torch.Tensor:
    """rms ** alpha of each input, [in], over its geometric mean; 1 for an input that never fired. `moments` is the mean x x^T [in, in]."""
    square = moments.diagonal()
    fired = square > 0
    if not fired.any():
        return torch.ones_like(square)
    scale = torch.where(fired, square, 1.0).pow(alpha / 2)
    scale = scale / scale[fired].log().mean().exp()
    return torch.where(fired, scale.clamp(1 / LARGEST, LARGEST), 1.0)


def powers_of_two(scale: torch.Tensor) -> torch.Tensor:
    """Each of `scale` as the nearest power of two, by ratio."""
    return torch.exp2(scale.log2().round())


def fold_into_norm(weight: torch.Tensor, scale: torch.Tensor, *, one_plus_w: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(the norm's weight, in its dtype, over about `scale`; the scale [in] float64 that it was divided by in truth).

    A norm multiplies by w, or by 1 + w. Where the quotient can't be stored but as nothing, or there is nothing to divide, the weight stays.
    """
    one = 1.0 if one_plus_w else 0.0
    gain = weight.to(torch.float64) + one
    stored = (gain / scale.to(torch.float64) - one).to(weight.dtype)
    became = stored.to(torch.float64) + one
    truly = gain / became
    sound = torch.isfinite(truly) & (truly > 0) & (truly <= 2 * LARGEST) & (truly >= 0.5 / LARGEST)
    return torch.where(sound, stored, weight), torch.where(sound, truly, 1.0)


def conditional_variances(factorization: Factorization) -> torch.Tensor:
    """Of each input [in], its variance given those that are rounded after it."""
    found = torch.empty_like(factorization.moments.diagonal())
    found[factorization.order] = factorization.factor.diagonal().square().reciprocal()
    return found


def search(
    weight: torch.Tensor,
    moments: torch.Tensor,
    scheme: WeightScheme,
    alphas: Sequence[float],
    possible: Callable[[torch.Tensor], torch.Tensor],
    variances: torch.Tensor | None = None,
) -> Smoothed:
    """The best of `alphas` for `weight` [out, in] float32, or none.

    `possible` turns a wanted scale [in] into one that the producer can take. `variances`: of each input given those rounded after it, where
    GPTQ follows; else weights are rounded to nearest.
    """
    rows = weight[:: max(1, weight.shape[0] // _ROWS)]
    if why := degenerate(moments):
        return Smoothed(None, 0.0, 0.0, 0.0, why)
    signal = ((rows @ moments) * rows).sum().item()
    ones = torch.ones_like(moments.diagonal())
    before = _loss(rows, ones, moments, scheme, variances) / signal if 0 < signal < math.inf else math.nan
    if not math.isfinite(before):
        return Smoothed(None, 0.0, 0.0, 0.0, "the unit's output on the calibration set is zero or not finite")
    best = Smoothed(None, 0.0, before, before)
    for alpha in alphas:
        scale = possible(wanted_scale(moments, alpha)).to(ones)
        if torch.equal(scale, ones):
            continue
        loss = _loss(rows, scale, moments, scheme, variances) / signal  # NaN or infinite is never the least
        if loss < best.after and loss <= (1 - _LEAST_GAIN) * before:
            best = Smoothed(scale, alpha, before, loss)
    return best


def _loss(rows: torch.Tensor, scale: torch.Tensor, moments: torch.Tensor, scheme: WeightScheme, variances: torch.Tensor | None) -> float:
    scaled = rows * scale
    scales = find_scales(scaled, scheme, moments.diagonal() / scale.square())
    error = (scaled - restore(round_to_scales(scaled, scales, scheme), scales, scheme)) / scale
    squares = (error @ moments) * error if variances is None else error.square() * variances
    return squares.sum().item()


def of_smoothed_inputs(moments: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The mean x x^T [in, in] of inputs divided by `scale` [in]; in place of `moments`."""
    return moments.div_(scale).div_(scale.unsqueeze(1))


def refactored(factorization: Factorization, scale: torch.Tensor) -> Factorization:
    """`factorization` for inputs divided by `scale` [in], exactly: (S^-1 H S^-1)^-1 = (U S)^T (U S). In place, order and damping kept."""
    factorization.factor.mul_(scale.index_select(0, factorization.order))
    return replace(factorization, moments=of_smoothed_inputs(factorization.moments, scale))

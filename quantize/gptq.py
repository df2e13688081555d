"""GPTQ: round a weight column by column and let the columns still to come make up for each error.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (2022), algorithm 1. The objective is
||(W - Q) X||^2 = tr((W - Q) H (W - Q)^T) with H = X X^T. Written here rather than called: llm-compressor's `quantize_weight` solves one
module at a time, and q/k/v or gate/up read the same input, so their rows go through one factorization and one sweep.

Activation order is static: scales belong to consecutive inputs, as served; only the order in which columns are rounded follows the Hessian.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gemq.errors import IntegrityError
from gemq.output import warn
from gemq.quantize.products import add_crossed
from gemq.quantize.refine import refine
from gemq.quantize.scales import find_scales, integer_range, restore, round_to_scales, to_fp8
from gemq.quantize.squared_errors import measured_error, row_errors
from gemq.quantize.threads import single_thread
from gemq.recipes.model import Gptq, WeightScheme

_STRIP = 32
_ROWS_ON_GPU = 8192  # solved at a time there: the solver holds ten times their size
_LARGEST_MOVE, _LARGEST_GAIN = 0.2, 0.03  # of a row's target from the row's weight, and of that the part along the weight; see `target`
_SMALLEST, _LARGEST = 1e-24, 1e24  # mean squares of inputs whose products, dampening and inverse float32 can hold


class Hessian:
    """The running mean of x x^T over the inputs x of a unit, and of (y - x) x^T where the source's own inputs y come along.

    Sums in float32 on the device of the inputs; of x x^T only blocks on and above the diagonal are computed, since it is symmetric.
    """

    def __init__(self, in_features: int, device: torch.device | str = "cpu", block: int = 512) -> None:
        self.sum = torch.zeros(in_features, in_features, dtype=torch.float32, device=device)
        self.cross: torch.Tensor | None = None
        self.rows = 0
        self._block = block

    def add(self, inputs: torch.Tensor, source: torch.Tensor | None = None) -> None:
        """Add the rows of `inputs` [..., in], and of `source`, the same rows as the source's own weights make them."""
        flat = inputs.reshape(-1, inputs.shape[-1])
        self.rows += flat.shape[0]
        if flat.is_cuda and flat.dtype == torch.bfloat16:
            from gemq.quantize.sweep_triton import add_outer_products

            add_outer_products(self.sum, flat, self._block)
        else:
            flat = flat.to(torch.float32)
            for start in range(0, flat.shape[1], self._block):
                stop = min(start + self._block, flat.shape[1])
                self.sum[start:stop, start:].addmm_(flat[:, start:stop].T, flat[:, start:])
        if source is not None:
            if self.cross is None:
                self.cross = torch.zeros_like(self.sum)
            add_crossed(self.cross, inputs.reshape(flat.shape), source.reshape(flat.shape))

    def drop_unusable_cross(self) -> str:
        """Forget the mean of (y - x) x^T if it is not finite; returns a note on that, or nothing."""
        if self.cross is None or torch.isfinite(self.cross).all():
            return ""
        self.cross = None
        return "the source's own inputs are not finite on the calibration set: the weights make up for no earlier error"

    def blocks(self) -> Iterator[torch.Tensor]:
        """Views of the sums, a few rows at a time and together all that is computed of them: to add up those of several devices."""
        size = self.sum.shape[0]
        for start in range(0, size, self._block):
            yield self.sum[start : start + self._block, start:]
        if self.cross is not None:
            yield from self.cross.split(self._block)

    def mean(self, name: str) -> torch.Tensor:
        """H [in, in] float32, made in place of the sum, so that it can be asked for once.

        Raises IntegrityError for inputs that were not finite or never came.
        """
        if self.rows == 0:
            raise IntegrityError(f"no calibration token reached {name}", "calibrate with more or longer samples")
        full = self.sum
        del self.sum
        for start in range(0, full.shape[0], self._block):
            stop = min(start + self._block, full.shape[0])
            full[start:stop, :start] = full[:start, start:stop].T
        full.div_(self.rows)
        if not torch.isfinite(full.diagonal()).all():
            raise IntegrityError(
                f"the inputs of {name} are not finite on the calibration set, or too large to be squared in float32",
                "check the source's weights: `gemq eval-ppl` on it should be finite",
            )
        return full


def inverse_factor(hessian: torch.Tensor, dampening: float, name: str, order: torch.Tensor | None = None) -> torch.Tensor:
    """The upper triangular U [in, in] float32 with (H + d I)^-1 = U^T U, d = `dampening` times the mean diagonal; H with its columns in `order`.

    With J the reversal of order, J H J = L L^T gives H = R R^T for the upper R = J L J, so U = R^-1 = J L^-1 J: one Cholesky factorization
    and one triangular inverse, in float64. An input that never fired (a zero on the diagonal) counts as an average one. The damping is raised
    tenfold, with a warning, while the factorization fails.
    """
    size = hessian.shape[0]
    order = torch.arange(size, device=hessian.device) if order is None else order
    diagonal = hessian.diagonal().to(torch.float64)
    alive = diagonal[diagonal != 0]
    diagonal = torch.where(diagonal == 0, alive.mean() if alive.numel() else torch.ones_like(diagonal), diagonal)
    reverse = order.flip(0)
    damping = dampening
    while damping <= 1.0:
        # matrices of this size set the walk's peak of memory: one in float64, whose factor takes its place
        damped = torch.empty(size, size, dtype=torch.float64, device=hessian.device)
        for start in range(0, size, 1024):
            damped[start : start + 1024] = hessian[reverse[start : start + 1024]].index_select(1, reverse)
        damped.diagonal().copy_(diagonal[reverse] + damping * diagonal.mean())
        lower, failed = damped.T, torch.empty((), dtype=torch.int32, device=hessian.device)  # symmetric, and LAPACK's columns lie as its rows do
        del damped
        torch.linalg.cholesky_ex(lower, out=(lower, failed))
        if not failed.item() and torch.isfinite(lower.diagonal()).all():
            _invert_lower(lower)
            factor = lower.to(torch.float32)
            del lower
            return factor.flip(0, 1)
        damping *= 10
        warn(f"{name}: the Hessian is not positive definite, damping raised to {damping:g} of its mean diagonal")
    raise IntegrityError(
        f"{name}: the Hessian can't be factorized even with full damping", "calibrate with more or longer samples, or use method: rtn"
    )


def _invert_lower(lower: torch.Tensor) -> None:
    """Replace a lower triangular matrix by its inverse, half by half: a third of the work of solving for the identity, and in place."""
    size = lower.shape[0]
    if size <= 256:
        identity = torch.eye(size, dtype=lower.dtype, device=lower.device)
        lower.copy_(torch.linalg.solve_triangular(lower, identity, upper=False))
        return
    half = size // 2
    _invert_lower(lower[:half, :half])
    _invert_lower(lower[half:, half:])
    lower[half:, :half] = torch.mm(lower[half:, half:], lower[half:, :half]).mm(lower[:half, :half]).neg_()


@dataclass(frozen=True)
class Factorization:
    """A Hessian as GPTQ needs it: the order of the columns, the factor U in that order, the mean x x^T before damping [in, in].

    degenerate: why the Hessian can't be solved with, or nothing. Then U is the identity, and weights are rounded to nearest.
    """

    order: torch.Tensor
    factor: torch.Tensor
    moments: torch.Tensor
    options: Gptq
    degenerate: str = ""


def degenerate(hessian: torch.Tensor) -> str:
    """Why nothing can be concluded from the mean x x^T `hessian` [in, in] float32, or nothing."""
    largest = hessian.diagonal().max().item()
    if largest == 0:
        return "every input is zero on the calibration set"
    if not _SMALLEST <= largest <= _LARGEST:
        return f"the largest mean square of an input on the calibration set is {largest:.1e}; {_SMALLEST:g} to {_LARGEST:g} is valid"
    return ""


def factorize(hessian: torch.Tensor, options: Gptq, name: str) -> Factorization:
    """The factorization of `hessian` [in, in]."""
    diagonal, size = hessian.diagonal(), hessian.shape[0]
    if why := degenerate(hessian):
        order, identity = torch.arange(size, device=hessian.device), torch.eye(size, device=hessian.device)
        return Factorization(order, identity, hessian, options, why)
    static = options.actorder == "static"
    order = torch.argsort(diagonal, descending=True, stable=True) if static else torch.arange(size, device=hessian.device)
    return Factorization(order, inverse_factor(hessian, options.dampening, name, order), hessian, options)


@dataclass(frozen=True)
class Solution:
    """A solved weight: `stored` [out, in], `scales` [out, groups] float32.

    nearest_rows: rows that were rounded to nearest after all; overflowed_rows: those of them whose numbers were not finite in the solver.
    """

    stored: torch.Tensor
    scales: torch.Tensor
    nearest_rows: int
    overflowed_rows: int = 0


def note_on_rows(factorization: Factorization, overflowed_rows: int) -> str:
    """What kept rows from being solved, or nothing."""
    if factorization.degenerate:
        return f"{factorization.degenerate}: rounded to nearest"
    return f"{overflowed_rows} rows overflow float32 in GPTQ: rounded to nearest" if overflowed_rows else ""


def solve(weight: torch.Tensor, factorization: Factorization, scheme: WeightScheme) -> tuple[torch.Tensor, torch.Tensor]:
    """(stored [out, in], scales [out, groups] float32) of `weight` [out, in] float32: those of its `solution`."""
    found = solution(weight, factorization, scheme)
    return found.stored, found.scales


def solution(weight: torch.Tensor, factorization: Factorization, scheme: WeightScheme) -> Solution:
    """The solution of `weight` [out, in] float32.

    Rows are independent: those of several modules may be stacked, as long as they read the same input. A row is rounded to nearest where
    that gives a smaller output error on the calibration set, with the dampening or without, or where the solver's numbers are not finite.
    """
    if weight.is_cuda and weight.shape[0] > _ROWS_ON_GPU:
        pieces = [solution(piece, factorization, scheme) for piece in weight.split(_ROWS_ON_GPU)]
        stored, scales = torch.cat([piece.stored for piece in pieces]), torch.cat([piece.scales for piece in pieces])
        return Solution(stored, scales, sum(piece.nearest_rows for piece in pieces), sum(piece.overflowed_rows for piece in pieces))
    moments = factorization.moments
    scales = find_scales(weight, scheme, moments.diagonal())
    nearest = round_to_scales(weight, scales, scheme)
    if factorization.degenerate:
        return Solution(nearest, scales, weight.shape[0])
    solved, fitted, sound = _solve(weight, scales, factorization, scheme)
    ours, plain = weight - restore(solved, fitted, scheme), weight - restore(nearest, scales, scheme)
    damping = factorization.options.dampening * moments.diagonal().mean().item()
    error, limit = row_errors(ours, moments), row_errors(plain, moments)
    taken = (error <= limit) & (error + damping * row_errors(ours, None) <= limit + damping * row_errors(plain, None))
    sound = sound & torch.isfinite(fitted).all(1) & torch.isfinite(error)
    taken = (taken & sound).unsqueeze(1)
    # torch.where knows no float8
    stored = torch.where(taken, solved.view(torch.int8), nearest.view(torch.int8)).view(nearest.dtype)
    nearest_rows, overflowed_rows = torch.stack([(~taken).sum(), (~sound).sum()]).tolist()
    return Solution(stored, torch.where(taken, fitted, scales), nearest_rows, overflowed_rows)


def _solve(
    weight: torch.Tensor, scales: torch.Tensor, factorization: Factorization, scheme: WeightScheme
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(stored, scales) by GPTQ and refinement from `scales`, and whether each row's numbers were finite [out]."""
    options, order, moments = factorization.options, factorization.order, factorization.moments
    group_of = torch.arange(weight.shape[1], device=weight.device) // (weight.shape[1] // scales.shape[1])
    column_scales = scales.index_select(1, group_of[order])
    rounded = _sweep(weight.index_select(1, order), factorization.factor, column_scales, scheme, options.block_size)
    sound = torch.isfinite(rounded).all(1)
    rounded.nan_to_num_(nan=0.0)  # NaN has no integer
    stored = round_to_scales(rounded.index_select(1, torch.argsort(order)), scales, scheme)
    refined = refine(
        weight, stored, scales, moments, scheme, dampening=options.dampening, rounds=options.refine, block_size=options.block_size
    )
    return *refined, sound


def _sweep(work: torch.Tensor, factor: torch.Tensor, scales: torch.Tensor, scheme: WeightScheme, block_size: int) -> torch.Tensor:
    """Round the columns of `work` [out, in] in order; returns the rounded weights. Columns are rows here, so that each is contiguous."""
    if work.is_cuda and scheme.type == "int":
        from gemq.quantize.sweep_triton import sweep

        return sweep(work, factor, scales, scheme)
    work, scales = work.T.contiguous(), scales.T.contiguous()
    size = work.shape[0]
    for start in range(0, size, block_size):
        stop = min(start + block_size, size)
        errors = torch.empty_like(work[start:stop])
        # A block in strips: what a strip's columns owe the rest of the block is settled in one product. One thread: operations this
        # small cost less than waking a second one, and far less where another process holds its core.
        with single_thread():
            for first in range(start, stop, _STRIP):
                last = min(first + _STRIP, stop)
                strip = errors[first - start : last - start]
                _sweep_strip(work[first:last], factor[first:last, first:last], scales[first:last], scheme, strip)
                if last < stop:
                    work[last:stop].addmm_(factor[first:last, last:stop].T, strip, alpha=-1)
        if stop < size:
            work[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
    return work.T


def _sweep_strip(work: torch.Tensor, factor: torch.Tensor, scales: torch.Tensor, scheme: WeightScheme, errors: torch.Tensor) -> None:
    """Round the rows of `work` [columns, out] in place, each row's error spread over the rows below it; `errors` takes (w - q) / U_jj."""
    is_float = scheme.type == "float"
    low, high = (0, 0) if is_float else integer_range(scheme)
    diagonal = factor.diagonal().tolist()
    for index, pivot in enumerate(diagonal):
        column, scale = work[index], scales[index]
        rounded = column / scale
        rounded = to_fp8(rounded).to(torch.float32) if is_float else rounded.round_().clamp_(low, high)
        rounded.mul_(scale)
        torch.sub(column, rounded, out=errors[index])
        errors[index].div_(pivot)
        column.copy_(rounded)
        if index + 1 < len(diagonal):
            work[index + 1 :].addr_(factor[index, index + 1 :], errors[index], alpha=-1)


def target(weight: torch.Tensor, factorization: Factorization, hessian: Hessian) -> torch.Tensor:
    """What `weight` [out, in] should be, so that from the quantized model's inputs x it gives what the source gives from its own y.

    The minimum of ||W y - V x||^2 over V is W + W C (H + d I)^-1 with C = E[(y - x) x^T]; `asymmetric` of the way there is gone, since
    all of it fits the calibration set more than it helps. The asymmetric objective is that of Li et al., "GPTAQ" (2025), section 3.

    A row moves by at most 0.2 of its norm, and by 0.03 of it along itself, so that verify's bounds on groups (verify.py) hold for what is
    made. Untrained models, whose every layer shrinks the activations, would move further: their groups shifted by 0.21 (rms) at a quarter
    of the way and by 0.9 at all of it, and 0.08 within these limits. On the first six layers of Gemma 3 270M a quarter of the way moves
    units by 0.01 to 0.08, 99 rows in 100 by at most 0.15 and any row along itself by 0.023; a few rows in two layers were to move further.
    """
    share = factorization.options.asymmetric
    if hessian.cross is None or share == 0 or factorization.degenerate:
        return weight
    order, factor = factorization.order, factorization.factor
    shift = (weight @ hessian.cross).div_(hessian.rows).index_select(1, order)
    shift = (shift @ factor.T) @ factor
    shifted = weight + _limited(share * shift.index_select(1, torch.argsort(order)), weight)
    return torch.where(torch.isfinite(shifted).all(1, keepdim=True), shifted, weight)  # a row that overflowed stays


def _limited(move: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`move` [out, in], each row made shorter until it keeps to `_LARGEST_MOVE` and `_LARGEST_GAIN` of the row of `weight` [out, in]."""
    square = weight.square().sum(1)
    longest = _LARGEST_MOVE * (square / move.square().sum(1)).sqrt()
    along = _LARGEST_GAIN * square / (move * weight).sum(1).abs()
    return move * torch.minimum(longest, along).nan_to_num(nan=1.0).clamp_(max=1.0).unsqueeze(1)  # 0 / 0: a row of zeros


def output_error(weight: torch.Tensor, stored: torch.Tensor, scales: torch.Tensor, scheme: WeightScheme, hessian: torch.Tensor) -> float:
    """The relative squared error of the unit's output on the calibration set: tr(D H D^T) / tr(W H W^T), D = W - Q.

    Where the unit's own output is zero there, that of its weights.
    """
    return measured_error(weight, restore(stored, scales, scheme), hessian)[1]

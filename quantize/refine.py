"""What GPTQ leaves to gain: fit the scales to the integers and the integers to the scales, in turn, under GPTQ's own objective.

GPTQ fixes a group's scale before it knows the integers, and rounds each column once. Both are mended here on the damped Hessian H' = H + d I:
with the integers held, the objective tr((W - Q) H' (W - Q)^T) is quadratic in a row's scales and has one minimum; with the scales held,
each integer in turn takes its best value given all others (coordinate descent, as in Behdin et al., "QuantEase", 2023). Neither step can
raise the objective.
"""

from __future__ import annotations

import torch

from gemq.quantize.products import product
from gemq.quantize.scales import in_groups, integer_range, stored_scale
from gemq.quantize.threads import single_thread
from gemq.recipes.model import WeightScheme

_STRIP = 32
_SYSTEMS = 1 << 22  # entries of the rows' [groups, groups] systems held at a time: 32 MiB in float64


def refine(
    weight: torch.Tensor,
    stored: torch.Tensor,
    scales: torch.Tensor,
    moments: torch.Tensor,
    scheme: WeightScheme,
    *,
    dampening: float,
    rounds: int = 1,
    block_size: int = 128,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(stored [out, in] int8, scales [out, groups]) no further from `weight` [out, in] than the given ones, for the inputs behind `moments`.

    `moments` [in, in] is the Hessian before damping, `dampening` the share of its mean diagonal that is added. FP8 has no even grid to
    descend on and comes back as it was.
    """
    if scheme.type == "float" or rounds == 0:
        return stored, scales
    damping = dampening * moments.diagonal().mean()
    if not 0 < damping.item() < float("inf"):
        return stored, scales  # inputs that were all zero say nothing, and what is divided by the curvature would be 0/0
    integers = stored.to(torch.float32)
    target = product(weight, moments) + damping * weight
    for _ in range(rounds):
        scales = _fit_scales(weight, target, integers, scales, moments, damping)
        found = _descend(weight, integers, scales, moments, damping, scheme, block_size)
        # a row that overflowed keeps its integers
        integers = torch.where(torch.isfinite(found).all(1, keepdim=True), found, integers)
    return integers.to(torch.int8), scales


def _fit_scales(
    weight: torch.Tensor, target: torch.Tensor, integers: torch.Tensor, scales: torch.Tensor, moments: torch.Tensor, damping: torch.Tensor
) -> torch.Tensor:
    """Each row's best scales for its integers: A s = b, where A_gh sums q_i H'_ij q_j over i in g and j in h, and b_g sums q_i (H' w)_i over g."""
    out, groups = scales.shape
    width = weight.shape[1] // groups
    pieces = []
    rows_at_once = max(1, (4 * _SYSTEMS if weight.is_cuda else _SYSTEMS) // (groups * groups))
    for first in range(0, out, rows_at_once):
        rows = slice(first, min(first + rows_at_once, out))
        held, before = integers[rows], scales[rows]
        system = torch.empty(held.shape[0], groups, groups, dtype=torch.float64, device=weight.device)
        for group in range(groups):
            columns = slice(group * width, (group + 1) * width)
            reached = product(held[:, columns], moments[columns], left_is_short=True)
            reached[:, columns] += damping * held[:, columns]
            system[:, group] = reached.mul_(held).reshape(-1, groups, width).sum(-1)
        right = (target[rows] * held).reshape(-1, groups, width).sum(-1).to(torch.float64)
        # a group of zeros has no say in its scale: it keeps the one it has
        silent = system.diagonal(dim1=1, dim2=2) <= 0
        system.diagonal(dim1=1, dim2=2)[silent] = 1.0
        right[silent] = before.to(torch.float64)[silent]
        fitted = torch.linalg.solve_ex(system, right)[0].to(torch.float32)  # no error where a row's system is singular
        fitted = stored_scale(torch.where(torch.isfinite(fitted), fitted, before))
        # what is stored is rounded to bfloat16: a row takes it only if that is still better
        change = (fitted.to(torch.float64), before.to(torch.float64))
        after_cost, before_cost = (
            ((system @ scale.unsqueeze(-1)).squeeze(-1) * scale).sum(-1) - 2 * (right * scale).sum(-1) for scale in change
        )
        pieces.append(torch.where((after_cost < before_cost).unsqueeze(-1), fitted, before))
    return torch.cat(pieces)


def _descend(
    weight: torch.Tensor,
    integers: torch.Tensor,
    scales: torch.Tensor,
    moments: torch.Tensor,
    damping: torch.Tensor,
    scheme: WeightScheme,
    block_size: int,
) -> torch.Tensor:
    """One pass over the columns: each integer takes its best value, all others held. Columns are rows here, so that each is contiguous."""
    low, high = integer_range(scheme)
    size, width = weight.shape[1], weight.shape[1] // scales.shape[1]
    error = (weight - (in_groups(integers, scheme) * scales.unsqueeze(-1)).reshape(weight.shape)).T.contiguous()
    integers, scales = integers.T.contiguous(), scales.T.contiguous()
    gradient = product(moments, error) + damping * error
    del error
    if gradient.is_cuda:
        from gemq.quantize.sweep_triton import descend

        descend(gradient, integers, scales, moments, moments.diagonal() + damping, scheme)
        return integers.T.contiguous()
    curvature = (moments.diagonal() + damping).tolist()
    for start in range(0, size, block_size):
        stop = min(start + block_size, size)
        steps = torch.empty_like(gradient[start:stop])
        with single_thread():
            for first in range(start, stop, _STRIP):
                last = min(first + _STRIP, stop)
                for column in range(first, last):
                    # the last product below is what the damped diagonal takes from this column itself: nothing reads it again
                    held, scale, step = integers[column], scales[column // width], steps[column - start]
                    best = gradient[column].div(scale).div_(curvature[column]).round_().add_(held).clamp_(low, high)
                    torch.sub(best, held, out=step)
                    step.mul_(scale)
                    held.copy_(best)
                    if column + 1 < last:
                        gradient[column + 1 : last].addr_(moments[column + 1 : last, column], step, alpha=-1)
                if last < stop:
                    gradient[last:stop].addmm_(moments[last:stop, first:last], steps[first - start : last - start], alpha=-1)
        if stop < size:
            gradient[stop:].addmm_(moments[stop:, start:stop], steps, alpha=-1)
    return integers.T.contiguous()

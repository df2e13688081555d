"""Scales, rounding and their inverse for one weight matrix.

A weight w of a group is stored as the integer q with w ~ q * s, q in [-2^(b-1), 2^(b-1) - 1], or as an FP8 E4M3 number. Scales are rounded
to bfloat16, in which they are stored, before anything is rounded with them, so that the solver sees what the server multiplies by.
"""

from __future__ import annotations

import torch

from gemq.quantize.threads import over_threads
from gemq.recipes.model import WeightScheme

FP8_MAX = 448.0  # the largest finite E4M3 number
# How far the grid may clip: the largest magnitude of a group falls between the end of the range and 1.5 times beyond it.
_CLIP_STEPS = 10
_CLIP_FURTHEST = 1.5
_PIECE = 1 << 15
_LARGEST = 2.9e38  # of a group: the end of the range, a seventh further, is still a float32 and a bfloat16


def integer_range(scheme: WeightScheme) -> tuple[int, int]:
    """The smallest and largest stored integer."""
    return -(1 << (scheme.num_bits - 1)), (1 << (scheme.num_bits - 1)) - 1


def in_groups(weight: torch.Tensor, scheme: WeightScheme) -> torch.Tensor:
    """`weight` [out, in] as [out, groups, inputs of a group]."""
    return weight.reshape(weight.shape[0], scheme.groups(weight.shape[1]), -1)


def stored_scale(scale: torch.Tensor) -> torch.Tensor:
    """`scale` as bfloat16 stores it, in float32, never zero."""
    tiny = torch.finfo(torch.bfloat16).tiny
    scale = torch.where(scale.abs() < tiny, torch.full_like(scale, tiny), scale)
    return scale.to(torch.bfloat16).to(torch.float32)


def find_scales(weight: torch.Tensor, scheme: WeightScheme, importance: torch.Tensor | None = None) -> torch.Tensor:
    """Scales [out, groups] float32 (each exact in bfloat16) for `weight` [out, in] float32.

    `minmax` spans the group's extremes. `mse` tries clips of both signs and keeps, group by group, what has the smallest squared rounding
    error, weighted by `importance` [in] (the mean square of each input) when it is given and its mean can be divided by. Both signs, since the
    range has one integer more below zero than above: a negative scale puts the group's extreme there.
    """
    grouped = in_groups(weight, scheme)
    largest = grouped.abs().amax(-1).clamp_max(_LARGEST)
    if scheme.type == "float":
        return stored_scale(largest / FP8_MAX)
    low, high = integer_range(scheme)
    minmax = stored_scale(largest / ((high - low) / 2))
    if scheme.observer == "minmax":
        return minmax
    if importance is not None and not 1e-30 < importance.mean().item() < float("inf"):
        importance = None  # no input was seen to matter more than another
    cost = torch.ones(weight.shape[1]) if importance is None else importance / importance.mean()
    cost = cost.to(weight).reshape(1, grouped.shape[1], grouped.shape[2])
    if weight.is_cuda:
        from gemq.quantize.scales_triton import best_clips

        return best_clips(grouped, cost, low, high, tuple(map(_reach, range(_CLIP_STEPS))))
    # pieces that stay in a processor's cache, and small enough for torch not to split: the threads here each take whole ones
    rows = max(1, _PIECE // weight.shape[1]) if weight.device.type == "cpu" else weight.shape[0]
    pieces = zip(grouped.split(rows), largest.split(rows), minmax.split(rows), strict=True)
    return torch.cat(list(over_threads(lambda piece: _best_clip(*piece, cost, low, high), pieces)))


def _best_clip(grouped: torch.Tensor, largest: torch.Tensor, minmax: torch.Tensor, cost: torch.Tensor, low: int, high: int) -> torch.Tensor:
    best, best_error = minmax, _rounding_error(grouped, minmax, cost, low, high)
    extreme = torch.where(grouped.amax(-1) > -grouped.amin(-1), 1.0, -1.0)
    for step in range(_CLIP_STEPS):
        reach = _reach(step)
        # the extreme at the low end (one more integer), then at the high end
        for scale in (-extreme * largest / (-low * reach), extreme * largest / (high * reach)):
            scale = stored_scale(scale)
            error = _rounding_error(grouped, scale, cost, low, high)
            better = error < best_error
            best = torch.where(better, scale, best)
            best_error = torch.where(better, error, best_error)
    return best


def _reach(step: int) -> float:
    return 1 + (_CLIP_FURTHEST - 1) * step / (_CLIP_STEPS - 1)


def _rounding_error(grouped: torch.Tensor, scale: torch.Tensor, cost: torch.Tensor, low: int, high: int) -> torch.Tensor:
    error = grouped / scale.unsqueeze(-1)
    error.round_().clamp_(low, high).mul_(scale.unsqueeze(-1)).sub_(grouped).square_().mul_(cost)
    return error.sum(-1)


def to_fp8(value: torch.Tensor) -> torch.Tensor:
    """`value` as float8_e4m3fn, at most 448 in size: up to torch 2.11 the cast makes NaN of what is larger, from 2.13 on it saturates."""
    return value.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def round_to_scales(weight: torch.Tensor, scales: torch.Tensor, scheme: WeightScheme) -> torch.Tensor:
    """What is stored of `weight` [out, in] under `scales` [out, groups]: int8 holding the integers, or float8_e4m3fn."""
    ratio = in_groups(weight, scheme) / scales.unsqueeze(-1)
    if scheme.type == "float":
        return to_fp8(ratio).reshape(weight.shape)
    low, high = integer_range(scheme)
    return ratio.round_().clamp_(low, high).reshape(weight.shape).to(torch.int8)


def restore(stored: torch.Tensor, scales: torch.Tensor, scheme: WeightScheme) -> torch.Tensor:
    """The weight [out, in] float32 that `stored` and `scales` stand for."""
    return (in_groups(stored.to(torch.float32), scheme) * scales.unsqueeze(-1)).reshape(stored.shape)

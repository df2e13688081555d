"""Tune a solved decoder layer as a whole: integers and scales move by signed gradients until the layer's output is nearest to the source's.

Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs" (SignRound, 2023), algorithm 1, with the
solver's integers as the start instead of rounding to nearest: each weight keeps a latent number that rounds to its integer, and a learned
offset moves it; each scale is multiplied by a learned factor. Gradients pass a rounding as if it were the identity. auto-round has the method,
but for a whole model that it calibrates by itself, not for a layer that stands paused in a walk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from gemq.quantize.scales import in_groups, integer_range, stored_scale
from gemq.recipes.model import Tuning, WeightScheme

_LATENT = 0.1
_FURTHEST = 1.0  # how far an offset may take a latent
_SCALE_FURTHEST = 0.2  # how far a scale's factor may leave 1


@dataclass(frozen=True)
class Solved:
    """A matrix as the solver left it: what it stands for [out, in], the integers [out, in] int8, scales [out, groups], and their scheme."""

    weight: torch.Tensor
    stored: torch.Tensor
    scales: torch.Tensor
    scheme: WeightScheme

    def over(self, divisor: torch.Tensor) -> Solved:
        """The same with each row divided by `divisor` [out], powers of two."""
        column = divisor.unsqueeze(1)
        scales = stored_scale(self.scales / column)  # exact but for the least scale there is, of rows of zeros
        return replace(self, weight=self.weight / column if self.weight.numel() else self.weight, scales=scales)


@dataclass(frozen=True)
class Call:
    """One batch at a layer: what the layer is called with, and the source's own output [..., hidden] for it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: torch.Tensor


@dataclass(frozen=True)
class Tuned:
    """What a tuning came to: relative squared errors of the layer's output on the held-out batches, and the matrices if they are to be taken."""

    before: float
    after: float
    matrices: dict[str, tuple[torch.Tensor, torch.Tensor]]  # module -> (integers int8, scales); empty if nothing was gained
    note: str = ""  # why nothing could be tuned


def tune(layer: nn.Module, solved: dict[str, Solved], calls: Sequence[Call], options: Tuning, seed: int) -> Tuned:
    """Tune the matrices `solved` (by their modules' names in `layer`) on `calls`; every eighth call, one at least, is held out to judge by.

    The layer's own parameters are left as they are. Nothing is gained where the held-out error does not fall: then `matrices` is empty.
    """
    held_out = list(calls[:: options.hold_out_every])
    learnt_from = [call for position, call in enumerate(calls) if position % options.hold_out_every] or held_out
    latents = {name: _Latent(matrix) for name, matrix in solved.items()}
    before = _error(layer, latents, held_out)
    if not math.isfinite(before):
        return Tuned(0.0, 0.0, {}, "the layer's error on the held-out batches is not finite: not tuned")
    best, best_state = before, {name: latent.state() for name, latent in latents.items()}
    draw = torch.Generator().manual_seed(seed)
    checks = {options.iterations * share // 4 for share in (1, 2, 3, 4)}
    for step in range(options.iterations):
        rate = options.learning_rate * (1 - step / options.iterations)
        for position in torch.randint(len(learnt_from), (options.batches,), generator=draw).tolist():
            _backward(layer, latents, learnt_from[position])
        for latent in latents.values():
            latent.step(rate)
        if step + 1 in checks and (error := _error(layer, latents, held_out)) < best:
            best, best_state = error, {name: latent.state() for name, latent in latents.items()}
    return Tuned(before, best, best_state if best < before else {})


class _Latent:
    """The numbers behind one matrix: a latent a weight and a factor a scale, both moved by the sign of their gradients."""

    def __init__(self, solved: Solved) -> None:
        self.scheme, self.shape = solved.scheme, solved.stored.shape
        self._integers = in_groups(solved.stored.to(torch.float32), self.scheme)
        self._scales = solved.scales
        start = in_groups(solved.weight, self.scheme) / solved.scales.unsqueeze(-1) - self._integers
        self._latent = self._integers + start.clamp_(-_LATENT, _LATENT)
        self.offset = torch.zeros_like(self._latent, requires_grad=True)
        self.factor = torch.ones_like(self._scales, requires_grad=True)

    def weight(self) -> torch.Tensor:
        """The dequantized matrix [out, in], through which gradients flow."""
        low, high = integer_range(self.scheme)
        moved = self._latent + self.offset
        # clamped outside the rounding: at the end of the range nothing moves, so nothing is learnt
        integers = torch.clamp(moved + (moved.detach().round() - moved.detach()), low, high)
        scale = self._scales * self.factor
        scale = scale + (stored_scale(scale.detach()) - scale.detach())
        return (integers * scale.unsqueeze(-1)).reshape(self.shape)

    def step(self, rate: float) -> None:
        """Go `rate` against the sign of each gradient, and forget the gradients."""
        with torch.no_grad():
            for value, middle, furthest, share in ((self.offset, 0.0, _FURTHEST, 1.0), (self.factor, 1.0, _SCALE_FURTHEST, 0.1)):
                if value.grad is not None:
                    value.grad.nan_to_num_(nan=0.0)  # of a batch whose loss is 0/0: it moves nothing
                    value.sub_(value.grad.sign_(), alpha=rate * share).clamp_(middle - furthest, middle + furthest)
                    value.grad = None

    def state(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(integers [out, in] int8, scales [out, groups]) as they would be stored now."""
        low, high = integer_range(self.scheme)
        with torch.no_grad():
            integers = (self._latent + self.offset).round_().clamp_(low, high).reshape(self.shape).to(torch.int8)
            return integers, stored_scale(self._scales * self.factor)


def _output(layer: nn.Module, latents: dict[str, _Latent], call: Call) -> torch.Tensor:
    dtype = call.args[0].dtype
    weights = {f"{name}.weight": latent.weight().to(dtype) for name, latent in latents.items()}
    output = functional_call(layer, weights, call.args, call.kwargs)
    return output[0] if isinstance(output, tuple) else output


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    target = target.to(torch.float32)
    return (output.to(torch.float32) - target).square().sum() / target.square().sum()


def _backward(layer: nn.Module, latents: dict[str, _Latent], call: Call) -> None:
    with torch.enable_grad():
        _loss(_output(layer, latents, call), call.target).backward()


def _error(layer: nn.Module, latents: dict[str, _Latent], calls: Sequence[Call]) -> float:
    with torch.no_grad():
        return sum(_loss(_output(layer, latents, call), call.target).item() for call in calls) / len(calls)

"""A weight, inputs and their Hessian to solve, and the schemes to solve it in."""

from __future__ import annotations

import torch

from gemq.quantize import gptq
from gemq.recipes.model import WeightScheme

INT4 = WeightScheme(num_bits=4, strategy="group", group_size=32, observer="mse")
INT4_MINMAX = WeightScheme(num_bits=4, strategy="group", group_size=32)
INT8 = WeightScheme(num_bits=8, strategy="channel")
FP8 = WeightScheme(num_bits=8, type="float", strategy="channel")


def problem(out: int = 48, size: int = 96, tokens: int = 400, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and inputs whose features are correlated and of very different size."""
    torch.manual_seed(seed)
    weight = torch.randn(out, size) * torch.rand(out, 1)
    inputs = torch.randn(tokens, size) @ torch.randn(size, size) * torch.logspace(-1, 1, size)[torch.randperm(size)]
    return weight, inputs


def hessian_of(inputs: torch.Tensor) -> torch.Tensor:
    hessian = gptq.Hessian(inputs.shape[1], block=40)
    for part in inputs.split(150):
        hessian.add(part)
    return hessian.mean("test")

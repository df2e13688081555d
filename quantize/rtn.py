"""Round to nearest: the baseline that looks at nothing but the weight."""

from __future__ import annotations

import torch

from gemq.quantize.scales import find_scales, round_to_scales
from gemq.recipes.model import WeightScheme


def round_to_nearest(
    weight: torch.Tensor, scheme: WeightScheme, importance: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(stored [out, in], scales [out, groups] float32) of `weight` [out, in] float32, each weight rounded for itself."""
    scales = find_scales(weight, scheme, importance)
    return round_to_scales(weight, scales, scheme), scales

"""What a quantization will cost on this machine: a count of operations and bytes, over a rate measured on the spot."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from gemq.quantize.plan import Plan

_PROCESS_BYTES = 450_000_000  # torch, transformers and the interpreter, measured
_BATCH_TOKENS = 4096
_STEP_TOKENS = 2048  # of a batch that a step of tuning learns from


@dataclass(frozen=True)
class Estimate:
    """Peak resident memory, and seconds from plan to seal; a forecast, good to about a factor of two."""

    memory_bytes: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def estimate(plan: Plan, tokens: int, device: str) -> Estimate:
    """The cost of `plan` with `tokens` calibration tokens."""
    text = plan.skeleton.text
    calibrated = [unit for unit in plan.units if plan.reads_inputs(unit)]
    layers: dict[int | None, int] = {}
    for matrix in plan.skeleton.matrices:
        if matrix.module != "lm_head":
            layers[matrix.layer] = layers.get(matrix.layer, 0) + matrix.numel
    seconds = (plan.source_bytes() + plan.checkpoint_bytes()) / 1e9
    if not calibrated:
        return Estimate(_PROCESS_BYTES + 5 * 4 * (1 << 24), seconds + sum(unit.numel for unit in plan.units) / 1e8)
    weights = sum(layers.values())
    forward = 2 * weights * tokens
    tuning = plan.recipe.tuning
    if plan.recipe.gptq.asymmetric or tuning is not None:
        forward *= 2  # the source's weights walk beside
    if tuning is not None:  # a step goes through the layer forwards, and backwards for twice that
        forward += 3 * 2 * weights * min(tokens, tuning.batches * _STEP_TOKENS) * tuning.iterations
    hessians = sum(unit.in_features**2 for unit in calibrated) * tokens
    solves = sum(unit.numel * unit.in_features + 2 * unit.in_features**3 for unit in calibrated if unit.method == "gptq")
    seconds += (forward + hessians + 2 * solves) / _matmul_rate(device) + sum(unit.numel for unit in plan.units if unit.is_table) / 1e8
    widest = max(unit.in_features for unit in calibrated)
    live = tokens * 4 * (2 * text.hidden_size + widest)
    per_layer_inputs = tokens * 4 * text.num_hidden_layers * (getattr(text, "hidden_size_per_layer_input", 0) or 0)
    solve_bytes = widest**2 * (4 * 3 + 8 * 2)
    batch = 3 * 4 * _BATCH_TOKENS * widest
    layer_bytes = 4 * max(layers.values())
    return Estimate(int(_PROCESS_BYTES + live + per_layer_inputs + max(solve_bytes, batch) + layer_bytes), seconds)


def _matmul_rate(device: str) -> float:
    """Floating-point operations a second of a float32 product of the size that a walk does."""
    left, right = torch.ones(1024, 1024, device=device), torch.ones(1024, 1024, device=device)
    rates = []
    for _ in range(4):
        started = time.perf_counter()
        product = left @ right
        product[0, 0].item()
        rates.append(2 * 1024**3 / (time.perf_counter() - started))
    return max(rates[1:])

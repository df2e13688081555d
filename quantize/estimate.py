"""What a quantization will cost on this machine: a count of operations and bytes, over a rate measured on the spot."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from gemq.quantize.gpu import (
    DEFAULT_MEMORY,
    Budget,
    bytes_within_layers,
    divide,
    dtype_on_gpu,
    models_walked,
    parse_memory,
    walks_source_within_layers,
)
from gemq.quantize.plan import Plan

_PROCESS_BYTES = 450_000_000  # torch, transformers and the interpreter, measured
_BESIDE_GPU_BYTES = 1_800_000_000  # with CUDA, and pieces on their way; measured
_WALK_BESIDE_GPU_BYTES = 2_400_000_000
_PIECES_ON_GPU_BYTES = 1_000_000_000  # of a quantization without a walk
_BATCH_TOKENS = 4096
_STEP_TOKENS = 2048  # of a batch that a step of tuning learns from


@dataclass(frozen=True)
class Estimate:
    """Peak resident memory, what is taken of a GPU, and seconds from plan to seal; a forecast, good to about a factor of two."""

    memory_bytes: int
    seconds: float
    device_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def estimate(plan: Plan, tokens: int, device: str, length: int, gpu_memory_bytes: int | None = None) -> Estimate:
    """The cost of `plan` with `tokens` calibration tokens in windows of `length`, on a GPU held to `gpu_memory_bytes` (None: as it is by default).

    Raises UsageError for a budget that is too small.
    """
    if torch.device(device).type == "cuda":
        host, taken = gpu_bytes(plan, tokens, length, gpu_memory_bytes)
        return Estimate(host, _on_a_cpu(plan, tokens, device).seconds, taken)
    return _on_a_cpu(plan, tokens, device)


def gpu_bytes(plan: Plan, tokens: int, length: int, gpu_memory_bytes: int | None) -> tuple[int, int]:
    """(bytes of host memory, bytes of the GPU, its context included) of a quantization on a GPU; the arguments and errors of `estimate`."""
    if not any(plan.reads_inputs(unit) for unit in plan.units):
        return _BESIDE_GPU_BYTES, _PIECES_ON_GPU_BYTES
    within_layers = walks_source_within_layers(plan)
    by_default = sys.maxsize if within_layers else parse_memory(DEFAULT_MEMORY)  # held to nothing, as `budget_of` has it
    budget = Budget(gpu_memory_bytes or by_default, dtype_on_gpu(plan))
    within = bytes_within_layers(plan, budget, tokens, length)
    if within_layers or within <= budget.memory_bytes:
        return _WALK_BESIDE_GPU_BYTES, within
    return _WALK_BESIDE_GPU_BYTES + divide(plan, budget, tokens).spilled_bytes, budget.memory_bytes


def _on_a_cpu(plan: Plan, tokens: int, device: str) -> Estimate:
    """As if the walk were one on a CPU, with the products' rate of `device`."""
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
    forward = 2 * weights * tokens * models_walked(plan)
    tuning = plan.recipe.tuning
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

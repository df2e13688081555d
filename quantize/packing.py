"""The compressed-tensors format: a solved matrix as the tensors that it stores, and the config that describes them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from gemq.quantize.scales import restore
from gemq.quantize.targets import ignored, patterns
from gemq.recipes.model import Scheme, WeightScheme
from gemq.shard_headers import TensorSpec

if TYPE_CHECKING:
    from gemq.quantize.plan import Plan, Unit
    from gemq.quantize.skeleton import Matrix

OUTPUT_AXES: dict[str, int | None] = {"weight_packed": 0, "weight": 0, "weight_scale": 0, "weight_shape": None}


def require_expressible(recipe: str, matrix: Matrix, scheme: Scheme) -> None:
    """Nothing is refused: recipes speak this format's terms."""


def specs(module: str, shape: tuple[int, int], scheme: Scheme) -> list[TensorSpec]:
    """The tensors that a matrix [out, in] becomes."""
    weights = scheme.weights
    found = [TensorSpec(f"{module}.weight_scale", "BF16", (shape[0], weights.groups(shape[1])))]
    if scheme.format == "pack-quantized":
        found.append(TensorSpec(f"{module}.weight_packed", "I32", (shape[0], shape[1] * weights.num_bits // 32)))
        found.append(TensorSpec(f"{module}.weight_shape", "I64", (2,)))
    else:
        found.append(TensorSpec(f"{module}.weight", "F8_E4M3" if weights.type == "float" else "I8", shape))
    return found


def to_tensors(stored: torch.Tensor, scales: torch.Tensor, scheme: Scheme, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Suffix -> tensor for rows `stored` [rows, in] with `scales` [rows, groups]; `shape` is the whole matrix's [out, in]."""
    tensors = {"weight_scale": scales.to(torch.bfloat16)}
    if scheme.format == "pack-quantized":
        from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

        tensors["weight_packed"] = pack_to_int32(stored, scheme.weights.num_bits)
        tensors["weight_shape"] = torch.tensor(shape, dtype=torch.int64)
    else:
        tensors["weight"] = stored
    return tensors


def from_tensors(tensors: dict[str, torch.Tensor], scheme: Scheme) -> torch.Tensor:
    """The weight [out, in] float32 that the stored tensors stand for; the inverse of `to_tensors` after rounding."""
    scales = tensors["weight_scale"].to(torch.float32)
    if scheme.format == "pack-quantized":
        from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

        stored = unpack_from_int32(tensors["weight_packed"], scheme.weights.num_bits, torch.Size(tensors["weight_shape"].tolist()))
    else:
        stored = tensors["weight"]
    return restore(stored, scales, scheme.weights)


def suffixes(scheme: Scheme) -> tuple[str, ...]:
    """The tensors that a matrix becomes."""
    return ("weight_packed", "weight_scale", "weight_shape") if scheme.format == "pack-quantized" else ("weight", "weight_scale")


def quantization_config(plan: Plan) -> dict[str, Any]:
    """The `quantization_config` of compressed-tensors for `plan`, in the keys that vLLM's pinned reader (0.17) knows."""
    by_scheme: dict[tuple[str, bool], list[Unit]] = {}
    for unit in plan.units:
        by_scheme.setdefault((unit.scheme.model_dump_json(), unit.is_table), []).append(unit)
    groups, formats = {}, []
    body_schemes = sum(any(unit.name != "lm_head" and not unit.is_table for unit in units) for units in by_scheme.values())
    for number, units in enumerate(by_scheme.values()):
        scheme = units[0].scheme
        gptq = any(unit.method == "gptq" for unit in units)
        groups[f"group_{number}"] = {
            "targets": _targets(plan, units, only_body=body_schemes == 1),
            "weights": _weight_args(scheme.weights, plan.recipe.gptq.actorder if gptq else "none"),
            "input_activations": _input_args(scheme),
            "output_activations": None,
            "format": scheme.format,
        }
        formats.append(scheme.format)
    return {
        "quant_method": "compressed-tensors",
        "format": formats[0] if len(set(formats)) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [f"re:{pattern}" for pattern in ignored(plan)],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def more_files(plan: Plan) -> dict[str, dict[str, Any]]:
    """None: config.json says it all."""
    return {}


def _weight_args(weights: WeightScheme, actorder: str) -> dict[str, Any]:
    return {
        "num_bits": weights.num_bits, "type": weights.type, "symmetric": True, "strategy": weights.strategy, "group_size": weights.group_size,
        "dynamic": False, "actorder": "static" if actorder == "static" and weights.strategy == "group" else None,
        "observer": weights.observer, "observer_kwargs": {}, "block_structure": None,
    }  # fmt: skip


def _input_args(scheme: Scheme) -> dict[str, Any] | None:
    inputs = scheme.input_activations
    if inputs is None:
        return None
    return {
        "num_bits": 8, "type": inputs.type, "symmetric": True, "strategy": "token", "group_size": None, "dynamic": True,
        "actorder": None, "observer": None, "observer_kwargs": {}, "block_structure": None,
    }  # fmt: skip


def _targets(plan: Plan, units: list[Unit], *, only_body: bool) -> list[str]:
    """`Linear` where one scheme covers the body; else a pattern a kind, or a pattern a module where layers differ."""
    found = [rf"re:.*{re.escape(unit.name)}$" for unit in units if unit.name == "lm_head" or unit.is_table]
    body = [matrix for unit in units for matrix in unit.matrices if matrix.module != "lm_head" and not unit.is_table]
    if not body:
        return found
    return [*found, "Linear"] if only_body else found + [f"re:{pattern}" for pattern in patterns(plan, body)]

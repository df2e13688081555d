"""The AutoGPTQ checkpoint format (`quant_method: gptq`): the solver's integers and scales as AutoGPTQ, GPTQModel and vLLM read them.

A linear [out, in] of b bits becomes qweight [in * b / 32, out] int32, packed along the inputs, low bits first; scales [groups, out];
qzeros [groups, out * b / 32] int32, which in the layout called `gptq` hold the zero point minus one; and g_idx [in] int32, the group of
each input. Weights are symmetric: every zero point is 2^(b-1), and vLLM looks at neither qzeros nor g_idx. So groups must lie in the order
of the inputs, as gemq's do (`desc_act: false`; the solver's order of columns leaves no trace: `static_groups`).

What vLLM's reader (auto_gptq, formerly gptq_marlin) takes, as read in 0.32: 4 or 8 bits, groups of 32, 64, 128 or a whole row (-1);
other schemes for some modules through `dynamic`, patterns on its own module names, fused ones (qkv_proj, gate_up_proj) included, `-:` before
those that are not quantized; which modules are quantized otherwise it takes from the tensors, or from the substrings of names in
`modules_in_block_to_quantize`. It can't express FP8 and quantized activations. Of a mixture's experts it takes the kernel by their shapes
before it looks at `dynamic` (AutoGPTQConfig.get_quant_method), so that a mixture can't be stored in this format.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from gemq.errors import UsageError
from gemq.quantize.architectures import LAYER_LINEARS, MODEL_LINEARS
from gemq.quantize.scales import restore
from gemq.quantize.targets import ignored, patterns
from gemq.recipes.model import Scheme
from gemq.shard_headers import TensorSpec

if TYPE_CHECKING:
    from gemq.quantize.plan import Plan, Unit
    from gemq.quantize.skeleton import Matrix

OUTPUT_AXES: dict[str, int | None] = {"qweight": 1, "scales": 1, "qzeros": None, "g_idx": None}
_INSTEAD = "store it as compressed-tensors: leave out --format gptq, or the recipe's format"


def require_expressible(recipe: str, matrix: Matrix, scheme: Scheme) -> None:
    """Refuse what the format can't express, and experts."""
    name = matrix.tensor.removesuffix(".weight")
    if scheme.weights.type != "int" or scheme.input_activations is not None:
        raise UsageError(
            f"recipe {recipe} gives {name} {scheme.label()}, and the gptq format holds only int4 and int8 weights, no FP8 and no quantized inputs",
            _INSTEAD,
        )
    if matrix.experts is not None:
        raise UsageError(f"{name} is a mixture's experts, which gemq writes as compressed-tensors only", _INSTEAD)


def specs(module: str, shape: tuple[int, int], scheme: Scheme) -> list[TensorSpec]:
    """The tensors that a matrix [out, in] becomes."""
    (out, inputs), bits, groups = shape, scheme.weights.num_bits, scheme.weights.groups(shape[1])
    return [
        TensorSpec(f"{module}.qweight", "I32", (inputs * bits // 32, out)),
        TensorSpec(f"{module}.scales", "BF16", (groups, out)),
        TensorSpec(f"{module}.qzeros", "I32", (groups, out * bits // 32)),
        TensorSpec(f"{module}.g_idx", "I32", (inputs,)),
    ]


def suffixes(scheme: Scheme) -> tuple[str, ...]:
    """The tensors that a matrix becomes, whatever its scheme."""
    return tuple(OUTPUT_AXES)


def _half(bits: int) -> int:
    return 1 << (bits - 1)


def to_tensors(stored: torch.Tensor, scales: torch.Tensor, scheme: Scheme, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Suffix -> tensor for rows `stored` [rows, in] with `scales` [rows, groups]; qzeros and g_idx are the whole matrix's, of `shape` [out, in]."""
    (out, inputs), bits, groups = shape, scheme.weights.num_bits, scheme.weights.groups(shape[1])
    levels = (stored.t().to(torch.int32) + _half(bits)).reshape(inputs * bits // 32, 32 // bits, stored.shape[0])
    packed = levels[:, 0].clone()
    for place in range(1, 32 // bits):
        packed |= levels[:, place] << (bits * place)
    zero_points = sum((_half(bits) - 1) << shift for shift in range(0, 32, bits))
    return {
        "qweight": packed,
        "scales": scales.t().contiguous().to(torch.bfloat16),
        "qzeros": torch.full((groups, out * bits // 32), zero_points, dtype=torch.int32),
        "g_idx": torch.arange(inputs, dtype=torch.int32) // (inputs // groups),
    }


def from_tensors(tensors: dict[str, torch.Tensor], scheme: Scheme) -> torch.Tensor:
    """The weight [out, in] float32 that the stored tensors stand for; the inverse of `to_tensors` after rounding."""
    bits = scheme.weights.num_bits
    shifts = torch.arange(0, 32, bits, dtype=torch.int32).reshape(1, -1, 1)
    levels = (tensors["qweight"].unsqueeze(1) >> shifts) & ((1 << bits) - 1)
    stored = levels.flatten(0, 1).t() - _half(bits)
    return restore(stored, tensors["scales"].t().to(torch.float32), scheme.weights)


def _own(scheme: Scheme) -> dict[str, int]:
    return {"bits": scheme.weights.num_bits, "group_size": scheme.weights.group_size or -1}


def quantization_config(plan: Plan) -> dict[str, Any]:
    """The `quantization_config` of the gptq format: the commonest scheme, and the others through `dynamic`, first match wins."""
    by_scheme: dict[str, list[Unit]] = {}
    for unit in plan.units:
        by_scheme.setdefault(unit.scheme.weights.label(), []).append(unit)
    linears = Counter({label: sum(len(unit.matrices) for unit in units) for label, units in by_scheme.items()})
    commonest = linears.most_common(1)[0][0]
    dynamic: dict[str, dict[str, int]] = {f"-:{pattern}": {} for pattern in ignored(plan)}
    for label, units in by_scheme.items():
        if label == commonest:
            continue
        body = [matrix for unit in units for matrix in unit.matrices if matrix.module != "lm_head"]
        head = [r".*lm_head$"] if any(unit.name == "lm_head" for unit in units) else []
        dynamic |= {f"+:{pattern}": _own(units[0].scheme) for pattern in [*head, *patterns(plan, body)]}
    solved = [unit for unit in plan.units if unit.method == "gptq"]
    return {
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        **_own(by_scheme[commonest][0].scheme),
        "sym": True,
        "desc_act": False,
        "static_groups": bool(solved) and plan.recipe.gptq.actorder == "static",
        "lm_head": "lm_head" in plan.quantized_matrices,
        "dynamic": dynamic,
        **_listed(plan),
    }


def _listed(plan: Plan) -> dict[str, list[str]]:
    """The quantized kinds by name, where a layer has no v_proj: vLLM asks for every part of qkv_proj, and would miss one in the tensors."""
    attention = [unit for unit in plan.units if unit.matrices[0].kind.path == "self_attn.q_proj"]
    if not any(len(unit.matrices) == 2 for unit in attention):
        return {}
    units = {unit.matrices[0].kind.unit for unit in plan.units if unit.name != "lm_head"}
    paths = [kind.path for kind in (*MODEL_LINEARS, *LAYER_LINEARS) if kind.unit in units]
    return {"modules_in_block_to_quantize": [*paths, *(["lm_head"] if "lm_head" in plan.quantized_matrices else [])]}


def more_files(plan: Plan) -> dict[str, dict[str, Any]]:
    """AutoGPTQ looks for its config in a file of its own."""
    return {"quantize_config.json": quantization_config(plan)}

"""Patterns on module names for a checkpoint's quantization config: as few as separate the quantized modules from the others.

A pattern covers every name by which a reader asks for a unit. transformers asks for each linear. vLLM asks for the fused module
(`qkv_proj`), or for all of its parts, also for a part that the model does not have (`v_proj` where keys are values); for a mixture it asks
for the projections of one expert (`experts.0.gate_proj`), never for the fused tensors that the source stores.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gemq.quantize.architectures import EXPERT_TENSORS, LAYER_LINEARS

if TYPE_CHECKING:
    from gemq.quantize.architectures import LinearKind
    from gemq.quantize.plan import Plan
    from gemq.quantize.skeleton import Matrix

_EXPERTS = r"(?:.*\.)?experts\.\d+\.(?:gate_proj|up_proj|down_proj)"


def names_of_unit(kind: LinearKind) -> str:
    """A pattern for every name by which a reader asks for the unit of `kind` inside its layer; all experts of a layer share one."""
    if kind in EXPERT_TENSORS:
        return _EXPERTS
    paths = [other.path for other in LAYER_LINEARS if other.unit == kind.unit] or [kind.path]
    parent, _, fused = kind.unit.rpartition(".")
    leaves = list(dict.fromkeys([*(path.rpartition(".")[2] for path in paths), fused]))
    return re.escape(f"{parent}." if parent else "") + (leaves[0] if len(leaves) == 1 else f"(?:{'|'.join(leaves)})")


def _inside(plan: Plan) -> str:
    # transformers and vLLM name the path to a multimodal model's decoder differently; both names contain language_model
    return r".*language_model\..*" if plan.skeleton.architecture.text_config else ".*"


def patterns(plan: Plan, matrices: list[Matrix]) -> list[str]:
    """One pattern for each kind of unit in `matrices`, which must be complete units; with layer numbers where layers differ."""
    chosen = {matrix.module for matrix in matrices}
    everywhere: dict[str, list[Matrix]] = {}
    for matrix in plan.skeleton.matrices:
        everywhere.setdefault(names_of_unit(matrix.kind), []).append(matrix)
    found = []
    for names in dict.fromkeys(names_of_unit(matrix.kind) for matrix in matrices):
        if all(matrix.module in chosen for matrix in everywhere[names]):
            found.append(f"{_inside(plan)}{names}$")
            continue
        layers = sorted({matrix.layer for matrix in everywhere[names] if matrix.module in chosen and matrix.layer is not None})
        found.append(rf"{_inside(plan)}layers\.({'|'.join(map(str, layers))})\.{names}$")
    return found


def ignored(plan: Plan) -> list[str]:
    """Patterns for every linear that is not quantized: towers, routers, an unquantized head, what the recipe keeps."""
    towers = [tower for tower in plan.skeleton.architecture.towers if any(f"{tower}." in name for name in plan.skeleton.inventory)]
    found = [f".*{tower}.*" for tower in towers]
    if any(".router." in name for name in plan.skeleton.inventory):
        found.append(r".*\.router\..*")
    if "lm_head" not in plan.quantized_matrices:
        found.append(r".*lm_head$")
    kept = [matrix for matrix in plan.kept if matrix.module != "lm_head"]
    return found + (patterns(plan, kept) if kept else [])

"""Patterns on module names for a checkpoint's quantization config: as few as tell the quantized modules from the others."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemq.quantize.architectures import LinearKind
    from gemq.quantize.plan import Plan
    from gemq.quantize.skeleton import Matrix


def by_path(kind: LinearKind) -> str:
    """The pattern of a kind's own path in a layer."""
    return re.escape(kind.path)


def by_fused_path(kind: LinearKind) -> str:
    """The pattern of a kind's path and of what vLLM fuses it into, for readers that ask for the fused module by its own name."""
    parent, _, leaf = kind.path.rpartition(".")
    names = dict.fromkeys((leaf, kind.unit.rpartition(".")[2]))
    return "".join((re.escape(parent + "." if parent else ""), leaf if len(names) == 1 else f"(?:{'|'.join(names)})"))


def _inside(plan: Plan) -> str:
    # transformers and vLLM spell the way to a multimodal model's decoder differently; both say language_model
    return r".*language_model\..*" if plan.skeleton.architecture.text_config else ".*"


def patterns(plan: Plan, matrices: list[Matrix], leaf_of: Callable[[LinearKind], str] = by_path) -> list[str]:
    """A pattern a kind of `matrices`, or one with the layers' numbers where layers differ; `leaf_of` gives a kind's part of it."""
    everywhere: dict[str, set[str]] = {}
    for matrix in plan.skeleton.matrices:
        everywhere.setdefault(matrix.kind.path, set()).add(matrix.module)
    found = []
    chosen = {matrix.module for matrix in matrices}
    for path, kind in {matrix.kind.path: matrix.kind for matrix in matrices}.items():
        leaf = leaf_of(kind)
        if everywhere[path] <= chosen:
            found.append(f"{_inside(plan)}{leaf}$")
            continue
        layers = sorted(matrix.layer for matrix in matrices if matrix.kind.path == path and matrix.layer is not None)
        found.append(rf"{_inside(plan)}layers\.({'|'.join(map(str, layers))})\.{leaf}$")
    return list(dict.fromkeys(found))


def ignored(plan: Plan, leaf_of: Callable[[LinearKind], str] = by_path) -> list[str]:
    """Patterns for every linear that stays as it is: towers, routers, an unquantized head, what the recipe keeps."""
    towers = [tower for tower in plan.skeleton.architecture.towers if any(f"{tower}." in name for name in plan.skeleton.inventory)]
    found = [f".*{tower}.*" for tower in towers]
    if any(".router." in name for name in plan.skeleton.inventory):
        found.append(r".*\.router\..*")
    if "lm_head" not in plan.quantized_matrices:
        found.append(r".*lm_head$")
    kept = [matrix for matrix in plan.kept if matrix.module != "lm_head"]
    return found + (patterns(plan, kept, leaf_of) if kept else [])

"""The files of a checkpoint beside its shards: config with the quantization's description, what a server needs, recipe, manifest."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gemq.atomic import write_file, write_point
from gemq.quantize.plan import Plan, Unit
from gemq.quantize.skeleton import Matrix
from gemq.recipes.model import Scheme, WeightScheme

MANIFEST_FILE = "gemq.json"
RECIPE_FILE = "recipe.yaml"
SEAL_FILE = "gemq.seal.json"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".tflite", ".pkl", ".npz")
_OWN_FILES = {"gemq-demo.json", MANIFEST_FILE, RECIPE_FILE, SEAL_FILE, "config.json", "README.md", ".gitattributes"}


def quantization_config(plan: Plan) -> dict[str, Any]:
    """The `quantization_config` of compressed-tensors for `plan`, in the keys that vLLM's pinned reader (0.17) knows."""
    by_scheme: dict[str, list[Unit]] = {}
    for unit in plan.units:
        by_scheme.setdefault(unit.scheme.model_dump_json(), []).append(unit)
    groups, formats = {}, []
    body_schemes = sum(any(unit.name != "lm_head" for unit in units) for units in by_scheme.values())
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
        "ignore": _ignored(plan),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


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


def _inside(plan: Plan) -> str:
    # transformers and vLLM spell the way to a multimodal model's decoder differently; both say language_model
    return r"re:.*language_model\..*" if plan.skeleton.architecture.text_config else "re:.*"


def _targets(plan: Plan, units: list[Unit], *, only_body: bool) -> list[str]:
    """`Linear` where one scheme covers the body; else a pattern a kind, or a pattern a module where layers differ."""
    found = [r"re:.*lm_head$"] if any(unit.name == "lm_head" for unit in units) else []
    body = [matrix for unit in units for matrix in unit.matrices if matrix.module != "lm_head"]
    if not body:
        return found
    return [*found, "Linear"] if only_body else found + _patterns(plan, body)


def _patterns(plan: Plan, matrices: list[Matrix]) -> list[str]:
    everywhere: dict[str, set[str]] = {}
    for matrix in plan.skeleton.matrices:
        everywhere.setdefault(matrix.kind.path, set()).add(matrix.module)
    found = []
    chosen = {matrix.module for matrix in matrices}
    for path in dict.fromkeys(matrix.kind.path for matrix in matrices):
        leaf = re.escape(path)
        if everywhere[path] <= chosen:
            found.append(f"{_inside(plan)}{leaf}$")
            continue
        layers = sorted(matrix.layer for matrix in matrices if matrix.kind.path == path and matrix.layer is not None)
        found.append(rf"{_inside(plan)}layers\.({'|'.join(map(str, layers))})\.{leaf}$")
    return found


def _ignored(plan: Plan) -> list[str]:
    towers = [tower for tower in plan.skeleton.architecture.towers if any(f"{tower}." in name for name in plan.skeleton.inventory)]
    ignored = [f"re:.*{tower}.*" for tower in towers]
    if any(".router." in name for name in plan.skeleton.inventory):
        ignored.append(r"re:.*\.router\..*")
    if "lm_head" not in plan.quantized_matrices:
        ignored.append(r"re:.*lm_head$")
    kept = [matrix for matrix in plan.kept if matrix.module != "lm_head"]
    return ignored + (_patterns(plan, kept) if kept else [])


def checkpoint_config(plan: Plan) -> dict[str, Any]:
    """The source's config.json with the quantization's description, and an untied head where the head has weights of its own."""
    config = copy.deepcopy(plan.skeleton.config)
    config["quantization_config"] = quantization_config(plan)
    if "lm_head" in plan.quantized_matrices:
        config["tie_word_embeddings"] = False
        if plan.skeleton.architecture.text_config:
            config[plan.skeleton.architecture.text_config]["tie_word_embeddings"] = False
    return config


def companion_files(source: Path) -> Iterator[Path]:
    """What a server needs beside weights and config: tokenizer, processor, templates, code, licences. Relative paths, sorted."""
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        if any(part.startswith(".") for part in relative.parts) or not path.is_file():
            continue
        if path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json") or (path.name in _OWN_FILES and path.parent == source):
            continue
        yield relative


def write_companions(plan: Plan, source: Path, directory: Path, manifest: dict[str, Any]) -> None:
    """Put every file but shards and seal into `directory`."""
    for relative in companion_files(source):
        target = directory / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / relative, target)
        target.chmod(0o755 if (source / relative).stat().st_mode & 0o111 else 0o644)
    write_point("companions-copied")
    write_file(directory / "config.json", json.dumps(checkpoint_config(plan), indent=2, ensure_ascii=False) + "\n")
    write_file(directory / RECIPE_FILE, plan.recipe.to_yaml())
    write_file(directory / MANIFEST_FILE, json.dumps(manifest, indent=2, ensure_ascii=False, allow_nan=False) + "\n")

"""What a checkpoint's stored tensors stand for, as an unquantized model that transformers loads: the reference of its logits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from gemq.quantize.packing import from_tensors, suffixes
from gemq.quantize.plan import make_plan, stored_matrices
from gemq.quantize.skeleton import load_skeleton
from gemq.recipes.model import Recipe
from gemq.shards import ShardReader


def dequantized_copy(checkpoint: Path, source: Path, recipe: Recipe, out: Path) -> Path:
    """An unquantized float32 checkpoint in `out` with every quantized matrix replaced by what `checkpoint`'s tensors stand for."""
    skeleton, original = load_skeleton(source)
    assert original is not None
    written = ShardReader(checkpoint)
    # what is not quantized as the checkpoint has it: a recipe that smooths scales norms
    state = {name: (written if name in written.tensors else original).read(name).float() for name in original.tensors}
    for unit in make_plan(skeleton, recipe).units:
        for matrix in unit.matrices:
            parts = []
            for stored in stored_matrices(skeleton, matrix):
                tensors = {suffix: written.read(f"{stored.module}.{suffix}") for suffix in suffixes(unit.scheme)}
                parts.append(from_tensors(tensors, unit.scheme))
            name = f"{skeleton.head}.weight" if matrix.module == "lm_head" else matrix.tensor
            state[name] = torch.cat(parts).reshape(original.info(matrix.tensor).shape)
    return save_unquantized(checkpoint, state, out)


def save_unquantized(like: Path, state: dict[str, torch.Tensor], out: Path) -> Path:
    """A checkpoint of `state` in `out`, with the config of `like` less its quantization, and its other files."""
    shutil.copytree(like, out, ignore=shutil.ignore_patterns("*.safetensors*", "gemq*", "recipe.yaml"))
    config = json.loads((like / "config.json").read_text())
    config.pop("quantization_config", None)
    (out / "config.json").unlink()
    (out / "config.json").write_text(json.dumps(config))
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    return out

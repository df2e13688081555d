"""A model that smoothing has something to do for: the same function, a few channels between producers and their readers made loud."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

LOUDER = 16.0
ONE_IN = 24  # channels


def roughen(source: Path, out: Path) -> Path:
    """A copy of the small model in `source` (one shard) whose smoothable pairs have loud channels. Returns `out`, which must be new."""
    config = json.loads((source / "config.json").read_text())
    one = 1.0 if "Gemma3" in config["architectures"][0] else 0.0
    tensors = load_file(source / "model.safetensors")
    layers = sorted({name.split("mlp.up_proj")[0] for name in tensors if name.endswith("mlp.up_proj.weight") and "tower" not in name})
    for number, layer in enumerate(layers):
        for norm, readers in (("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
                              ("pre_feedforward_layernorm", ("mlp.gate_proj", "mlp.up_proj"))):  # fmt: skip
            weight = tensors[f"{layer}{norm}.weight"].float()
            loud = torch.arange(number % ONE_IN, len(weight), ONE_IN)
            gain = weight + one
            weight[loud] = gain[loud] * LOUDER - one
            stored = weight.to(torch.bfloat16)
            tensors[f"{layer}{norm}.weight"] = stored
            for reader in readers:
                if (name := f"{layer}{reader}.weight") in tensors:
                    tensors[name] = (tensors[name].float() * (gain / (stored.float() + one))).to(torch.bfloat16)
        up, down = f"{layer}mlp.up_proj.weight", f"{layer}mlp.down_proj.weight"
        loud = torch.arange(number % ONE_IN, len(tensors[up]), ONE_IN)
        tensors[up][loud] *= LOUDER
        tensors[down][:, loud] /= LOUDER
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("model.safetensors"))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out

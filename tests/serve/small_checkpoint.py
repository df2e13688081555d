"""Checkpoints of a few small matrices that call themselves the arenas' models: for what a package looks at, which is no size of a matrix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from sealed_checkpoint import write_tensors

from gemq.quantize.packing import to_tensors
from gemq.quantize.scales import to_fp8
from gemq.quantize.seal import write_seal
from gemq.recipes.model import Scheme
from gemq.serve.efficient_gemma import TAKEN
from gemq.serve.lowbarena import TASKS

INT4 = Scheme.model_validate({"weights": {"num_bits": 4, "strategy": "group", "group_size": 32}})
INT8 = Scheme.model_validate({"weights": {"num_bits": 8, "strategy": "channel"}})
FP8 = Scheme.model_validate({"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}, "input_activations": {"type": "float"}})
W8A8 = Scheme.model_validate({"weights": {"num_bits": 8, "strategy": "channel"}, "input_activations": {"type": "int"}})


def e4b_config() -> dict[str, Any]:
    """A config that has the numbers of google/gemma-4-E4B-it."""
    return {"architectures": list(TAKEN.architectures), "text_config": {**TAKEN.text, "max_position_embeddings": 131072}}


def qwen_config() -> dict[str, Any]:
    """A config that has the numbers of Qwen/Qwen3-8B."""
    return {"architectures": list(TASKS["qwen3-8b"].architectures), **TASKS["qwen3-8b"].text, "max_position_embeddings": 40960}


def write_checkpoint(folder: Path, config: dict[str, Any], schemes: list[Scheme | None], *, inside: str = "model.language_model",
                     towers: tuple[str, ...] = TAKEN.towers, source: str = "google/gemma-4-E4B-it", **stated: Any) -> Path:
    """A sealed checkpoint with a 64 x 64 linear a layer, quantized by that layer's scheme (None: not), an embedding, and towers."""
    folder.mkdir(parents=True)
    made = torch.Generator().manual_seed(3)
    tensors = {f"{inside}.embed_tokens.weight": torch.zeros(96, 64, dtype=torch.bfloat16)}
    tensors |= {f"model.{tower}.input_proj.weight": torch.zeros(4, 4, dtype=torch.bfloat16) for tower in towers}
    groups: dict[str, Any] = {}
    for layer, scheme in enumerate(schemes):
        module = f"{inside}.layers.{layer}.self_attn.o_proj"
        if scheme is None:
            tensors[f"{module}.weight"] = torch.zeros(64, 64, dtype=torch.bfloat16)
            continue
        weights = scheme.weights
        stored = torch.randint(-8, 8, (64, 64), generator=made, dtype=torch.int8)
        stored = to_fp8(stored.float()) if weights.type == "float" else stored
        held = to_tensors(stored, torch.full((64, weights.groups(64)), 0.25), scheme, (64, 64))
        tensors |= {f"{module}.{suffix}": tensor for suffix, tensor in held.items()}
        inputs = scheme.input_activations
        group = groups.setdefault(scheme.label(), {
            "targets": [], "format": scheme.format,
            "weights": {"num_bits": weights.num_bits, "type": weights.type, "strategy": weights.strategy, "group_size": weights.group_size},
            "input_activations": inputs and {"num_bits": 8, "type": inputs.type, "strategy": "token", "dynamic": True}})
        group["targets"].append(rf"re:.*layers\.{layer}\.self_attn\.o_proj$")
    write_tensors(folder, tensors, 1_000_000)
    document = {**config, **({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups, **stated}} if groups else {})}
    (folder / "config.json").write_text(json.dumps(document))
    (folder / "gemq.json").write_text(json.dumps({"version": 1, "source": {"model": source}, "recipe": "w4a16"}))
    (folder / "tokenizer.json").write_text("{}")
    write_seal(folder)
    return folder


def e4b(folder: Path, **options: Any) -> Path:
    """A checkpoint that efficient-gemma takes."""
    return write_checkpoint(folder, e4b_config(), [INT4, INT4, INT8], **options)


def qwen(folder: Path, schemes: list[Scheme | None] | None = None, **options: Any) -> Path:
    """A checkpoint that lowbarena's task qwen3-8b takes."""
    return write_checkpoint(folder, qwen_config(), schemes or [INT4], inside="model", towers=(), source="Qwen/Qwen3-8B", **options)

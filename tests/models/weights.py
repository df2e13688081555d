"""Seeded weights for a model of any architecture, and the folder that holds them, byte for byte the same for the same seed."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch

OUTLIER_SPREAD = 0.4  # of the log-normal scale of a linear's input channels: real weights have loud channels, and smoothing needs them


def _generator(seed: int, name: str) -> torch.Generator:
    # one stream a tensor: adding a tensor leaves the others as they were; the generator keeps only 32 bits of its seed
    return torch.Generator().manual_seed(zlib.crc32(name.encode()) ^ (seed * 0x9E3779B1 & 0xFFFFFFFF))


def seeded_tensor(name: str, shape: tuple[int, ...], seed: int, *, one_plus_norms: bool) -> torch.Tensor:
    """A float32 tensor that suits `name`: clip bound, layer scalar, norm, bias, embedding or linear. Same name, shape, seed: same values.

    `one_plus_norms`: norms multiply by 1 + w (Gemma 2 and 3), so w lies around 0; otherwise (Gemma 4) around 1.
    """
    random = _generator(seed, name)
    leaf = name.rsplit(".", 1)[-1]
    normal = torch.randn(shape, generator=random)
    if leaf in ("input_min", "input_max", "output_min", "output_max"):
        # near enough to typical activations that a few of them are clipped
        bound = 1.5 + torch.rand(shape, generator=random)
        return -bound if leaf.endswith("min") else bound
    if leaf == "layer_scalar":
        return 0.6 + 0.5 * torch.rand(shape, generator=random)
    if leaf in ("std_scale", "scale", "per_expert_scale"):
        return 1 + 0.2 * normal
    if leaf == "weight" and len(shape) == 1:
        layer_norm = any(part in name for part in ("layer_norm1", "layer_norm2", "post_layernorm", "patch_ln", "pos_norm"))
        return (0.0 if one_plus_norms and not layer_norm else 1.0) + 0.2 * normal
    if len(shape) <= 1:  # biases, std_bias, per_dim_scale
        return 0.1 * normal
    if "embed_tokens" in name:
        return normal * shape[-1] ** -0.5  # the model multiplies by sqrt(width)
    if "embedding" in leaf or "position_embedding" in name:
        return 0.3 * normal
    fan_in = shape[1:].numel() if isinstance(shape, torch.Size) and len(shape) != 3 else shape[-1]
    loud = torch.exp(OUTLIER_SPREAD * torch.randn(shape[-1], generator=random))
    return normal * fan_in**-0.5 * loud


def fill(model: torch.nn.Module, seed: int, *, one_plus_norms: bool) -> None:
    """Give every parameter and saved buffer of `model` its seeded value, in place."""
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name != "lm_head.weight":  # tied to the embedding in every Gemma
                tensor.copy_(seeded_tensor(name, tensor.shape, seed, one_plus_norms=one_plus_norms))


def save_weights(out: Path, tensors: Mapping[str, torch.Tensor], max_shard_bytes: int | None = None) -> None:
    """Write `tensors` as bfloat16 in the order of their names: model.safetensors, or shards of at most `max_shard_bytes` and an index."""
    from safetensors.torch import save_file

    shards: list[dict[str, torch.Tensor]] = [{}]
    filled = 0
    for name in sorted(tensors):
        tensor = tensors[name].detach().to(torch.bfloat16).contiguous()
        if shards[-1] and max_shard_bytes is not None and filled + tensor.nbytes > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], out / "model.safetensors", metadata={"format": "pt"})
        return
    files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, out / file, metadata={"format": "pt"})
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    write_json(out / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_json(path: Path, value: object) -> None:
    """Write `value` as indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

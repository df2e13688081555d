"""A small source and checkpoints of it, rounded to nearest by compressed-tensors' own compressors and written by gemq's shard writer."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams

from gemq.quantize.seal import write_seal
from gemq.shard_headers import TensorSpec
from gemq.shards import DTYPE_NAMES, ShardReader, ShardWriter
from gemq.source import file_hashes

TEXT = "model.language_model"
LAYERS, SHARED, HIDDEN, FFN, VOCABULARY = 3, 1, 64, 96, 96
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
GROUPS: dict[str, dict[str, Any]] = {
    "attention": {"format": "pack-quantized", "weights": _INT4,
                  "targets": [f"{TEXT}.layers.{layer}.self_attn.{name}_proj" for layer in (0, 2) for name in "qo"]},
    "mlp": {"format": "pack-quantized", "weights": {**_INT4, "symmetric": False}, "targets": [r"re:.*language_model\.layers\.1\.mlp\."]},
    "three": {"format": "pack-quantized", "weights": {**_INT4, "num_bits": 3}, "targets": [r"re:.*language_model\.layers\.2\.mlp\."]},
    "ple": {"format": "pack-quantized", "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
            "targets": ["re:.*per_layer_input_gate$"]},
    "fp8": {"format": "float-quantized", "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
            "targets": [r"re:.*language_model\.layers\.1\.self_attn\.[qkvo]_proj"]},
    "int8": {"format": "int-quantized", "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
             "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
             "targets": [r"re:.*language_model\.layers\.0\.mlp\."]},
    "head": {"format": "pack-quantized", "weights": {"num_bits": 4, "type": "int", "strategy": "channel"}, "targets": ["re:.*lm_head$"]},
}  # fmt: skip


def source_tensors() -> dict[str, torch.Tensor]:
    """The source's tensors in bfloat16: a decoder of three layers whose last shares K and V, an embedding, a piece of a tower."""
    made = torch.Generator().manual_seed(7)

    def matrix(out: int, inputs: int) -> torch.Tensor:
        rows = torch.randn(out, 1, generator=made).mul(0.3).exp()
        return (torch.randn(out, inputs, generator=made) * rows * 0.05).to(torch.bfloat16)

    tensors = {f"{TEXT}.embed_tokens.weight": matrix(VOCABULARY, HIDDEN), "model.vision_tower.input_proj.weight": matrix(HIDDEN, 48),
               "model.vision_tower.clip_max": torch.tensor(3.5), f"{TEXT}.norm.weight": matrix(1, HIDDEN)[0]}
    for layer in range(LAYERS):
        base = f"{TEXT}.layers.{layer}"
        for name in "qkvo":
            tensors[f"{base}.self_attn.{name}_proj.weight"] = matrix(HIDDEN, HIDDEN)
        tensors[f"{base}.self_attn.k_norm.weight"] = matrix(1, 32)[0]
        for name, shape in {"gate_proj": (FFN, HIDDEN), "up_proj": (FFN, HIDDEN), "down_proj": (HIDDEN, FFN)}.items():
            tensors[f"{base}.mlp.{name}.weight"] = matrix(*shape)
        tensors[f"{base}.per_layer_input_gate.weight"] = matrix(32, HIDDEN)
    return tensors


def config(groups: dict[str, dict[str, Any]] | None = None) -> dict[str, Any]:
    """config.json: the source's, or a checkpoint's with `groups`."""
    made: dict[str, Any] = {"architectures": ["Small"], "text_config": {
        "num_hidden_layers": LAYERS, "num_kv_shared_layers": SHARED, "tie_word_embeddings": groups is None}}
    if groups is not None:
        made["tie_word_embeddings"] = False
        made["quantization_config"] = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups,
                                       "ignore": ["re:.*vision_tower.*"], "quantization_status": "compressed"}
    return made


def write_tensors(directory: Path, tensors: dict[str, torch.Tensor], max_shard_bytes: int = 40_000) -> None:
    """Write shards and index."""
    specs = [TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()]
    writer = ShardWriter(directory, specs, max_shard_bytes)
    writer.allocate()
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    writer.close()
    index = writer.index_json()
    if index is not None:
        (directory / "model.safetensors.index.json").write_text(index)


def quantized(weight: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What compressed-tensors stores for `weight` under `group`, by suffix."""
    scheme = QuantizationScheme(targets=["Linear"], **{key: value for key, value in group.items() if key != "targets"})
    args: QuantizationArgs = scheme.weights
    size = args.group_size if args.strategy == "group" else weight.shape[1]
    grouped = weight.float().reshape(weight.shape[0], -1, size)
    scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
    state = {"weight": weight.float(), "weight_scale": scale.to(torch.bfloat16).float(), "weight_zero_point": zero}
    stored = BaseCompressor.get_value_from_registry(group["format"]).compress(state, scheme)
    stored["weight_scale"] = stored["weight_scale"].to(torch.bfloat16)
    return {suffix: tensor for suffix, tensor in stored.items() if isinstance(tensor, torch.Tensor)}


def checkpoint_tensors() -> dict[str, torch.Tensor]:
    """The checkpoint's tensors: what a group targets is quantized, the rest is the source's; the head is untied."""
    from gemq.quantize.audit import quantization_of

    rules, tensors = quantization_of(config(GROUPS)), {}
    weights = source_tensors()
    for name, weight in {**weights, "lm_head.weight": weights[f"{TEXT}.embed_tokens.weight"]}.items():
        module = name.removesuffix(".weight")
        group = next((group for group, scheme in zip(GROUPS.values(), rules.schemes, strict=True)
                      if weight.ndim == 2 and scheme is rules.scheme_of(module, is_linear=False)), None)
        if group is None:
            tensors[name] = weight
        else:
            tensors.update({f"{module}.{suffix}": tensor for suffix, tensor in quantized(weight, group).items()})
    return tensors


def write_source(directory: Path) -> Path:
    """The source on disk."""
    directory.mkdir(parents=True)
    write_tensors(directory, source_tensors())
    (directory / "config.json").write_text(json.dumps(config()))
    (directory / "modeling_small.py").write_text("# the source's own code\n")
    (directory / "tokens").mkdir()
    (directory / "tokens" / "vocabulary.txt").write_text("größer\n", encoding="utf-8")
    return directory


@cache
def source_digests() -> dict[str, str]:
    """The SHA-256 of the source's files, as a manifest records them."""
    with tempfile.TemporaryDirectory() as folder:
        return file_hashes(write_source(Path(folder) / "source"))


def write_checkpoint(directory: Path, tensors: dict[str, torch.Tensor] | None = None, groups: dict[str, dict[str, Any]] | None = None,
                     manifest: dict[str, Any] | None = None, extra: dict[str, bytes] | None = None) -> Path:
    """A sealed checkpoint on disk; its manifest records the source's digests, and `manifest`."""
    directory.mkdir(parents=True)
    write_tensors(directory, checkpoint_tensors() if tensors is None else tensors)
    (directory / "config.json").write_text(json.dumps(config(GROUPS if groups is None else groups), indent=2))
    (directory / "gemq.json").write_text(json.dumps({"source": {"files": source_digests()}} | (manifest or {})))
    (directory / "modeling_small.py").write_text("# the source's own code\n")
    for name, content in (extra or {"tokens/vocabulary.txt": "größer\n".encode()}).items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)
    write_seal(directory)
    return directory


def read_all(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint."""
    reader = ShardReader(directory)
    tensors = {name: reader.read(name) for name in reader.tensors}
    reader.close()
    return tensors


def copy_of(directory: Path, to: Path) -> Path:
    """A copy whose files keep their modes."""
    return Path(shutil.copytree(directory, to, symlinks=True))


def replace_file(path: Path, content: bytes) -> None:
    """New content in a read-only file, its mode kept."""
    mode = os.stat(path).st_mode
    os.chmod(path, 0o644)
    path.write_bytes(content)
    os.chmod(path, mode)

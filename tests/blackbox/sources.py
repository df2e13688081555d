"""Kinds of sources: a small model changed into each form that users bring. Every function writes the new folder `out` and returns it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.blackbox.files import edit_json, read_json, tensors_of

Tensors = dict[str, torch.Tensor]


def save(out: Path, tensors: Tensors) -> None:
    """One file of weights, in the types that the tensors have."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "model.safetensors", metadata={"format": "pt"})


def shard(out: Path, tensors: Tensors, count: int = 3, metadata: dict[str, Any] | None = None) -> None:
    """`count` files of weights and their index; `metadata` is the index's, by default the true total size."""
    ordered = sorted(tensors)
    files = {name: f"model-{at * count // len(ordered) + 1:05d}-of-{count:05d}.safetensors" for at, name in enumerate(ordered)}
    for file in sorted(set(files.values())):
        save_file({name: tensors[name].contiguous() for name in ordered if files[name] == file}, out / file, metadata={"format": "pt"})
    total = {"total_size": sum(tensor.nbytes for tensor in tensors.values())}
    index = {"metadata": total if metadata is None else metadata, "weight_map": files}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def without_weights(base: Path, out: Path, **config: Any) -> Path:
    """The files beside the weights, `config` changing keys of config.json."""
    shutil.copytree(base, out, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    edit_json(out / "config.json", lambda document: document.update(config))
    return out


def changed(base: Path, out: Path, change: Callable[[Tensors], object] = lambda tensors: None, **config: Any) -> Path:
    """A copy in one file whose tensors `change` has edited."""
    tensors = tensors_of(base)
    change(tensors)
    save(without_weights(base, out, **config), tensors)
    return out


def retyped(base: Path, out: Path, dtype: torch.dtype, name: str, *, sharded: bool = False) -> Path:
    """The same values in another floating-point type."""
    tensors = {key: tensor.to(dtype) for key, tensor in tensors_of(base).items()}
    without_weights(base, out, dtype=name)
    (shard if sharded else save)(out, tensors)
    return out


def mixed_types(base: Path, out: Path) -> Path:
    """Norms in float32, everything else in bfloat16, as some fine-tuning frameworks leave it."""

    def change(tensors: Tensors) -> None:
        tensors.update({name: tensor.float() for name, tensor in tensors.items() if tensor.ndim == 1})

    return changed(base, out, change)


def sharded(base: Path, out: Path, metadata: dict[str, Any] | None = None) -> Path:
    """Three files and an index."""
    shard(without_weights(base, out), tensors_of(base), metadata=metadata)
    return out


def untied(base: Path, out: Path) -> Path:
    """A head of its own, and a config that says so."""
    return changed(base, out, lambda tensors: tensors.update(_head(tensors)), tie_word_embeddings=False)


def stale_head(base: Path, out: Path) -> Path:
    """A config that says tied, and another `lm_head.weight` in the file."""
    return changed(base, out, lambda tensors: tensors.update(_head(tensors)))


def equal_head(base: Path, out: Path) -> Path:
    """A config that says tied, and the embedding's own values as `lm_head.weight` in the file."""
    return changed(base, out, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))


def _head(tensors: Tensors) -> Tensors:
    embedding = tensors["model.embed_tokens.weight"]
    noise = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(5)) * embedding.float().std()
    return {"lm_head.weight": (embedding.float() * 0.5 + noise).to(embedding.dtype)}


def renamed(base: Path, out: Path, prefix: str, **config: Any) -> Path:
    """Decoder tensors under another prefix than `model.`."""

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[prefix + name.removeprefix("model.")] = tensors.pop(name)

    return changed(base, out, change, **config)


def multimodal_config_of_text(base: Path, out: Path, prefix: str) -> Path:
    """A text-only model under the multimodal class: `text_config`, and null for its tower."""
    text = read_json(base / "config.json")
    renamed(base, out, prefix)
    text.pop("architectures")
    document = {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text, "vision_config": None,
        "dtype": "bfloat16", "tie_word_embeddings": True, "eos_token_id": [1, 5],
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps(document, indent=2))
    return out


def hub_cache(base: Path, out: Path) -> Path:
    """The Hub's cache: `blobs/` by digest and a snapshot of relative links. Returns the snapshot."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    blobs, snapshot = out / "models--some--model" / "blobs", out / "models--some--model" / "snapshots" / commit
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in base.iterdir():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copyfile(path, blobs / digest)
        (snapshot / path.name).symlink_to(Path("../../blobs") / digest)
    return snapshot


DEFAULTS_OF_TEXT = {
    "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0, "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True,
    "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "tie_word_embeddings": True, "final_logit_softcapping": None,
    "attn_logit_softcapping": None, "layer_types": ["sliding_attention", "sliding_attention"],
}  # fmt: skip
"""Keys of a Gemma 3 text config at the values that transformers' class gives them where they are left out."""


def defaults_left_out(out: Path, *, multimodal: bool) -> Path:
    """A model as Google's Gemma 3 4B, 12B and 27B configs are: what transformers' class has by default is not in config.json."""
    from tests.models.gemma3 import build_gemma3_multimodal, build_gemma3_text

    small = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "sliding_window": 16}
    full = out.with_name(out.name + "-full")
    text = {**DEFAULTS_OF_TEXT, "vocab_size": 512, **small}
    if multimodal:
        build_gemma3_multimodal(full, legacy_names=True, **text)  # as on the Hub
    else:
        build_gemma3_text(full, **text)

    def grow(tensors: Tensors) -> None:
        (name,) = (name for name in tensors if name.endswith("embed_tokens.weight"))
        rows = tensors[name]
        # rows of its own for every token: no two tokens may have the same logits
        more = torch.randn(DEFAULTS_OF_TEXT["vocab_size"] - len(rows), rows.shape[1], generator=torch.Generator().manual_seed(9))  # type: ignore[operator]
        tensors[name] = torch.cat([rows, (more * rows.shape[1] ** -0.5).to(rows.dtype)])

    changed(full, out, grow)

    def strip(document: dict[str, Any]) -> None:
        text = document["text_config"] if multimodal else document
        for key in DEFAULTS_OF_TEXT:
            text.pop(key, None)
            document.pop(key, None)

    edit_json(out / "config.json", strip)
    shutil.rmtree(full)
    return out


TRAINING_FILES = (
    "adapter_config.json", "adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json",
    "training_args.bin", "pytorch_model.bin", "tf_model.h5", "flax_model.msgpack", "runs/events.out.tfevents.1", "checkpoint-10/config.json",
    "checkpoint-10/model.safetensors", "original/consolidated.00.pth", "onnx/model.onnx",
)  # fmt: skip


def with_training_state(base: Path, out: Path) -> Path:
    """An adapter, optimizer and trainer state, other frameworks' weights and sub-folders beside the model."""
    shutil.copytree(base, out)
    for name in TRAINING_FILES:
        path = out / name
        path.parent.mkdir(exist_ok=True)
        if name.endswith("safetensors"):
            lora = {f"base_model.model.model.layers.0.self_attn.q_proj.lora_{side}.weight": torch.ones(4, 4) for side in "AB"}
            save_file(lora, path, metadata={"format": "pt"})
        elif name == "adapter_config.json":
            path.write_text(json.dumps({"peft_type": "LORA", "r": 4, "base_model_name_or_path": "x"}))
        else:
            path.write_bytes(b"{}" if name.endswith("json") else b"\x80\x02state")
    return out


def with_lora_tensors(base: Path, out: Path) -> Path:
    """An adapter's tensors in the model's own file."""
    added = {f"model.layers.0.self_attn.q_proj.lora_{side}.default.weight": torch.ones(4, 128, dtype=torch.bfloat16) for side in "AB"}
    return changed(base, out, lambda tensors: tensors.update(added))

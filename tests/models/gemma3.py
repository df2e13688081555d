"""Small Gemma 3 models: the text-only one, and the multimodal one under either of the two layouts of names in use.

`python -m tests.models.gemma3 text|multimodal OUT [--seed N] [--legacy-names]`.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import torch

from .vocabulary import save_gemma3_tokenizer
from .weights import fill, save_weights, write_json

IMAGE_SIZE, PATCH, SOFT_TOKENS = 56, 14, 4  # 4 x 4 patches, pooled to 2 x 2 soft tokens

_TEXT: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "attn_logit_softcapping": None, "bos_token_id": 2, "dtype": "bfloat16",
    "eos_token_id": 1, "final_logit_softcapping": None, "head_dim": 64, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 128,
    "initializer_range": 0.02, "intermediate_size": 256,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"], "max_position_embeddings": 4096,
    "model_type": "gemma3_text", "num_attention_heads": 2, "num_hidden_layers": 4, "num_key_value_heads": 1, "pad_token_id": 0,
    "query_pre_attn_scalar": 64, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0, "rope_scaling": None, "rope_theta": 1000000.0,
    "sliding_window": 16, "tie_word_embeddings": True, "use_cache": True, "vocab_size": 512,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "attention_dropout": 0.0, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 64, "image_size": IMAGE_SIZE, "intermediate_size": 128,
    "layer_norm_eps": 1e-06, "model_type": "siglip_vision_model", "num_attention_heads": 2, "num_channels": 3, "num_hidden_layers": 2,
    "patch_size": PATCH, "vision_use_head": False,
}  # fmt: skip

# The Hub's google/gemma-3-4b-it and larger were saved by transformers 4.50 and have these; transformers renames them on loading.
_LEGACY_PREFIXES = (
    ("model.language_model.", "language_model.model."),
    ("model.vision_tower.", "vision_tower.vision_model."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
)


def text_config(**overrides: Any) -> dict[str, Any]:
    """The config.json of a small text-only Gemma 3, `overrides` replacing keys."""
    return copy.deepcopy({"architectures": ["Gemma3ForCausalLM"], **_TEXT, "transformers_version": "4.55.4"} | overrides)


def multimodal_config(**text: Any) -> dict[str, Any]:
    """The config.json of a small Gemma 3 with a SigLIP tower, `text` overriding keys of its text_config."""
    return copy.deepcopy({
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 6, "dtype": "bfloat16", "eoi_token_index": 7,
        "eos_token_id": [1, 5], "image_token_index": 8, "initializer_range": 0.02, "mm_tokens_per_image": SOFT_TOKENS,
        "model_type": "gemma3", "text_config": _TEXT | text, "tie_word_embeddings": True, "transformers_version": "4.55.4",
        "vision_config": _VISION,
    })  # fmt: skip


def legacy_name(name: str) -> str:
    """The name that a tensor of Gemma3ForConditionalGeneration has in the Hub's files."""
    for ours, theirs in _LEGACY_PREFIXES:
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def build_gemma3_text(out: Path, *, seed: int = 0, max_shard_bytes: int | None = None, **overrides: Any) -> Path:
    """Make a folder of a Gemma3ForCausalLM: 4 layers, sliding and full in turn, tied embeddings. Returns `out`, which must be new."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = text_config(**overrides)
    out.mkdir(parents=True)
    _save_files(out, config, config["vocab_size"])
    model = Gemma3ForCausalLM._from_config(Gemma3TextConfig(**copy.deepcopy(config)), dtype=torch.float32)
    fill(model, seed, one_plus_norms=True)
    tensors = model.state_dict()
    if config["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    save_weights(out, tensors, max_shard_bytes)
    return out


def build_gemma3_multimodal(
    out: Path, *, seed: int = 0, legacy_names: bool = False, max_shard_bytes: int | None = None, **text: Any
) -> Path:
    """Make a folder of a Gemma3ForConditionalGeneration with a SigLIP tower and a processor. Returns `out`, which must be new.

    `legacy_names` gives the tensors the names of the Hub's files, `language_model.model.layers...`; otherwise transformers' own of today.
    """
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    config = multimodal_config(**text)
    out.mkdir(parents=True)
    _save_files(out, config, config["text_config"]["vocab_size"])
    write_json(out / "processor_config.json", {"image_seq_length": SOFT_TOKENS, "processor_class": "Gemma3Processor"})
    write_json(out / "preprocessor_config.json", {
        "do_convert_rgb": None, "do_normalize": True, "do_pan_and_scan": None, "do_rescale": True, "do_resize": True,
        "image_mean": [0.5] * 3, "image_processor_type": "Gemma3ImageProcessor", "image_seq_length": SOFT_TOKENS, "image_std": [0.5] * 3,
        "pan_and_scan_max_num_crops": None, "pan_and_scan_min_crop_size": None, "pan_and_scan_min_ratio_to_activate": None,
        "processor_class": "Gemma3Processor", "resample": 2, "rescale_factor": 1 / 255, "size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
    })  # fmt: skip
    model = Gemma3ForConditionalGeneration._from_config(Gemma3Config(**copy.deepcopy(config)), dtype=torch.float32)
    fill(model, seed, one_plus_norms=True)
    rename = legacy_name if legacy_names else str
    tensors = {rename(name): tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_weights(out, tensors, max_shard_bytes)
    return out


def _save_files(out: Path, config: dict[str, Any], vocab_size: int) -> None:
    write_json(out / "config.json", config)
    write_json(out / "generation_config.json", {"bos_token_id": 2, "do_sample": False, "eos_token_id": [1, 5], "pad_token_id": 0})
    save_gemma3_tokenizer(out, vocab_size)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=["text", "multimodal"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--legacy-names", action="store_true")
    asked = parser.parse_args()
    if asked.kind == "text":
        build_gemma3_text(asked.out, seed=asked.seed)
    else:
        build_gemma3_multimodal(asked.out, seed=asked.seed, legacy_names=asked.legacy_names)

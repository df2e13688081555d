"""Small Gemma 4 models: the E2B and E4B pattern with three towers, the 31B and 26B-A4B pattern without audio, the encoder-free 12B.

Configs are written as the Hub's files have them (`global_head_dim` beside `head_dim`, not transformers' own per-layer form), tensors
under the Hub's names. `python -m tests.models.gemma4 KIND OUT [--seed N]` with KIND one of KINDS.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import torch

from .vocabulary import save_gemma4_tokenizer
from .weights import fill, save_weights, seeded_tensor, write_json

SOFT_TOKENS = 70  # the fewest an image may have

_TEXT: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "attention_k_eq_v": False, "bos_token_id": 2, "dtype": "bfloat16",
    "enable_moe_block": False, "eos_token_id": 1, "final_logit_softcapping": 30.0, "global_head_dim": 64, "head_dim": 32,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 128, "hidden_size_per_layer_input": 32, "initializer_range": 0.02,
    "intermediate_size": 256, "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2, "max_position_embeddings": 4096,
    "model_type": "gemma4_text", "moe_intermediate_size": None, "num_attention_heads": 4, "num_experts": None,
    "num_global_key_value_heads": None, "num_hidden_layers": 8, "num_key_value_heads": 2, "num_kv_shared_layers": 4, "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 16, "tie_word_embeddings": True, "top_k_experts": None, "use_bidirectional_attention": None, "use_cache": True,
    "use_double_wide_mlp": False, "vocab_size": 512, "vocab_size_per_layer_input": 512,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "default_output_length": SOFT_TOKENS, "dtype": "bfloat16", "global_head_dim": 32,
    "head_dim": 32, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 64, "initializer_range": 0.02, "intermediate_size": 128,
    "max_position_embeddings": 4096, "model_type": "gemma4_vision", "num_attention_heads": 2, "num_hidden_layers": 2,
    "num_key_value_heads": 2, "patch_size": 16, "pooling_kernel_size": 3, "position_embedding_size": 256, "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}, "standardize": False, "use_clipped_linears": True,
}  # fmt: skip
_AUDIO: dict[str, Any] = {
    "attention_chunk_size": 12, "attention_context_left": 13, "attention_context_right": 0, "attention_invalid_logits_value": -1e9,
    "attention_logit_cap": 50.0, "conv_kernel_size": 5, "dtype": "bfloat16", "gradient_clipping": 1e10, "hidden_act": "silu",
    "hidden_size": 64, "initializer_range": 0.02, "model_type": "gemma4_audio", "num_attention_heads": 2, "num_hidden_layers": 2,
    "output_proj_dims": 96, "residual_weight": 0.5, "rms_norm_eps": 1e-06, "subsampling_conv_channels": [128, 32],
    "use_clipped_linears": True,
}  # fmt: skip
_TOKEN_IDS = {
    "image_token_id": 4, "audio_token_id": 5, "video_token_id": 6, "boi_token_id": 7, "eoi_token_id": 8, "boa_token_id": 9,
    "eoa_token_index": 10, "eos_token_id": [1, 12],
}  # fmt: skip

# What the larger models' text configs have besides: keys and values of full layers are one projection, images attend both ways, no PLE.
_LARGE_TEXT = {
    "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0,
    "use_bidirectional_attention": "vision",
}  # fmt: skip
_LARGE_VISION = {"standardize": True, "use_clipped_linears": False}

KINDS: dict[str, dict[str, Any]] = {
    "e4b": {},
    "e2b": {"text_config": {"use_double_wide_mlp": True, "num_key_value_heads": 1}},
    "31b": {"text_config": _LARGE_TEXT, "vision_config": _LARGE_VISION, "audio_config": None},
    # as in 26B-A4B the dense MLP is three experts wide, and 64 divides both widths where 128 divides neither
    "moe": {
        "text_config": _LARGE_TEXT
        | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 192, "intermediate_size": 576},
        "vision_config": _LARGE_VISION,
        "audio_config": None,
    },
    "unified": {},
}
"""Overrides of the small E4B's config by kind; `None` drops a tower."""


def small_config(kind: str = "e4b", **text: Any) -> dict[str, Any]:
    """The config.json of a small Gemma 4 of `kind`, `text` overriding keys of its text_config."""
    if kind == "unified":
        return _unified_config(text)
    config: dict[str, Any] = {
        "architectures": ["Gemma4ForConditionalGeneration"], "audio_config": _AUDIO, **_TOKEN_IDS, "dtype": "bfloat16",
        "initializer_range": 0.02, "model_type": "gemma4", "text_config": _TEXT, "tie_word_embeddings": True,
        "transformers_version": "5.6.2", "vision_config": _VISION, "vision_soft_tokens_per_image": SOFT_TOKENS,
    }  # fmt: skip
    config = copy.deepcopy(config)
    for part, changes in KINDS[kind].items():
        config[part] = None if changes is None else config[part] | changes
    config["text_config"] |= text
    return config


def _unified_config(text: dict[str, Any]) -> dict[str, Any]:
    not_there = {
        "enable_moe_block", "hidden_size_per_layer_input", "moe_intermediate_size", "num_experts", "top_k_experts",
        "vocab_size_per_layer_input",
    }  # fmt: skip
    text_config = {key: value for key, value in (_TEXT | _LARGE_TEXT).items() if key not in not_there}
    text_config |= {"model_type": "gemma4_unified_text"} | text
    return copy.deepcopy({
        "architectures": ["Gemma4UnifiedForConditionalGeneration"],
        "audio_config": {"audio_embed_dim": 640, "dtype": "bfloat16", "model_type": "gemma4_unified_audio", "rms_norm_eps": 1e-06},
        **_TOKEN_IDS, "dtype": "bfloat16", "initializer_range": 0.02, "model_type": "gemma4_unified", "text_config": text_config,
        "tie_word_embeddings": True, "transformers_version": "5.10.0",
        "vision_config": {
            "dtype": "bfloat16", "mm_embed_dim": text_config["hidden_size"], "mm_posemb_size": 256, "model_type": "gemma4_unified_vision",
            "output_proj_dims": text_config["hidden_size"], "patch_size": 4, "pooling_kernel_size": 3, "rms_norm_eps": 1e-06,
        },
    })  # fmt: skip


def redundant_kv(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """The k_proj, v_proj and k_norm that the Hub's files hold for KV-shared layers, which no forward reads. Float32, by full name."""
    text = config["text_config"]
    tensors = {}
    for layer in range(text["num_hidden_layers"] - text["num_kv_shared_layers"], text["num_hidden_layers"]):
        head_dim = text["global_head_dim"] if text["layer_types"][layer] == "full_attention" else text["head_dim"]
        width = text["num_key_value_heads"] * head_dim
        for leaf, shape in (("k_proj", (width, text["hidden_size"])), ("v_proj", (width, text["hidden_size"])), ("k_norm", (head_dim,))):
            name = f"model.language_model.layers.{layer}.self_attn.{leaf}.weight"
            tensors[name] = seeded_tensor(name, shape, seed, one_plus_norms=False)
    return tensors


def hub_name(name: str) -> str:
    """The name in the Hub's files of a tensor of transformers' model: they differ in the 12B's patch embedder alone."""
    patch = "model.embed_vision.", "model.vision_embedder."
    if name.startswith("model.embed_vision.multimodal_embedder."):
        return name.replace("multimodal_embedder.", "")
    unified = ("patch_ln1", "patch_dense", "patch_ln2", "pos_embedding", "pos_norm")
    return name.replace(*patch) if name.startswith(tuple(patch[0] + part for part in unified)) else name


def save_files(out: Path, config: dict[str, Any], text: str | None = None) -> None:
    """Write config, generation config, tokenizer, chat template and processor of a small Gemma 4 into the existing folder `out`."""
    write_json(out / "config.json", config)
    write_json(out / "generation_config.json", {"bos_token_id": 2, "do_sample": False, "eos_token_id": [1, 12], "pad_token_id": 0})
    write_json(out / "processor_config.json", _processor_config(config))
    save_gemma4_tokenizer(out, config["text_config"]["vocab_size"], **({} if text is None else {"text": text}))


def _processor_config(config: dict[str, Any]) -> dict[str, Any]:
    unified = config["model_type"] == "gemma4_unified"
    family = "Gemma4Unified" if unified else "Gemma4"
    pixels = {
        "do_convert_rgb": True, "do_rescale": True, "do_resize": True, "image_mean": [0.0] * 3, "image_std": [1.0] * 3,
        "max_soft_tokens": SOFT_TOKENS, "patch_size": config["vision_config"]["patch_size"],
        "pooling_kernel_size": config["vision_config"]["pooling_kernel_size"], "resample": 3, "rescale_factor": 1 / 255,
    }  # fmt: skip
    waveform: dict[str, Any] = {"audio_samples_per_token": 640, "feature_size": 640} if unified else {
        "dither": 0.0, "feature_size": 128, "fft_length": 512, "fft_overdrive": False, "frame_length": 320, "hop_length": 160,
        "input_scale_factor": 1.0, "max_frequency": 8000.0, "mel_floor": 0.001, "min_frequency": 0.0, "per_bin_mean": None,
        "per_bin_stddev": None, "preemphasis": 0.0, "preemphasis_htk_flavor": True, "return_attention_mask": True,
    }  # fmt: skip
    return {
        "audio_ms_per_token": 40, "audio_seq_length": 750,
        "feature_extractor": waveform | {
            "feature_extractor_type": f"{family}AudioFeatureExtractor", "padding_side": "right", "padding_value": 0.0,
            "sampling_rate": 16000,
        },
        "image_processor": pixels | {"do_normalize": False, "image_processor_type": f"{family}ImageProcessor"},
        "image_seq_length": SOFT_TOKENS, "processor_class": f"{family}Processor",
        "video_processor": pixels | {
            "do_normalize": True, "do_sample_frames": True, "num_frames": 4, "return_metadata": False,
            "video_processor_type": f"{family}VideoProcessor",
        },
    }  # fmt: skip


def empty_model(config: dict[str, Any]) -> torch.nn.Module:
    """transformers' model of `config`, in float32, with whatever weights its constructor gives."""
    from transformers import AutoConfig, Gemma4ForConditionalGeneration, Gemma4UnifiedForConditionalGeneration

    config = copy.deepcopy(config)
    parsed = AutoConfig.for_model(**config)
    kind = Gemma4UnifiedForConditionalGeneration if config["model_type"] == "gemma4_unified" else Gemma4ForConditionalGeneration
    return kind._from_config(parsed, dtype=torch.float32).eval()


def save_model(out: Path, model: torch.nn.Module, config: dict[str, Any], seed: int, max_shard_bytes: int | None = None) -> None:
    """Write the model's weights under the Hub's names with the shared layers' redundant keys and values, and without the tied head."""
    tensors = {hub_name(name): tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_weights(out, tensors | redundant_kv(config, seed), max_shard_bytes)


def build(kind: str, out: Path, *, seed: int = 0, max_shard_bytes: int | None = None, **text: Any) -> Path:
    """Make a whole folder of the small model `kind`, `text` overriding keys of its text_config. Returns `out`, which must be new."""
    out.mkdir(parents=True)
    config = small_config(kind, **text)
    save_files(out, config)
    model = empty_model(config)
    fill(model, seed, one_plus_norms=False)
    save_model(out, model, config, seed, max_shard_bytes)
    return out


def build_gemma4(out: Path, *, seed: int = 0, max_shard_bytes: int | None = None, **text: Any) -> Path:
    """E4B's structure: three towers with clipped linears, PLE, 4 of 8 layers sharing K/V, two head sizes, tied embeddings, softcap 30."""
    return build("e4b", out, seed=seed, max_shard_bytes=max_shard_bytes, **text)


def build_gemma4_e2b_like(out: Path, *, seed: int = 0, max_shard_bytes: int | None = None, **text: Any) -> Path:
    """E4B's structure with an MLP twice as wide in the KV-shared layers and one KV head."""
    return build("e2b", out, seed=seed, max_shard_bytes=max_shard_bytes, **text)


def build_gemma4_31b_like(out: Path, *, seed: int = 0, max_shard_bytes: int | None = None, **text: Any) -> Path:
    """No PLE, no shared layers, no audio; full layers have one KV head and no v_proj; the vision tower is standardized and unclipped."""
    return build("31b", out, seed=seed, max_shard_bytes=max_shard_bytes, **text)


def build_gemma4_moe(out: Path, *, seed: int = 0, max_shard_bytes: int | None = None, **text: Any) -> Path:
    """The 31B's structure with four fused 3-D experts a layer, 192 wide, beside a dense MLP of 576, and a router."""
    return build("moe", out, seed=seed, max_shard_bytes=max_shard_bytes, **text)


def build_gemma4_unified(out: Path, *, seed: int = 0, max_shard_bytes: int | None = None, **text: Any) -> Path:
    """The 12B's structure: patches and waveforms projected without towers, full layers without v_proj."""
    return build("unified", out, seed=seed, max_shard_bytes=max_shard_bytes, **text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    build(asked.kind, asked.out, seed=asked.seed)

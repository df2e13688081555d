"""The real Gemma 4 models' configs, for what works from a config alone (dry runs, byte counts), each number with where it comes from.

Not taken from the Hub's own files, which were not at hand: a key that no source below gives is left out rather than guessed.
`SOURCES` says, model by model, which source gives which keys:

converter   Google's variants in transformers' gemma4/convert_gemma4_weights.py and gemma4_unified/convert_gemma4_unified_weights.py
defaults    the defaults of transformers 5.17's config classes, where the converter leaves a key unset
e4b         a full config of E4B, serialized by transformers 5.6
31b         a published listing of gemma-4-31B-it's config.json and of every tensor in its files, which agrees with the above throughout
"""

from __future__ import annotations

import copy
from typing import Any

NAMES = ("e2b", "e4b", "12b", "31b", "26b-a4b")
"""What `real_config` knows: google/gemma-4-E2B-it, -E4B-it, -12B-it, -31B-it and -26B-A4B-it."""

_SLIDING, _FULL = "sliding_attention", "full_attention"

# Every model: the converter's rope and softcap; the rest from the defaults, which e4b agrees with.
_TEXT: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "attention_k_eq_v": False, "bos_token_id": 2, "dtype": "bfloat16",
    "eos_token_id": 1, "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "initializer_range": 0.02, "max_position_embeddings": 131072, "model_type": "gemma4_text",
    "num_global_key_value_heads": None, "num_kv_shared_layers": 0, "pad_token_id": 0, "rms_norm_eps": 1e-06,
    "rope_parameters": {
        _FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        _SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 512, "tie_word_embeddings": True, "use_bidirectional_attention": None, "use_cache": True,
    "use_double_wide_mlp": False, "vocab_size": 262144,
}  # fmt: skip
_PER_LAYER_AND_EXPERTS = {
    "enable_moe_block": False, "hidden_size_per_layer_input": 0, "moe_intermediate_size": None, "num_experts": None, "top_k_experts": None,
    "vocab_size_per_layer_input": 262144,
}  # fmt: skip
_LARGE_TEXT = {
    "attention_k_eq_v": True, "max_position_embeddings": 262144, "sliding_window": 1024, "use_bidirectional_attention": "vision",
}  # fmt: skip

_SMALL_VISION: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "default_output_length": 280, "dtype": "bfloat16", "global_head_dim": 64,
    "head_dim": 64, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072,
    "max_position_embeddings": 131072, "model_type": "gemma4_vision", "num_attention_heads": 12, "num_hidden_layers": 16,
    "num_key_value_heads": 12, "patch_size": 16, "pooling_kernel_size": 3, "position_embedding_size": 10240, "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}, "standardize": False, "use_clipped_linears": True,
}  # fmt: skip
_LARGE_VISION = _SMALL_VISION | {
    "global_head_dim": 72, "head_dim": 72, "hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16,
    "num_hidden_layers": 27, "num_key_value_heads": 16, "standardize": True, "use_clipped_linears": False,
}  # fmt: skip
_AUDIO: dict[str, Any] = {
    "attention_chunk_size": 12, "attention_context_left": 13, "attention_context_right": 0, "attention_invalid_logits_value": -1e9,
    "attention_logit_cap": 50.0, "conv_kernel_size": 5, "dtype": "bfloat16", "gradient_clipping": 1e10, "hidden_act": "silu",
    "hidden_size": 1024, "initializer_range": 0.02, "model_type": "gemma4_audio", "num_attention_heads": 8, "num_hidden_layers": 12,
    "output_proj_dims": 1536, "residual_weight": 0.5, "rms_norm_eps": 1e-06, "subsampling_conv_channels": [128, 32],
    "use_clipped_linears": True,
}  # fmt: skip

# Gemma 4's classes have these as defaults; the e4b file at hand had a small tokenizer's ids and was not followed here.
_TOKEN_IDS = {
    "audio_token_id": 258881, "boa_token_id": 256000, "boi_token_id": 255999, "eoa_token_index": 258883, "eoi_token_id": 258882,
    "eos_token_id": [1, 106], "image_token_id": 258880, "video_token_id": 258884,
}  # fmt: skip

_DECODERS: dict[str, dict[str, Any]] = {
    "e2b": {
        "hidden_size": 1536, "hidden_size_per_layer_input": 256, "intermediate_size": 6144, "layer_types": ([_SLIDING] * 4 + [_FULL]) * 7,
        "num_attention_heads": 8, "num_hidden_layers": 35, "num_key_value_heads": 1, "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
    },
    "e4b": {
        "hidden_size": 2560, "hidden_size_per_layer_input": 256, "intermediate_size": 10240, "layer_types": ([_SLIDING] * 5 + [_FULL]) * 7,
        "num_attention_heads": 8, "num_hidden_layers": 42, "num_key_value_heads": 2, "num_kv_shared_layers": 18,
    },
    "12b": _LARGE_TEXT | {
        "hidden_size": 3840, "intermediate_size": 15360, "layer_types": ([_SLIDING] * 5 + [_FULL]) * 8, "model_type": "gemma4_unified_text",
        "num_attention_heads": 16, "num_global_key_value_heads": 1, "num_hidden_layers": 48, "num_key_value_heads": 8,
    },
    "31b": _LARGE_TEXT | {
        "hidden_size": 5376, "intermediate_size": 21504, "layer_types": ([_SLIDING] * 5 + [_FULL]) * 10, "num_attention_heads": 32,
        "num_global_key_value_heads": 4, "num_hidden_layers": 60, "num_key_value_heads": 16,
    },
    "26b-a4b": _LARGE_TEXT | {
        "enable_moe_block": True, "hidden_size": 2816, "intermediate_size": 2112, "layer_types": ([_SLIDING] * 5 + [_FULL]) * 5,
        "moe_intermediate_size": 704, "num_attention_heads": 16, "num_experts": 128, "num_global_key_value_heads": 2,
        "num_hidden_layers": 30, "num_key_value_heads": 8, "top_k_experts": 8,
    },
}  # fmt: skip

_COMMON_SOURCES = {
    "text_config.*": "converter: whatever _DECODERS names, rope_parameters and final_logit_softcapping",
    "text_config.head_dim, global_head_dim, vocab_size, rms_norm_eps, hidden_activation": "defaults",
    "token ids": "defaults; eos_token_id 106 (<turn|>) from e4b",
}
SOURCES: dict[str, dict[str, str]] = {
    "e2b": _COMMON_SOURCES
    | {"vision_config": "converter, rest as e4b", "audio_config": "converter (the defaults), as e4b", "sliding_window": "defaults"},
    "e4b": _COMMON_SOURCES | {"everything but token ids": "e4b, and converter agrees"},
    "12b": _COMMON_SOURCES | {"vision_config, audio_config, sliding_window, max_position_embeddings": "defaults of the unified classes"},
    "31b": _COMMON_SOURCES | {"vision_config": "converter", "audio_config": "converter: none", "every key": "31b agrees"},
    "26b-a4b": _COMMON_SOURCES | {"vision_config": "converter", "audio_config": "converter: none"},
}
"""By model, then by key or group of keys: where the numbers come from. No source gives the exact key set of the Hub's own files."""


def real_config(name: str) -> dict[str, Any]:
    """The config.json of the real model `name`, one of NAMES, with real dimensions; raises KeyError for another name."""
    decoder = _DECODERS[name]
    config: dict[str, Any] = {**_TOKEN_IDS, "dtype": "bfloat16", "initializer_range": 0.02, "tie_word_embeddings": True}
    if name == "12b":
        config |= {
            "architectures": ["Gemma4UnifiedForConditionalGeneration"], "model_type": "gemma4_unified", "text_config": _TEXT | decoder,
            "audio_config": {"audio_embed_dim": 640, "model_type": "gemma4_unified_audio", "rms_norm_eps": 1e-06},
            "vision_config": {
                "mm_embed_dim": 3840, "mm_posemb_size": 1120, "model_type": "gemma4_unified_vision", "output_proj_dims": 3840,
                "patch_size": 16, "pooling_kernel_size": 3, "rms_norm_eps": 1e-06,
            },
        }  # fmt: skip
        return copy.deepcopy(config)
    small = name in ("e2b", "e4b")
    config |= {
        "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4",
        "text_config": _TEXT | _PER_LAYER_AND_EXPERTS | decoder, "vision_config": _SMALL_VISION if small else _LARGE_VISION,
        "audio_config": _AUDIO if small else None, "vision_soft_tokens_per_image": 280,
    }  # fmt: skip
    return copy.deepcopy(config)

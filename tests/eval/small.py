"""Build the small checkpoints of the eval tests by hand, and score them independently of gemq."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

VOCABULARY = 320
BOS = 2
GROUP = 32


def save_model(directory: Path, seed: int, noise: float = 0.0, vision: bool = False) -> Path:
    """A random Gemma 3 of two layers (one sliding, one full), saved with its tokenizer."""
    from transformers import Gemma3Config, Gemma3ForCausalLM, Gemma3ForConditionalGeneration, Gemma3TextConfig

    text: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 256, "initializer_range": 0.15, "bos_token_id": BOS, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(seed)
    if vision:
        tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
                 "patch_size": 14}  # fmt: skip
        config = Gemma3Config(text_config=text, vision_config=tower, mm_tokens_per_image=4, image_token_index=300, boi_token_index=301,
                              eoi_token_index=302)  # fmt: skip
        model = Gemma3ForConditionalGeneration(config)
    else:
        model = Gemma3ForCausalLM(Gemma3TextConfig(**text))
    generator = torch.Generator().manual_seed(99)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=generator)
    model.to(torch.bfloat16).save_pretrained(directory)
    save_tokenizer(directory)
    return directory


def save_tokenizer(directory: Path) -> None:
    """A tokenizer of bytes: four special tokens, then the 256 bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = ["<pad>", "<eos>", "<bos>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(directory)


def _requantize(source: Path, directory: Path, quantization: dict[str, Any], convert: Any) -> Path:
    """Copy `source` to `directory` with every decoder linear replaced by what `convert(stem, weight)` returns."""
    shutil.copytree(source, directory, dirs_exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            tensors |= convert(name.removesuffix(".weight"), tensor.float())
        else:
            tensors[name] = tensor
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = quantization
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def int4_levels(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int4 levels in -8…7 [out, in] and bf16 scales [out, in / 32], by absolute maximum."""
    grouped = weight.reshape(weight.shape[0], -1, GROUP)
    scale = (grouped.abs().amax(-1) / 7.5).to(torch.bfloat16)
    levels = (grouped / scale.float().unsqueeze(-1)).round().clamp(-8, 7)
    return levels.reshape(weight.shape).to(torch.int32), scale


def int4_weight(weight: torch.Tensor) -> torch.Tensor:
    """What int4_levels stands for, in float32."""
    levels, scale = int4_levels(weight)
    return levels.float() * scale.float().repeat_interleave(GROUP, 1)


def pack_inputs(levels: torch.Tensor) -> torch.Tensor:
    """Eight unsigned nibbles a word along the last axis, low first."""
    words = torch.zeros(*levels.shape[:-1], levels.shape[-1] // 8, dtype=torch.int64)
    for place in range(8):
        words |= levels[..., place::8].long() << (4 * place)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _compressed_tensors(fmt: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None, "format": fmt}
    return {"quant_method": "compressed-tensors", "format": fmt, "quantization_status": "compressed", "ignore": ["lm_head"],
            "config_groups": {"group_0": group}}  # fmt: skip


def save_int4(source: Path, directory: Path) -> Path:
    """`source` in compressed-tensors' pack-quantized format."""

    def convert(stem: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        levels, scale = int4_levels(weight)
        packed, shape = pack_inputs(levels + 8), torch.tensor(weight.shape)
        return {f"{stem}.weight_packed": packed, f"{stem}.weight_scale": scale, f"{stem}.weight_shape": shape}

    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP, "dynamic": False}
    return _requantize(source, directory, _compressed_tensors("pack-quantized", weights, None), convert)


def fp8_parts(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float8 values [out, in] and bf16 scales [out, 1]."""
    scale = (weight.abs().amax(1, keepdim=True) / 448).to(torch.bfloat16)
    return (weight / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def save_fp8(source: Path, directory: Path) -> Path:
    """`source` in compressed-tensors' float-quantized format with dynamic activations."""

    def convert(stem: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        values, scale = fp8_parts(weight)
        return {f"{stem}.weight": values, f"{stem}.weight_scale": scale}

    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    return _requantize(source, directory, _compressed_tensors("float-quantized", weights, inputs), convert)


def save_gptq(source: Path, directory: Path) -> Path:
    """`source` in the AutoGPTQ format, with the groups of each linear in reversed order; its weights equal int4_weight's."""

    def convert(stem: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        levels, scale = int4_levels(weight)
        groups = torch.arange(weight.shape[1]) // GROUP
        renamed = groups.max() - groups  # the last group first, so that g_idx is no plain count
        zeros = torch.full((int(groups.max()) + 1, weight.shape[0]), 8 - 1)
        return {
            f"{stem}.qweight": pack_inputs(levels + 8).t(), f"{stem}.qzeros": pack_inputs(zeros), f"{stem}.g_idx": renamed.to(torch.int32),
            f"{stem}.scales": scale.flip(1).t().to(torch.float32),
        }  # fmt: skip

    quantization = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": True, "checkpoint_format": "gptq"}
    return _requantize(source, directory, quantization, convert)


def plain_model(source: Path, change: Any = None) -> Any:
    """The source in float32, loaded by transformers alone, with `change(weight)` in place of each decoder linear's weight."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    if change is not None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("_proj.weight"):
                    parameter.copy_(change(parameter))
    return model


@torch.no_grad()
def plain_log_softmax(model: Any, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities [tokens - 1, vocabulary] float64 of what follows each token, from one plain forward."""
    return model(input_ids=torch.tensor([tokens])).logits[0, :-1].double().log_softmax(-1)


def plain_scores(model: Any, context: list[int], target: list[int]) -> list[float]:
    """The log-probabilities of the targets, from one plain forward."""
    table = plain_log_softmax(model, context + target)
    return [table[len(context) - 1 + i, token].item() for i, token in enumerate(target)]


def random_records(count: int, seed: int = 5) -> list[dict[str, Any]]:
    """Token records of unequal lengths."""
    rng = random.Random(seed)
    return [
        {
            "id": f"record-{i}",
            "context_token_ids": [BOS] + [rng.randrange(4, 260) for _ in range(rng.randrange(1, 30))],
            "target_token_ids": [rng.randrange(4, 260) for _ in range(rng.randrange(3, 60))],
        }
        for i in range(count)
    ]


def write_records(path: Path, records: list[dict[str, Any]]) -> Path:
    """Write a .jsonl of records."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path

"""Checkpoints for what vLLM makes of them: every architecture that tests/models builds, with every kind of recipe, sound and spoilt."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.models.gemma3 import build_gemma3_multimodal, build_gemma3_text
from tests.models.gemma4 import build

from gemq.quantize.plan import with_format, with_head
from gemq.recipes.model import Recipe, built_in_names, load_recipe, parse_recipe

_WIDE = {"moe_intermediate_size": 256, "intermediate_size": 512}  # multiples of 128
MODELS: dict[str, Callable[[Path], Path]] = {
    "gemma3": lambda out: build_gemma3_text(out),
    "gemma3-untied": lambda out: build_gemma3_text(out, tie_word_embeddings=False),
    "gemma3-mm": lambda out: build_gemma3_multimodal(out, legacy_names=True),
    "e4b": lambda out: build("e4b", out, hidden_size_per_layer_input=128),
    "e2b": lambda out: build("e2b", out),
    "31b": lambda out: build("31b", out),
    "moe": lambda out: build("moe", out),
    "moe-128": lambda out: build("moe", out, **_WIDE),
    "unified": lambda out: build("unified", out),
}
_INT4 = "{weights: {num_bits: 4, strategy: group, group_size: 32}}"
_INT8 = "{weights: {num_bits: 8, strategy: channel}}"
_FP8 = "{weights: {num_bits: 8, type: float, strategy: channel}, input_activations: {type: float}}"
_W8A8 = "{weights: {num_bits: 8, strategy: channel}, input_activations: {type: int}}"


def recipe_of(*rules: tuple[str, str], **keys: str) -> Recipe:
    """A recipe rounded to nearest with `rules` of (entries of match, scheme), each optional."""
    lines = "".join(f"  - {{match: [{match}], optional: true, scheme: {scheme}}}\n" for match, scheme in rules)
    more = "".join(f"{key}: {value}\n" for key, value in keys.items())
    return parse_recipe(f"version: 1\nname: mine\nsummary: mine\nmethod: rtn\n{more}rules:\n{lines}", "mine.yaml")


def _layer(numbers: str, path: str) -> str:
    return rf"'re:.*layers[.]({numbers})[.]{path}.*'"


# layer 3 is the first full one: without v_proj in the larger models; layers 4 to 7 of e4b share keys and values
MIXED = recipe_of(
    (_layer("1", "self_attn"), "keep"), (_layer("2", "mlp"), "keep"), (_layer("6", "self_attn"), "keep"),
    (_layer("0|3|5", "self_attn"), _INT8), (_layer("3|7", "mlp"), _INT8), (_layer("0|4", "per_layer"), "keep"), ("decoder, ple", _INT4),
)  # fmt: skip
FULL_LAYERS_KEPT = recipe_of((_layer("3", "self_attn"), "keep"), ("decoder", _INT4))
ACTIVATIONS = recipe_of((_layer("0|3", "(?:self_attn|mlp)"), _W8A8), ("attention", _FP8), ("mlp, ple", _INT4), ("experts", _FP8))
TABLES = recipe_of(("embedding", _INT8), ("ple_embedding", _INT4), ("lm_head, decoder, ple", _INT8))
EXPERTS = {
    "experts-alone": recipe_of(("experts", _INT4)),
    "experts-kept": recipe_of(("experts", "keep"), ("decoder", _INT4)),
    "experts-kept-in-some-layers": recipe_of((_layer("1|4", "experts"), "keep"), ("decoder", _INT4)),
    "experts-in-two-schemes": recipe_of((_layer("0|3", "experts"), _INT8), ("decoder", _INT4)),
    "experts-in-two-schemes-and-kept": recipe_of(
        (_layer("2", "experts"), "keep"), (_layer("0|3", "experts"), _INT8), (_layer("5", "(?:self_attn|mlp)"), "keep"), ("decoder", _INT4)
    ),
    "experts-fp8-and-int8-inputs": recipe_of((_layer("0|1", "experts"), _W8A8), ("experts", _FP8), ("attention, mlp", _INT4)),
    "experts-int8-linears-int4": recipe_of(("experts", _INT8), ("decoder", _INT4)),
}


def _built_in(name: str) -> Recipe:
    """A built-in recipe with a solver that takes no time: names, shapes and schemes are the recipe's own."""
    return load_recipe(name).model_copy(update={"method": "rtn", "tuning": None, "smoothing": None})


@dataclass(frozen=True)
class Case:
    """A model and what is made of it; `name` is unique."""

    name: str
    model: str
    recipe: Recipe


@cache
def cases() -> tuple[Case, ...]:
    """Every sound case; of recipes that give the same schemes one."""
    found = []
    for model in MODELS:
        recipes = {}
        for name in built_in_names():
            recipe, narrow = _built_in(name), {"moe": 64, "e2b": 32}.get(model, 128)
            schemes = [rule.scheme for rule in recipe.rules if rule.scheme != "keep"]
            fits = all((scheme.weights.group_size or 0) <= (128 if model == "e2b" and name != "w4a16-fast" else narrow) for scheme in schemes)
            if fits and schemes not in [[rule.scheme for rule in other.rules] for other in recipes.values()]:
                recipes[name] = recipe
        plain = recipes["w4a16-g32"]
        recipes |= {"head-int4": with_head(plain, "int4"), "head-int8": with_head(MIXED, "int8"), "mixed": MIXED, "activations": ACTIVATIONS}
        recipes |= {"full-layers-kept": FULL_LAYERS_KEPT}
        recipes |= {"tables": TABLES, "dropped-kv": plain.model_copy(update={"drop_redundant_kv": True})}
        if model.startswith("moe"):
            recipes |= EXPERTS
        else:
            in_gptq = ("w4a16-g32", "w8a16", "mixed", "head-int8", "full-layers-kept")
            recipes |= {f"{name}-gptq": with_format(recipes[name], "gptq") for name in in_gptq}
        found += [Case(f"{model}/{name}", model, recipe) for name, recipe in recipes.items()]
    return tuple(found)


# --- spoilt configs: (case, what is done to its quantization_config)


def _replace(config: dict[str, Any], old: str, new: str) -> None:
    text = json.dumps(config["quantization_config"])
    assert json.dumps(old)[1:-1] in text, old
    config["quantization_config"] = json.loads(text.replace(json.dumps(old)[1:-1], json.dumps(new)[1:-1]))


def _double_the_group_size(config: dict[str, Any]) -> None:
    for group in config["quantization_config"]["config_groups"].values():
        group["weights"]["group_size"] *= 2


_EXPERTS = r"(?:.*\.)?experts\.\d+\.(?:gate_proj|up_proj|down_proj)$"
_QKV = "self_attn.(?:q_proj|k_proj|v_proj|qkv_proj)".replace(".(", r"\.(")
SPOILT: dict[str, tuple[str, Callable[[dict[str, Any]], None]]] = {
    "targets name the fused experts": ("moe/experts-in-two-schemes", lambda config: _replace(config, _EXPERTS, r"experts\.gate_up_proj$")),
    "ignore names the fused experts": ("moe/experts-kept", lambda config: _replace(config, _EXPERTS, r"experts\.(?:gate_up_proj|down_proj)$")),
    "a bare lm_head": ("e4b/head-int8", lambda config: _replace(config, "re:.*lm_head$", "lm_head")),
    "a pattern by the source's names": (
        "e4b/full-layers-kept", lambda config: _replace(config, r"re:.*language_model\..*layers\.(3)", r"re:model\.language_model\.layers\.(3)"),
    ),
    "no v_proj where keys are values": ("31b/mixed", lambda config: _replace(config, _QKV, r"self_attn\.(?:q_proj|k_proj)")),
    "half a fused module ignored": (
        "gemma3/mixed", lambda config: config["quantization_config"]["ignore"].append(r"re:.*layers\.3\.mlp\.gate_proj$"),
    ),
    "no list where keys are values (gptq)": (
        "31b/mixed-gptq", lambda config: config["quantization_config"].pop("modules_in_block_to_quantize"),
    ),
    "two layers exchanged (gptq)": ("gemma3/mixed-gptq", lambda config: _replace(config, r"layers\.(1)\.", r"layers\.(2)\.")),
    "the wrong group size": ("gemma3/w4a16-g32", _double_the_group_size),
}  # fmt: skip
"""What is done wrong -> the case whose config.json it is done to."""


def spoil(checkpoint: Path, out: Path, wrong: str) -> Path:
    """A copy of `checkpoint` with its config spoilt as SPOILT says."""
    shutil.copytree(checkpoint, out)
    config = json.loads((out / "config.json").read_text())
    SPOILT[wrong][1](config)
    (out / "config.json").write_text(json.dumps(config))
    return out

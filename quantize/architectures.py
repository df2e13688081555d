"""What gemq knows of each architecture, as data: where its decoder lies in a checkpoint, and which linears it has.

Which of the linears a given layer really has (shared K/V, k = v, per-layer embeddings) is read off the model class that transformers builds
from the config, without weights; a linear inside a decoder layer that no table names is an error, so that nothing is missed in silence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gemq.errors import UsageError


@dataclass(frozen=True)
class LinearKind:
    """A kind of linear: its path in a layer (or in the text model), the recipe part it belongs to, and the unit that shares its input.

    `input_is_spent`: nothing reads the unit's input after the unit has, so that the walk may free it while a forward still names it.
    """

    path: str
    part: str
    unit: str
    input_is_spent: bool = False


# Linears that read one tensor form a unit: one Hessian, one scheme (vLLM fuses q/k/v and gate/up, and a fused weight has one scheme).
LAYER_LINEARS = (
    LinearKind("self_attn.q_proj", "attention", "self_attn.qkv_proj", input_is_spent=True),
    LinearKind("self_attn.k_proj", "attention", "self_attn.qkv_proj", input_is_spent=True),
    LinearKind("self_attn.v_proj", "attention", "self_attn.qkv_proj", input_is_spent=True),
    LinearKind("self_attn.o_proj", "attention", "self_attn.o_proj"),
    LinearKind("mlp.gate_proj", "mlp", "mlp.gate_up_proj", input_is_spent=True),
    LinearKind("mlp.up_proj", "mlp", "mlp.gate_up_proj", input_is_spent=True),
    LinearKind("mlp.down_proj", "mlp", "mlp.down_proj"),
    LinearKind("per_layer_input_gate", "ple", "per_layer_input_gate"),
    LinearKind("per_layer_projection", "ple", "per_layer_projection"),
)
MODEL_LINEARS = (LinearKind("per_layer_model_projection", "ple", "per_layer_model_projection"),)
# Linears inside a decoder layer that are never quantized: a router decides on tiny margins and costs nothing.
KEPT_LINEARS = ("router.proj",)
# Matrices stored as one tensor [experts, out, in]; each expert is solved for itself.
EXPERT_TENSORS = (
    LinearKind("experts.gate_up_proj", "experts", "experts.gate_up_proj"),
    LinearKind("experts.down_proj", "experts", "experts.down_proj"),
)
# Tables of rows that are looked up; quantized only where a recipe names their part.
TABLES = (
    LinearKind("embed_tokens", "embedding", "embed_tokens"),
    LinearKind("embed_tokens_per_layer", "ple_embedding", "embed_tokens_per_layer"),
)
DECODER_PARTS = ("attention", "mlp", "experts")
QUANTIZATION_KEYS = ("quantization_config", "compression_config")  # where vLLM looks for how a checkpoint is quantized


@dataclass(frozen=True)
class Producer:
    """What alone makes a unit's input, so that scales of the input's channels can be taken into it: a norm, or a linear whose rows they are.

    Only such a linear whose output is multiplied into the input, nothing nonlinear between; only such a norm that nothing else reads.
    Not here: v_proj before o_proj (Gemma 4 norms v), anything before per_layer_input_gate (it reads the residual).
    """

    unit: str
    path: str
    is_norm: bool


PRODUCERS = (
    Producer("self_attn.qkv_proj", "input_layernorm", is_norm=True),
    Producer("mlp.gate_up_proj", "pre_feedforward_layernorm", is_norm=True),
    Producer("mlp.down_proj", "mlp.up_proj", is_norm=False),
)


@dataclass(frozen=True)
class Architecture:
    """One entry of `config.architectures`."""

    name: str
    text_config: str | None
    prefixes: tuple[str, ...]  # what stands for the text model's `model.` in tensor names; the first is what transformers saves
    head_names: tuple[str, ...]
    towers: tuple[str, ...] = ()
    norm_is_one_plus_w: bool | None = None  # a norm multiplies by 1 + w, or by w; None: nobody has looked, and no norm is touched
    text_class: str = ""  # the text-only class of the same decoder, where there is one
    needs: tuple[str, ...] = ()  # sub-configs without which vLLM can't build the model
    unused: tuple[str, ...] = ()  # prefixes of tensors that no part reads and vLLM leaves out by name (its models' load_weights)


_MULTIMODAL_PREFIXES = ("model.language_model.", "language_model.model.")
_MULTIMODAL_HEADS = ("lm_head", "language_model.lm_head")
_GEMMA3N_TABLES = ("model.embed_vision.embedding.", "model.embed_audio.embedding.")  # left in Gemma 4's files
ARCHITECTURES = {
    row.name: row
    for row in (
        Architecture("Gemma3ForCausalLM", None, ("model.",), ("lm_head",), norm_is_one_plus_w=True),
        Architecture("Gemma3ForConditionalGeneration", "text_config", _MULTIMODAL_PREFIXES, _MULTIMODAL_HEADS,
                     towers=("vision_tower", "multi_modal_projector"), norm_is_one_plus_w=True, text_class="Gemma3ForCausalLM",
                     needs=("vision_config",)),
        Architecture("Gemma4ForCausalLM", None, ("model.",), ("lm_head",), norm_is_one_plus_w=False),
        Architecture("Gemma4ForConditionalGeneration", "text_config", _MULTIMODAL_PREFIXES, _MULTIMODAL_HEADS,
                     towers=("vision_tower", "audio_tower", "embed_vision", "embed_audio"), norm_is_one_plus_w=False,
                     text_class="Gemma4ForCausalLM", needs=("vision_config",), unused=_GEMMA3N_TABLES),
        Architecture("Gemma4UnifiedForConditionalGeneration", "text_config", _MULTIMODAL_PREFIXES, _MULTIMODAL_HEADS,
                     towers=("embed_vision", "embed_audio", "vision_embedder", "audio_embedder"), norm_is_one_plus_w=False,
                     needs=("vision_config",), unused=_GEMMA3N_TABLES),
    )
}  # fmt: skip


def architecture_of(config: dict[str, Any]) -> Architecture:
    """The table's row for a config; raises UsageError that lists the known ones."""
    names = config.get("architectures") or []
    known = next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), None)
    if known is None:
        raise UsageError(
            f"the architecture {', '.join(map(str, names)) or '(none named in config.json)'} is not known",
            f"gemq takes {', '.join(ARCHITECTURES)}",
        )
    return known


def refuse_quantized(config: dict[str, Any]) -> None:
    """Raise UsageError for a checkpoint that is quantized already.

    `null` is as good as absent, to transformers and vLLM too; `{}` is not: transformers asks it for its method and gives up.
    """
    text = config.get("text_config")
    for part, where in ((config, ""), (text if isinstance(text, dict) else {}, "text_config.")):
        for key in QUANTIZATION_KEYS:
            stated = part.get(key)
            if stated == {}:
                raise UsageError(f"config.json has an empty {where}{key}, which transformers can't read", f"remove {where}{key} from config.json")
            if stated is not None:
                method = stated.get("quant_method", "unknown") if isinstance(stated, dict) else "unknown"
                raise UsageError(f"the source is quantized already ({method})", "quantize the unquantized checkpoint that it was made from")


def text_config_of(config: dict[str, Any]) -> dict[str, Any]:
    """The decoder's part of the config."""
    key = architecture_of(config).text_config
    if key is None:
        return config
    if not isinstance(config.get(key), dict):
        raise UsageError(f"config.json of a {config['architectures'][0]} has no {key}", "fetch config.json again")
    return dict(config[key])


def check_text_config(text: dict[str, Any]) -> None:
    """Refuse a decoder config whose own numbers disagree."""
    layers, types = text.get("num_hidden_layers"), text.get("layer_types")
    if types is not None and isinstance(layers, int) and len(types) != layers:
        raise UsageError(f"config.json has num_hidden_layers {layers} and {len(types)} layer_types", "fetch config.json again")
    shared = text.get("num_kv_shared_layers") or 0
    if types is not None and shared:
        if not 0 < shared < len(types):
            raise UsageError(f"config.json has num_kv_shared_layers {shared} of {len(types)} layers", "fetch config.json again")
        orphans = sorted(set(types[-shared:]) - set(types[:-shared]))
        if orphans:
            index = next(i for i in range(len(types) - shared, len(types)) if types[i] == orphans[0])
            raise UsageError(
                f"layers.{index}.self_attn shares the K/V of an earlier {orphans[0]} layer, and layer_types has none before "
                f"layer {len(types) - shared} (num_kv_shared_layers {shared})",
                "fetch config.json again",
            )

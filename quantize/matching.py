"""Which scheme vLLM gives each module of a checkpoint, by its own rules for names, without vLLM: what gemq writes must match them.

Written from vLLM 0.32:
- names: the `hf_to_vllm_mapper` and `packed_modules_mapping` of models/gemma3.py, gemma3_mm.py, gemma4.py, gemma4_mm.py, gemma4_unified.py;
- compressed-tensors: `CompressedTensorsConfig.get_scheme_dict` and `apply_vllm_mapper`, `should_ignore_layer`, `find_matched_target`, and
  for a mixture `CompressedTensorsMoEMethod.get_moe_method`, which asks for the three projections of expert 0;
- gptq: `gptq_utils.get_dynamic_override` and `is_layer_gptq_quantized`, `AutoGPTQConfig.get_quant_method`.
tests/serve/test_vllm_matching.py compares every answer with that of vLLM's own code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gemq.config_file import complete_config, text_config
from gemq.errors import UsageError
from gemq.quantize.schemes import GptqQuantization, Scheme, matches, quantization_of

if TYPE_CHECKING:
    from gemq.quantize.plan import Plan

# by architecture: the prefixes of a checkpoint's names that vLLM replaces, in its order
_MULTIMODAL = (("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head."))
_RENAMED: dict[str, tuple[tuple[str, str], ...]] = {
    "Gemma3ForCausalLM": (),
    "Gemma3ForConditionalGeneration": (
        *_MULTIMODAL, ("model.vision_tower.", "vision_tower."), ("model.multi_modal_projector.", "multi_modal_projector."),
    ),
    "Gemma4ForCausalLM": (("model.language_model.", "model."),),
    "Gemma4ForConditionalGeneration": (
        ("model.vision_tower", "vision_tower"), ("model.embed_vision", "embed_vision"), ("model.audio_tower.", "audio_tower."),
        ("model.embed_audio.", "embed_audio."), *_MULTIMODAL, ("model", "language_model.model"),
    ),
    "Gemma4UnifiedForConditionalGeneration": (
        ("model.embed_audio.", "embed_audio."), ("model.embed_vision.", "embed_vision."), ("model.vision_embedder.", "vision_embedder."),
        *_MULTIMODAL, ("model", "language_model.model"),
    ),
}  # fmt: skip
# by architecture: names that vLLM has no module for, and what it looks for instead
_NOT_LOADED = {"Gemma3ForConditionalGeneration": (re.compile(r"(?:model\.)?vision_tower\.(?!vision_model\.)"), "vision_tower.vision_model.*")}
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_FUSED_INTO = {part: fused for fused, parts in _FUSED.items() for part in parts}
_EXPERT = re.compile(r"(?P<experts>(?:.*\.)?experts)\.(?:\d+\.(?:gate_proj|up_proj|down_proj)|gate_up_proj|down_proj)$")
_EXPERT_PARTS = ("0.gate_proj", "0.up_proj", "0.down_proj")
_NEVER_QUANTIZED = re.compile(r".*(?:\.router\.proj|position_embedding)$")  # vLLM builds these without the quantization config
_TABLES = ("embed_tokens", "embed_tokens_per_layer")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class Asked:
    """A module that vLLM builds: the name and the class by which it asks for a scheme, and the checkpoint's modules that it loads."""

    name: str
    kind: str  # ParallelLMHead, VocabParallelEmbedding, RoutedExperts, or Linear for all of vLLM's classes of linears
    parts: tuple[str, ...]  # names that must agree where vLLM fuses modules
    modules: tuple[str, ...]


class Unreadable(Exception):
    """vLLM would end with an error at this module."""


def shares_keys_and_values(config: Mapping[str, Any], module: str) -> bool:
    """Whether `module` lies in a decoder layer that reads the keys and values of an earlier one, and so has only a q_proj in vLLM."""
    text = text_config(dict(config))
    layers, shared = text.get("num_hidden_layers"), text.get("num_kv_shared_layers")
    found = _LAYER.search(module)
    if found and isinstance(shared, int) and shared and layers is None:  # the class's default; without shared layers there is nothing to ask
        layers = text_config(complete_config(dict(config))).get("num_hidden_layers")
    return bool(found and isinstance(layers, int) and isinstance(shared, int) and layers - shared <= int(found.group(1)) < layers)


def is_known(config: Mapping[str, Any]) -> bool:
    """Whether vLLM's names are known for the architecture that `config` names."""
    return _architecture(config) in _RENAMED


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _renamed(config: Mapping[str, Any], name: str) -> str:
    for prefix, new in _RENAMED.get(_architecture(config), ()):
        if name.startswith(prefix):
            name = name.replace(prefix, new, 1)
    return name


def vllm_name(config: Mapping[str, Any], module: str) -> str:
    """The name in vLLM's model of a checkpoint's module, before modules are fused."""
    return _renamed(config, f"{module}.").removesuffix(".")


def asked_modules(config: Mapping[str, Any], modules: Iterable[str]) -> list[Asked]:
    """What vLLM builds for the checkpoint's `modules` that have a matrix; redundant keys and values of shared layers are dropped, as there."""
    found: dict[str, tuple[str, tuple[str, ...], list[str]]] = {}
    for module in modules:
        name = vllm_name(config, module)
        parent, _, leaf = name.rpartition(".")
        parts: tuple[str, ...] = ()
        kind = "Linear"
        if mixture := _EXPERT.match(name):
            name, kind = mixture["experts"], "RoutedExperts"
            parts = tuple(f"{name}.{part}" for part in _EXPERT_PARTS)
        elif _NEVER_QUANTIZED.match(name):
            kind = "unquantized"
        elif leaf in _TABLES:
            kind = "VocabParallelEmbedding"
        elif leaf == "lm_head":
            kind = "ParallelLMHead"
        elif leaf in _FUSED_INTO:
            if leaf in _FUSED["qkv_proj"] and shares_keys_and_values(config, module):
                if leaf != "q_proj":
                    continue
            else:
                name = f"{parent}.{_FUSED_INTO[leaf]}"
                parts = tuple(f"{parent}.{part}" for part in _FUSED[_FUSED_INTO[leaf]])
        found.setdefault(name, (kind, parts, []))[2].append(module)
    return [Asked(name, kind, parts, tuple(held)) for name, (kind, parts, held) in found.items()]


class CompressedTensors:
    """vLLM's reading of a compressed-tensors config."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        stated, quantization = config["quantization_config"], quantization_of(dict(config))
        self._ignore = [self._entry(config, entry) for entry in quantization.ignore]
        self._schemes = dict(zip(stated["config_groups"], quantization.schemes, strict=True))
        self._groups: dict[str, str] = {}  # target -> the name of its group
        for group, scheme in self._schemes.items():
            self._groups |= {self._entry(config, target): group for target in scheme.targets}
        if "Linear" in self._groups:
            self._groups.setdefault("RoutedExperts", self._groups["Linear"])

    @staticmethod
    def _entry(config: Mapping[str, Any], entry: str) -> str:
        return _renamed(config, entry) if "." in entry and not entry.startswith("re:") else entry

    def scheme_of(self, asked: Asked) -> Scheme | None:
        """The scheme that vLLM finds, None for an unquantized module. Raises Unreadable where it would stop."""
        group = self.group_of(asked)
        return None if group is None else self._schemes[group]

    def group_of(self, asked: Asked) -> str | None:
        """The name in `config_groups` of what `scheme_of` gives."""
        if asked.kind != "RoutedExperts":
            return self._one(asked.name, asked.kind, asked.parts)
        groups = [self._one(part, asked.kind, ()) for part in asked.parts]
        if len({self._schemes[group].label() if group else None for group in groups}) > 1:
            raise Unreadable("vLLM takes one scheme for all projections of a mixture, and finds several")
        return groups[0]

    def _one(self, name: str, kind: str, parts: tuple[str, ...]) -> str | None:
        if any(matches(entry, name) for entry in self._ignore):
            return None
        ignored = [any(matches(entry, part) for entry in self._ignore) for part in parts]
        if any(ignored):
            if all(ignored):
                return None
            raise Unreadable("`ignore` names some of the modules that vLLM fuses, and not all")
        direct, *by_part = (next((target for target in self._groups if matches(target, each)), None) for each in (name, *parts))
        fused = by_part[0] if by_part and all(by_part) else None
        target = direct or fused or next((target for target in self._groups if _matches_class(target, kind)), None)
        return self._groups[target] if target else None


class Gptq:
    """vLLM's reading of a gptq config: `dynamic` by the fused name, and what is quantized from the tensors or a list of substrings."""

    def __init__(self, config: Mapping[str, Any], quantization: GptqQuantization, quantized: list[str]) -> None:
        self._quantization = quantization
        listed = config["quantization_config"].get("modules_in_block_to_quantize") or []
        flat = [name for entry in listed for name in (entry if isinstance(entry, list) else [entry])]
        self._quantized = [_renamed(config, name) for name in flat] if flat else [vllm_name(config, module) for module in quantized]

    def scheme_of(self, asked: Asked) -> Scheme | None:
        """As `CompressedTensors.scheme_of`."""
        if asked.kind == "RoutedExperts":
            raise Unreadable("vLLM's reader of the gptq format chooses a mixture's kernel by its shapes before it looks at `dynamic`, "
                             "so that unquantized experts may be read as quantized")  # fmt: skip
        if asked.kind == "VocabParallelEmbedding":
            return None
        parts = asked.parts or (asked.name,)
        quantized = [any(name in part for name in self._quantized) for part in parts] if self._quantized else [True]
        if any(quantized) != all(quantized):
            raise Unreadable("vLLM finds some of the modules that it fuses quantized, and not all")
        rules = (scheme for pattern, scheme in self._quantization.rules if matches(f"re:{pattern}", asked.name))
        return next(rules, self._quantization.schemes[0]) if all(quantized) else None


def _matches_class(target: str, kind: str) -> bool:
    return matches(target, kind) if target.startswith("re:") else target.lower() in kind.lower()


def schemes_in_vllm(config: Mapping[str, Any], stored: Mapping[str, str | None]) -> dict[Asked, Scheme | Unreadable | None]:
    """What vLLM finds for each module that it builds; `stored` has the checkpoint's modules with a matrix, and the label of their scheme."""
    quantization = quantization_of(dict(config))
    reader: CompressedTensors | Gptq
    if isinstance(quantization, GptqQuantization):
        reader = Gptq(config, quantization, [module for module, label in stored.items() if label is not None])
    else:
        reader = CompressedTensors(config)
    found: dict[Asked, Scheme | Unreadable | None] = {}
    for asked in asked_modules(config, stored):
        try:
            found[asked] = None if asked.kind == "unquantized" else reader.scheme_of(asked)
        except Unreadable as error:
            found[asked] = error
    return found


def unmatched(config: Mapping[str, Any], stored: Mapping[str, str | None]) -> list[tuple[str, str]]:
    """(module, what is wrong) for each of the checkpoint's modules that vLLM would not read in the scheme that it is stored in."""
    problems = []
    for asked, found in schemes_in_vllm(config, stored).items():
        for module in asked.modules:
            if isinstance(found, Unreadable):
                problems.append((module, f"can't be served as {asked.name}: {found}"))
            elif (label := found.label() if found else None) != stored[module]:
                problems.append((module, f"is {stored[module] or 'not quantized'}, and vLLM reads {asked.name} as {label or 'not quantized'}"))
    return problems


def stored_by(plan: Plan) -> dict[str, str | None]:
    """The modules of the checkpoint of `plan` that have a matrix: the label of the scheme that each is stored in, None where unquantized."""
    from gemq.quantize.plan import stored_matrices

    found: dict[str, str | None] = {}
    for unit in plan.units:
        weights = unit.scheme.weights
        size = f"g{weights.group_size}" if weights.group_size else weights.strategy
        label = f"{weights.type}{weights.num_bits} {size} {'gptq' if plan.recipe.format == 'gptq' else unit.scheme.format}"
        found |= {stored.module: label for matrix in unit.matrices for stored in stored_matrices(plan.skeleton, matrix)}
    return found | {module: None for spec in plan.copied if (module := matrix_module(spec.name, spec.shape)) and module not in found}


def matrix_module(tensor: str, shape: tuple[int, ...]) -> str | None:
    """The module of an unquantized tensor if it is a matrix, or a mixture's stack of matrices; None for any other."""
    if len(shape) == 3 and _EXPERT.match(tensor):
        return tensor
    return tensor.removesuffix(".weight") if len(shape) == 2 and tensor.endswith(".weight") else None


def require_matched(plan: Plan) -> None:
    """Raise UsageError if vLLM would not find the scheme of every module that `plan` writes or copies."""
    config = {**plan.skeleton.config, "quantization_config": plan.storage.quantization_config(plan)}
    if not is_known(config):
        raise UsageError(f"the names that vLLM gives the modules of a {_architecture(config)} are not known",
                         "report this architecture as an issue of gemq")  # fmt: skip
    pattern, looked_for = _NOT_LOADED.get(_architecture(config), (None, ""))
    lost = next((spec.name for spec in plan.copied if pattern and pattern.match(spec.name)), None)
    if lost:
        raise UsageError(f"the source has a tensor {lost}, and vLLM 0.32 loads this tower only as {looked_for}",
                         "load the checkpoint that it was made from, as it is on the Hub, and save it with save_original_format=True; "
                         "transformers can't change the names of one that was saved without")  # fmt: skip
    problems = unmatched(config, stored_by(plan))
    if problems:
        module, problem = problems[0]
        more = f" ({len(problems) - 1} other modules too)" if len(problems) > 1 else ""
        raise UsageError(
            f"recipe {plan.recipe.name}: {module} {problem}{more}",
            "store it as compressed-tensors: leave out --format gptq, or the recipe's format" if plan.recipe.format == "gptq"
            else "give the modules that it is served with one scheme, or report this recipe as an issue of gemq",
        )  # fmt: skip

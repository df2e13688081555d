"""What a checkpoint's config.json says of its quantization: which module takes which scheme, and which tensors a scheme stores.

Written from the descriptions of compressed-tensors' `quantization_config` and of AutoGPTQ's with GPTQModel's `dynamic`, as vLLM reads them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gemq.errors import IntegrityError

SCALE_DTYPES = ("BF16", "F16", "F32")
# what may be said of a quantization; whatever else changes how a checkpoint is served (transforms, sparsity) is not of gemq's making
_KEYS = {"quant_method", "format", "quantization_status", "config_groups", "ignore", "kv_cache_scheme", "global_compression_ratio", "version"}
_GROUP_KEYS = {"targets", "weights", "input_activations", "format"}
_WEIGHTS_KEYS = {"num_bits", "type", "strategy", "group_size", "symmetric", "actorder", "observer", "observer_kwargs"}
_GPTQ_LAYOUTS = {"gptq": 1, "gptq_v2": 0}  # what is taken off a zero point before it is stored


@dataclass(frozen=True)
class Scheme:
    """How one group of modules is stored, in compressed-tensors' terms; `stored_zero` is what the gptq format writes for its zero points."""

    format: str
    num_bits: int
    type: str
    symmetric: bool
    strategy: str
    group_size: int
    static_input: bool
    targets: tuple[str, ...]
    stored_zero: int = 0

    def label(self) -> str:
        """The scheme in a few characters: int4 g128 pack-quantized."""
        size = f"g{self.group_size}" if self.strategy == "group" else self.strategy
        return f"{self.type}{self.num_bits} {size} {self.format}"

    def groups(self, in_features: int) -> int:
        """Scales in a row."""
        return in_features // self.group_size if self.strategy == "group" else 1

    def tensors(self, shape: tuple[int, int]) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
        """What is stored for a weight [out, in]: suffix -> (valid dtypes, shape)."""
        out, inputs = shape
        groups = self.groups(inputs)
        if self.format == "gptq":
            return {"qweight": (("I32",), (-(-inputs * self.num_bits // 32), out)), "scales": (SCALE_DTYPES, (groups, out)),
                    "qzeros": (("I32",), (groups, -(-out * self.num_bits // 32))), "g_idx": (("I32",), (inputs,))}
        scale_shape = (1,) if self.strategy == "tensor" else (out, groups)
        stored: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {"weight_scale": (SCALE_DTYPES, scale_shape)}
        if self.format == "pack-quantized":
            stored["weight_packed"] = (("I32",), (out, -(-inputs * self.num_bits // 32)))
            stored["weight_shape"] = (("I64",), (2,))
            if not self.symmetric:
                stored["weight_zero_point"] = (("I32",), (-(-out * self.num_bits // 32), groups))
        else:
            stored["weight"] = (("F8_E4M3",) if self.type == "float" else ("I8",), shape)
            if not self.symmetric:
                stored["weight_zero_point"] = (("I8",), scale_shape)
        if self.static_input:
            stored["input_scale"] = (SCALE_DTYPES, (1,))
        return stored


@dataclass
class Quantization:
    """A checkpoint's `quantization_config`: its schemes, what it ignores, and whether the KV cache has scales."""

    schemes: list[Scheme] = field(default_factory=list)
    ignore: tuple[str, ...] = ()
    kv_scales: bool = False
    names_all: bool = True  # whether a linear without tensors of a quantized one contradicts the config
    unnamed: str = "no target of the config names it"

    def scheme_of(self, module: str, *, is_linear: bool) -> Scheme | None:
        """The scheme of `module`, or None: exact names before patterns before class names, what is ignored has none."""
        if any(_names(entry, module, is_linear) for entry in self.ignore):
            return None
        ranked = sorted(((_rank(target), target, number) for number, scheme in enumerate(self.schemes) for target in scheme.targets))
        for _, target, number in ranked:
            if _names(target, module, is_linear):
                return self.schemes[number]
        return None


@dataclass
class GptqQuantization(Quantization):
    """The gptq format's: patterns in their order, the first that matches decides, and what none matches has the general scheme.

    `rules`: a pattern and its scheme, or None where modules are left out.
    """

    rules: tuple[tuple[str, Scheme | None], ...] = ()

    def scheme_of(self, module: str, *, is_linear: bool) -> Scheme | None:
        """The scheme of a quantized `module`; an unquantized linear has none only where a rule says so or it is no linear."""
        for pattern, scheme in self.rules:
            if _names(f"re:{pattern}", module, is_linear):
                return scheme
        return self.schemes[0] if is_linear else None


def _rank(target: str) -> int:
    return 1 if target.startswith("re:") else 2 if target in ("Linear", "Embedding") else 0


def matches(target: str, module: str) -> bool:
    """Whether an entry of `targets` or `ignore` names `module`: as it is, or as a pattern (`re:...`) from the start of the name."""
    if target.startswith("re:"):
        try:
            return re.match(target[3:], module) is not None
        except (re.error, RecursionError, OverflowError) as error:
            raise IntegrityError(f"config.json has the pattern {target[:200]!r}, which is not a regular expression: {error}",
                                 "don't use this checkpoint") from None
    return target == module


def _names(target: str, module: str, is_linear: bool) -> bool:
    return matches(target, module) or (target == "Linear" and is_linear)


def quantization_of(config: dict[str, Any]) -> Quantization:
    """What config.json says of quantization; empty for an unquantized model. Raises IntegrityError on what can't be understood."""

    def broken(why: str) -> IntegrityError:
        return IntegrityError(f"quantization_config in config.json {why}", "don't use this checkpoint, or quantize the source again")

    stated = config.get("quantization_config")
    if stated is None:
        return Quantization()
    if isinstance(stated, dict) and stated.get("quant_method") == "gptq":
        return _gptq(stated, broken)
    if not isinstance(stated, dict) or not isinstance(stated.get("config_groups"), dict):
        raise broken("must be an object with config_groups")
    if stated.get("quant_method") != "compressed-tensors":
        raise broken(f"has the quant_method {str(stated.get('quant_method'))[:40]!r}, this reader knows 'compressed-tensors' and 'gptq'")
    unknown = _unknown(stated, _KEYS)
    if unknown:
        raise broken(f"has the key {unknown!r}, which this reader does not know")
    ignore = stated.get("ignore") or []
    if not isinstance(ignore, list) or not all(isinstance(entry, str) for entry in ignore):
        raise broken("must have a list of names in ignore")
    schemes = [_scheme(name, group, stated.get("format"), broken) for name, group in stated["config_groups"].items()]
    return Quantization(schemes, tuple(ignore), bool(stated.get("kv_cache_scheme")))


def _scheme(name: str, group: Any, overall: object, broken: Any) -> Scheme:
    weights = group.get("weights") if isinstance(group, dict) else None
    targets = group.get("targets") if isinstance(group, dict) else None
    if not isinstance(weights, dict) or not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise broken(f"group {name!r} must have targets and weights")
    unknown = _unknown(group, _GROUP_KEYS) or _unknown(weights, _WEIGHTS_KEYS)
    if unknown:
        raise broken(f"group {name!r} has the key {unknown!r}, which this reader does not know")
    if weights.get("actorder") not in (None, "static", "weight"):
        raise broken(f"group {name!r} has the actorder {str(weights['actorder'])[:40]!r}, under which groups are not in the order of the inputs")
    form = group.get("format") or overall
    bits, kind, strategy = weights.get("num_bits", 8), weights.get("type", "int"), weights.get("strategy")
    size = weights.get("group_size")
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    valid_bits = {"pack-quantized": range(1, 9), "int-quantized": (8,), "float-quantized": (8,)}
    if form not in valid_bits:
        raise broken(f"group {name!r} has the format {str(form)[:40]!r}, this reader knows {', '.join(valid_bits)}")
    if type(bits) is not int or bits not in valid_bits[form] or kind != ("float" if form == "float-quantized" else "int"):
        raise broken(f"group {name!r} stores {str(kind)[:40]} of {str(bits)[:40]} bits as {form}")
    if strategy not in ("group", "channel", "tensor") or (strategy == "group") != (type(size) is int and size > 0):
        raise broken(f"group {name!r} has the strategy {str(strategy)[:40]!r} with the group_size {str(size)[:40]}")
    inputs = group.get("input_activations")
    problem = _inputs_problem(form, inputs)
    if problem:
        raise broken(f"group {name!r} {problem}")
    static = isinstance(inputs, dict) and inputs.get("dynamic", False) is False
    symmetric = weights.get("symmetric", True)
    group_size = size if strategy == "group" and isinstance(size, int) else 0
    return Scheme(form, bits, kind, symmetric is not False, strategy, group_size, static, tuple(targets))


def _unknown(stated: dict[str, Any], known: set[str]) -> str:
    """The first key of `stated` that is not known and says something: null, false and an empty object or list say nothing."""
    return next((str(key)[:40] for key, value in stated.items() if key not in known and value not in (None, False, {}, [])), "")


def _inputs_problem(form: str, inputs: Any) -> str:
    """Why input_activations don't suit a format ("" if they do): packed weights meet inputs as they are, 8-bit ones inputs of their own type."""
    if form == "pack-quantized":
        return "" if inputs is None else "quantizes the inputs of packed weights, which are served with inputs as they are"
    kind = "float" if form == "float-quantized" else "int"
    if not isinstance(inputs, dict):
        return f"stores weights as {form}, which needs input_activations"
    stated = (inputs.get("num_bits", 8), inputs.get("type", "int"), inputs.get("symmetric", True))
    how = (inputs.get("strategy") or "tensor", inputs.get("dynamic", False))
    if stated != (8, kind, True) or how not in (("token", True), ("tensor", False)):
        return (f"has inputs of {stated[0]} bits, {stated[1]}, symmetric {stated[2]}, by {how[0]}, dynamic {how[1]}; valid for {form} are 8 bits, "
                f"{kind}, symmetric, by token and dynamic or by tensor and static")  # fmt: skip
    return ""


def _gptq(stated: dict[str, Any], broken: Callable[[str], IntegrityError]) -> GptqQuantization:
    layout = stated.get("checkpoint_format", "gptq")
    if not isinstance(layout, str) or layout not in _GPTQ_LAYOUTS:
        raise broken(f"has the checkpoint_format {str(layout)[:40]!r}, this reader knows {', '.join(_GPTQ_LAYOUTS)}")
    dynamic = stated.get("dynamic") or {}
    if not isinstance(dynamic, dict) or not all(isinstance(own, dict) for own in dynamic.values()):
        raise broken("must have an object of patterns and their settings in dynamic")
    general = _gptq_scheme(stated, layout, broken)
    rules: list[tuple[str, Scheme | None]] = []
    for pattern, own in dynamic.items():
        left_out = pattern.startswith("-:")
        rules.append((pattern.removeprefix("-:").removeprefix("+:"), None if left_out else _gptq_scheme({**stated, **own}, layout, broken)))
    if stated.get("lm_head") is not True:
        rules.insert(0, (r"(?:.*\.)?lm_head$", None))
    schemes = dict.fromkeys([general, *(scheme for _, scheme in rules if scheme is not None)])
    names_all = any(pattern.startswith("-:") for pattern in dynamic)
    return GptqQuantization(list(schemes), names_all=names_all, unnamed="the config leaves it out", rules=tuple(rules))


def _gptq_scheme(stated: dict[str, Any], layout: str, broken: Callable[[str], IntegrityError]) -> Scheme:
    bits, size = stated.get("bits"), stated.get("group_size")
    if type(bits) is not int or bits not in (4, 8) or stated.get("sym") is not True:
        raise broken(f"has gptq weights of {str(bits)[:40]} bits with sym {str(stated.get('sym'))[:40]}; vLLM takes 4 and 8 symmetric bits")
    if type(size) is not int or (size != -1 and size <= 0):
        raise broken(f"has the group_size {str(size)[:40]!r}; a number of inputs, or -1 for whole rows, is valid")
    if stated.get("desc_act", False) is not False and size != -1:
        raise broken("has desc_act, groups that don't lie in the order of the inputs, which vLLM no longer takes")
    return Scheme("gptq", bits, "int", True, "channel" if size == -1 else "group", max(size, 0), False, (), (1 << (bits - 1)) - _GPTQ_LAYOUTS[layout])

"""A recipe: which parts of a decoder take which scheme, and the solver that finds the integers.

Schemes speak compressed-tensors' terms. A recipe is read from YAML, checked here, and written into the checkpoint as it was used.
"""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from gemq.errors import UsageError
from gemq.recipes import strict_yaml

Part = Literal["decoder", "attention", "mlp", "experts", "ple", "lm_head", "embedding", "ple_embedding"]
PARTS: tuple[str, ...] = ("decoder", "attention", "mlp", "experts", "ple", "lm_head", "embedding", "ple_embedding")
TABLE_PARTS = ("embedding", "ple_embedding")  # looked up: rounded to nearest, whatever the recipe's method
DECODER_PARTS = ("attention", "mlp", "experts")  # what `decoder` means
MARLIN_GROUP_SIZES = (32, 64, 128)
_EVERYTHING = ("re:.*", "re:.+", "re:^.*", "re:.*$")
_ENDS_IN_WEIGHT = re.compile(r"weight\)*(\$|\\Z)?\)*$")


def _whole_number(value: Any) -> Any:
    """`value` if it is an int: a Literal takes true for 1 and 4.0 for 4."""
    if type(value) is not int:
        raise ValueError(f"{value!r} is not a whole number")
    return value


_WholeNumber = BeforeValidator(_whole_number)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class WeightScheme(_Frozen):
    """How a weight matrix [out, in] is stored: `num_bits` integers or floats with one scale a group of inputs, or a row."""

    num_bits: Annotated[Literal[4, 8], _WholeNumber]
    type: Literal["int", "float"] = "int"
    strategy: Literal["group", "channel"] = "group"
    group_size: int | None = None
    symmetric: Literal[True] = True
    observer: Literal["minmax", "mse"] = "minmax"

    @model_validator(mode="after")
    def _is_servable(self) -> WeightScheme:
        if self.strategy == "group" and self.group_size not in MARLIN_GROUP_SIZES:
            raise ValueError(
                f"group_size is {self.group_size}, vLLM's kernels take {', '.join(map(str, MARLIN_GROUP_SIZES))} (or strategy: channel)"
            )
        if self.strategy == "channel" and self.group_size is not None:
            raise ValueError("strategy: channel takes no group_size")
        if self.type == "float" and (self.num_bits, self.strategy) != (8, "channel"):
            raise ValueError("type: float takes num_bits: 8 and strategy: channel (FP8 E4M3)")
        return self

    def groups(self, in_features: int) -> int:
        """Scales a row: 1 for a channel-wise scheme."""
        return 1 if self.group_size is None else in_features // self.group_size

    def label(self) -> str:
        """A short name: int4 g128, int8 channel, fp8 channel."""
        name = "fp8" if self.type == "float" else f"int{self.num_bits}"
        return f"{name} g{self.group_size}" if self.group_size else f"{name} channel"


class ActivationScheme(_Frozen):
    """How a quantized linear's input is rounded while serving: one scale a token, found on the fly."""

    num_bits: Annotated[Literal[8], _WholeNumber] = 8
    type: Literal["int", "float"]
    strategy: Literal["token"] = "token"
    dynamic: Literal[True] = True
    symmetric: Literal[True] = True


class Scheme(_Frozen):
    """A weight scheme and, for W8A8, that of the input."""

    weights: WeightScheme
    input_activations: ActivationScheme | None = None

    @model_validator(mode="after")
    def _has_a_kernel(self) -> Scheme:
        weights, inputs = self.weights, self.input_activations
        if inputs is not None and (weights.num_bits, weights.type, weights.strategy) != (8, inputs.type, "channel"):
            raise ValueError("quantized activations need 8-bit channel-wise weights of the same type")
        if inputs is None and weights.type == "float":
            raise ValueError("FP8 weights are served with FP8 activations: give input_activations: {type: float}")
        return self

    @property
    def format(self) -> Literal["pack-quantized", "float-quantized", "int-quantized"]:
        """The compressed-tensors format that stores this scheme."""
        if self.weights.type == "float":
            return "float-quantized"
        return "pack-quantized" if self.input_activations is None else "int-quantized"

    @property
    def can_be_smoothed(self) -> bool:
        """Whether smoothing is searched for it: integers that are multiplied by inputs as they are."""
        return self.weights.type == "int" and self.input_activations is None

    def label(self) -> str:
        """A short name with the activations where they are quantized."""
        return self.weights.label() + (
            "" if self.input_activations is None else f", {'fp8' if self.input_activations.type == 'float' else 'int8'} inputs"
        )


class Rule(_Frozen):
    """Give every module that one of `match` names this scheme, or keep it as it is (`scheme: keep`)."""

    match: tuple[str, ...] = Field(min_length=1)
    scheme: Scheme | Literal["keep"]
    method: Literal["gptq", "rtn"] | None = None
    optional: bool = False

    @field_validator("match")
    @classmethod
    def _known_parts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for entry in value:
            if entry.startswith("re:"):
                _require_pattern(entry)
            elif entry not in PARTS:
                raise ValueError(f"{entry!r} is neither a part ({', '.join(PARTS)}) nor a pattern on source names (re:...)")
            if value.count(entry) > 1:
                raise ValueError(f"{entry!r} is given twice: leave one out")
        return value

    def names(self, part: str, module: str) -> bool:
        """Whether an entry of `match` names a matrix of `part` whose module is `module` in the source (`lm_head` for the head).

        Patterns do not reach the tables: a pattern for everything means what is multiplied.
        """
        return any(
            part not in TABLE_PARTS and re.match(entry.removeprefix("re:"), module) is not None if entry.startswith("re:")
            else entry == part or (entry == "decoder" and part in DECODER_PARTS)
            for entry in self.match
        )  # fmt: skip


def _require_pattern(entry: str) -> None:
    """Raise ValueError if `entry` (re:...) is not a regular expression, or one that can't match the name of a linear."""
    pattern = entry.removeprefix("re:")
    if not pattern.strip():
        raise ValueError(f"{entry!r} has an empty pattern: give a regular expression after re:, or the part decoder")
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(
            f"{entry!r} is not a valid regular expression: {error}; patterns are Python's and match from the start of a name, as in "
            r"'re:.*layers\.3\.mlp\.'"
        ) from None
    if _ENDS_IN_WEIGHT.search(pattern):
        raise ValueError(f"{entry!r} can't match: names are compared without .weight, like model.layers.0.mlp.up_proj; leave it out")


class Gptq(_Frozen):
    """Options of the GPTQ solver (Frantar et al. 2022)."""

    actorder: Literal["static", "none"] = "static"
    dampening: float = Field(default=0.01, gt=0, le=1)
    block_size: int = Field(default=128, ge=1, le=4096)
    # how far a unit's target moves from its own weight to what makes up for errors before it; above 0 the source is walked beside
    asymmetric: float = Field(default=0.0, ge=0, le=1)
    refine: int = Field(default=1, ge=0, le=16)  # rounds of fitting scales and integers to each other afterwards


class Tuning(_Frozen):
    """Options of the tuning of whole layers by signed gradients (SignRound, Cheng et al. 2023), after their units are solved."""

    iterations: int = Field(default=200, ge=1, le=10_000)
    batches: int = Field(default=2, ge=1, le=64)  # calibration batches of about 2,048 tokens a step
    learning_rate: float = Field(default=0.002, gt=0, le=0.5)  # of the first step, in units of the grid; falls to 0
    hold_out_every: int = Field(default=8, ge=2, le=1024)  # one batch in so many judges, and is not learnt from


class Smoothing(_Frozen):
    """Options of exact-equivalence smoothing (AWQ, Lin et al. 2023): inputs are scaled by a power of their size, what makes them takes it back."""

    # the powers that are tried beside none at all; 1 would make all inputs of a unit equally large
    alphas: tuple[float, ...] = (0.05, 0.1, 0.15, 0.2, 0.3, 0.45)

    @field_validator("alphas")
    @classmethod
    def _rising(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not 1 <= len(value) <= 20 or not all(0 < alpha <= 1 for alpha in value) or list(value) != sorted(set(value)):
            raise ValueError("give 1 to 20 powers above 0 and up to 1, each larger than the one before (none at all is always tried)")
        return value


class Recipe(_Frozen):
    """What to make of a decoder. Modules that no rule matches stay as they are."""

    version: Annotated[Literal[1], _WholeNumber]
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    summary: str = Field(min_length=1)
    method: Literal["gptq", "rtn"] = "gptq"
    rules: tuple[Rule, ...] = Field(min_length=1)
    gptq: Gptq = Gptq()
    tuning: Tuning | None = None
    smoothing: Smoothing | None = None
    format: Literal["compressed-tensors", "gptq"] = "compressed-tensors"
    drop_redundant_kv: bool = False

    @model_validator(mode="after")
    def _has_something_to_smooth(self) -> Recipe:
        elsewhere = {*TABLE_PARTS, "lm_head", "ple"}
        schemes = [rule.scheme for rule in self.rules if rule.scheme != "keep" and not set(rule.match) <= elsewhere]
        if self.smoothing is not None and not any(scheme.can_be_smoothed for scheme in schemes):
            raise ValueError("smoothing is for integer weights whose inputs are not quantized, and no rule gives attention or mlp such a scheme")
        return self

    @property
    def needs_calibration(self) -> bool:
        """Whether any rule's solver looks at activations."""
        return self.tuning is not None or self.smoothing is not None or any(
            rule.scheme != "keep" and (rule.method or self.method) == "gptq" and not set(rule.match) <= set(TABLE_PARTS)
            for rule in self.rules
        )

    def to_yaml(self) -> str:
        """The recipe as YAML that `load_recipe` reads back to an equal one."""
        return yaml.safe_dump(self.model_dump(mode="json", exclude_none=True), sort_keys=False, allow_unicode=True, width=120)


def built_in_names() -> list[str]:
    """The recipes that come with gemq."""
    return sorted(entry.name.removesuffix(".yaml") for entry in files("gemq.recipes").iterdir() if entry.name.endswith(".yaml"))


def load_recipe(name_or_path: str) -> Recipe:
    """A built-in recipe by name, or one from a YAML file; raises UsageError that names the key and the valid values."""
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml") or "/" in name_or_path:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = f"it is not UTF-8 text: {error}" if isinstance(error, UnicodeDecodeError) else error.strerror or error
            raise UsageError(f"recipe {path} can't be read: {why}", f"give a YAML file, or one of {', '.join(built_in_names())}") from None
        return parse_recipe(text, str(path))
    if name_or_path not in built_in_names():
        raise UsageError(f"there is no recipe {name_or_path!r}", f"choose one of {', '.join(built_in_names())}, or give a YAML file")
    return parse_recipe(files("gemq.recipes").joinpath(f"{name_or_path}.yaml").read_text(encoding="utf-8"), name_or_path)


def parse_recipe(text: str, origin: str) -> Recipe:
    """The recipe in `text`; `origin` names it in errors."""
    try:
        data = strict_yaml.read(text)
    except ValueError as error:
        raise UsageError(
            f"recipe {origin} is not valid YAML: {error}", "correct the file: `gemq recipes show w4a16` prints a valid one"
        ) from None
    if not isinstance(data, dict):
        found = "empty" if data is None else f"a {type(data).__name__}"
        raise UsageError(
            f"recipe {origin} is {found}; a mapping with version, name, summary and rules is valid", "`gemq recipes show w4a16` prints one"
        )
    try:
        # as JSON, whose lists pydantic takes for tuples where it takes no string for a number
        recipe = Recipe.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        problems = "; ".join(_explain(problem) for problem in _own_problems(error.errors()))
        raise UsageError(f"recipe {origin}: {problems}", "`gemq recipes show w4a16` prints a valid one") from None
    _require_rules_that_apply(recipe, origin)
    return recipe


def _require_rules_that_apply(recipe: Recipe, origin: str) -> None:
    """Raise UsageError for a rule that can't apply since earlier ones match all that it names, as far as their entries show that."""
    covered: dict[str, int] = {}  # entry -> the first rule that matches all of it
    for place, rule in enumerate(recipe.rules):
        by = sorted({covered[entry] for entry in rule.match if entry in covered})
        if all(entry in covered for entry in rule.match):
            earlier = ", ".join(f"rules.{number} {list(recipe.rules[number].match)}" for number in by)
            raise UsageError(
                f"recipe {origin}: rules.{place} {list(rule.match)} never applies: the first rule that matches wins, and {earlier} matches "
                "all of it",
                f"leave rules.{place} out, or put it before rules.{by[0]}",
            )
        matched = set(rule.match)
        if not matched.isdisjoint(_EVERYTHING):
            matched |= {*_EVERYTHING, *PARTS} - set(TABLE_PARTS)
        if "decoder" in matched:
            matched |= set(DECODER_PARTS)
        for entry in matched:
            covered.setdefault(entry, place)
        if covered.keys() >= set(DECODER_PARTS):
            covered.setdefault("decoder", place)


# where a key stands -> the model whose keys are valid there
_MODEL_AT: dict[str, type[_Frozen]] = {
    "rules": Rule, "scheme": Scheme, "weights": WeightScheme, "input_activations": ActivationScheme, "gptq": Gptq,
    "tuning": Tuning, "smoothing": Smoothing,
}  # fmt: skip


_VALID_TYPES = {
    "bool_type": "true or false", "int_type": "a whole number", "float_type": "a number", "string_type": "text", "tuple_type": "a list",
    "model_type": "a mapping",
}  # fmt: skip


def _own_problems(problems: list[Any]) -> list[Any]:
    """Without those that pydantic only adds because something inside failed: the other arm of a union, a tuple without its bad entry."""
    inside_rules = any(len(problem["loc"]) > 1 and problem["loc"][0] == "rules" for problem in problems)
    return [
        problem for problem in problems
        if not (inside_rules and problem["type"] == "too_short" and problem["loc"] == ("rules",))
        and not (problem["loc"][-1:] == ("literal['keep']",) and isinstance(problem["input"], dict))
    ]  # fmt: skip


def _explain(problem: Any) -> str:
    loc = [step for step in problem["loc"] if isinstance(step, int) or "[" not in step]
    where = ".".join(map(str, loc))
    if problem["type"] == "extra_forbidden":
        owner = next((_MODEL_AT[step] for step in reversed(loc[:-1]) if step in _MODEL_AT), Recipe)
        return f"unknown key {where} (valid: {', '.join(owner.model_fields)})"
    if problem["type"] in _VALID_TYPES:
        return f"{where or 'recipe'}: {problem['input']!r:.60} is not valid: give {_VALID_TYPES[problem['type']]}"
    return f"{where or 'recipe'}: {problem['msg'].removeprefix('Value error, ')}"

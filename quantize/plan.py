"""What a recipe makes of a source, decided before any weight is read: units, schemes, tensors that will be written, bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from gemq.errors import UsageError
from gemq.quantize.architectures import PRODUCERS
from gemq.quantize.matching import require_matched
from gemq.quantize.recipe_checks import Chosen, Refused, check_format, check_fused, check_shapes, complete_advice, unit_name
from gemq.quantize.skeleton import Matrix, Skeleton
from gemq.quantize.storage import Storage, storage_of
from gemq.quantize.tables import check_table
from gemq.recipes.model import PARTS, Recipe, Rule, Scheme
from gemq.shard_headers import TensorSpec

Method = Literal["gptq", "rtn"]
_NO_WEIGHT = ("weight_shape", "g_idx")  # tensors of a quantized matrix that say nothing of its weights


@dataclass(frozen=True)
class Unit:
    """Matrices that read one input and take one scheme: solved together, row by row."""

    name: str  # layers.3.mlp.gate_up_proj
    layer: int | None
    matrices: tuple[Matrix, ...]
    scheme: Scheme
    method: Method

    @property
    def in_features(self) -> int:
        return self.matrices[0].in_features

    @property
    def numel(self) -> int:
        return sum(matrix.numel for matrix in self.matrices)

    @property
    def is_table(self) -> bool:
        """Whether its rows are looked up: rounded to nearest, outside the walk."""
        return self.matrices[0].is_table


@dataclass(frozen=True)
class Pair:
    """A unit, and what alone makes its input: smoothing may take scales of the unit's inputs into it."""

    unit: str
    layer: int
    module: str  # in the text model: model.layers.3.pre_feedforward_layernorm, model.layers.3.mlp.up_proj
    tensor: str  # in the source
    is_norm: bool


@dataclass
class Plan:
    """The whole of a quantization: `units` in the order of the walk, and every tensor of the checkpoint."""

    skeleton: Skeleton
    recipe: Recipe
    units: list[Unit]
    kept: list[Matrix]
    written: dict[str, list[TensorSpec]] = field(default_factory=dict)  # unit name -> its tensors
    copied: list[TensorSpec] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    pairs: dict[str, Pair] = field(default_factory=dict)  # unit name -> its pair, where smoothing is asked for

    def adjusted(self, unit: str) -> list[TensorSpec]:
        """The norm that smoothing of `unit` may change: written with the unit, and not copied."""
        pair = self.pairs.get(unit)
        return [self.skeleton.inventory[pair.tensor]] if pair is not None and pair.is_norm else []

    def reads_inputs(self, unit: Unit) -> bool:
        """Whether solving `unit` needs its inputs on the calibration set."""
        fitted = self.recipe.smoothing is not None and unit.layer is not None and unit.scheme.weights.observer == "mse"
        return unit.method == "gptq" or unit.name in self.pairs or fitted

    def expert_units(self, layer: int) -> list[Unit]:
        """The units of `layer` that are stacks of a mixture's experts."""
        return [unit for unit in self.units if unit.layer == layer and unit.matrices[0].experts is not None]

    @property
    def storage(self) -> Storage:
        """The checkpoint format that the recipe names."""
        return storage_of(self.recipe.format)

    @property
    def specs(self) -> list[TensorSpec]:
        """Every tensor of the checkpoint, layer by layer."""
        specs = [*self.copied, *(spec for name, specs in self.written.items() for spec in [*specs, *self.adjusted(name)])]
        return sorted(specs, key=lambda spec: (_layer_of(spec.name), spec.name))

    @property
    def quantized_matrices(self) -> dict[str, Unit]:
        """Module in the text model -> its unit."""
        return {matrix.module: unit for unit in self.units for matrix in unit.matrices}

    def bytes_per_token(self) -> tuple[float, float]:
        """Bytes of linears and head that one decoded token reads: (source, checkpoint). Of a mixture's experts only the active ones count."""
        units = self.quantized_matrices
        before = after = 0.0
        top_k, experts = getattr(self.skeleton.text, "top_k_experts", None), getattr(self.skeleton.text, "num_experts", None)
        for matrix in self.skeleton.matrices:
            share = top_k / experts if matrix.experts and top_k and experts else 1.0
            stored = self.skeleton.inventory[matrix.tensor].nbytes * share
            before += stored
            unit = units.get(matrix.module)
            after += stored if unit is None else share * sum(spec.nbytes for spec in _stored_as(self, matrix, unit.scheme))
        return before, after

    def bits_per_weight(self) -> float:
        """Mean bits of a decoder weight (head excluded), scales included."""
        units = self.quantized_matrices
        bits = count = 0
        for matrix in self.skeleton.matrices:
            if matrix.module == "lm_head":
                continue
            count += matrix.numel
            unit = units.get(matrix.module)
            specs = [self.skeleton.inventory[matrix.tensor]] if unit is None else _stored_as(self, matrix, unit.scheme)
            bits += 8 * sum(spec.nbytes for spec in specs if not spec.name.endswith(_NO_WEIGHT))
        return bits / count

    def source_bytes(self) -> int:
        return sum(spec.nbytes for spec in self.skeleton.inventory.values())

    def checkpoint_bytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)


def _layer_of(name: str) -> tuple[int, int]:
    found = re.search(r"\.layers\.(\d+)\.", name)
    return (1, int(found.group(1))) if found and "tower" not in name else (0, 0)


def make_plan(skeleton: Skeleton, recipe: Recipe) -> Plan:
    """Match the recipe's rules against the source; raises UsageError for a rule that can't be carried out."""
    try:
        return _plan(skeleton, recipe)
    except Refused as refusal:
        raise complete_advice(refusal, lambda changed: _plan(skeleton, changed)) from None


def _plan(skeleton: Skeleton, recipe: Recipe) -> Plan:
    candidates = [*skeleton.tables, *skeleton.matrices]
    chosen = _chosen(skeleton, recipe, candidates)
    check_fused(skeleton, recipe, chosen)
    check_format(recipe, chosen, skeleton.matrices)
    for table in skeleton.tables:
        check_table(skeleton, recipe, chosen, table)
    check_shapes(skeleton, recipe, chosen, skeleton.matrices)
    groups: dict[str, list[Matrix]] = {}
    for matrix in candidates:
        groups.setdefault(unit_name(matrix), []).append(matrix)
    units, kept = [], []
    for name, matrices in groups.items():
        choice = chosen.get(matrices[0].module)
        if choice is None or choice.scheme is None:
            kept += [matrix for matrix in matrices if not matrix.is_table]
            continue
        method: Method = "rtn" if matrices[0].is_table else choice.rule.method or recipe.method
        units.append(Unit(name, matrices[0].layer, tuple(matrices), choice.scheme, method))
    if not units:
        raise UsageError(f"recipe {recipe.name} quantizes nothing of this source", "add a rule for `decoder`")
    plan = _with_tensors(Plan(skeleton, recipe, units, kept))
    require_matched(plan)
    return plan


def _chosen(skeleton: Skeleton, recipe: Recipe, candidates: list[Matrix]) -> dict[str, Chosen]:
    """Module in the text model -> the first rule that matches it."""
    chosen: dict[str, Chosen] = {}
    for number, rule in enumerate(recipe.rules):
        matched = [matrix for matrix in candidates if _matches(rule, matrix)]
        if not matched and not rule.optional:
            raise UsageError(
                f"recipe {recipe.name}: the rule {list(rule.match)} matches no linear of this {skeleton.architecture.name}",
                _what_there_is(skeleton, rule),
            )
        for matrix in matched:
            chosen.setdefault(matrix.module, Chosen(number, rule))
    return chosen


def _matches(rule: Rule, matrix: Matrix) -> bool:
    return rule.names(matrix.kind.part, "lm_head" if matrix.module == "lm_head" else matrix.tensor.removesuffix(".weight"))


def _what_there_is(skeleton: Skeleton, rule: Rule) -> str:
    parts = sorted({matrix.kind.part for matrix in [*skeleton.matrices, *skeleton.tables]})
    for entry in rule.match:
        if entry in ("embedding", "ple_embedding"):
            return f"this source has no such table; it has the parts {', '.join(parts)}"
        pattern = entry.removeprefix("re:")
        reached = [] if entry in PARTS else [name for name in skeleton.inventory if re.match(pattern, name)]
        table = next((table for table in skeleton.tables if table.tensor in reached), None)
        if table is not None:
            return f"it reaches {table.tensor}: a table is named by its part, match: [{table.kind.part}]"
        if reached:
            return (
                f"it reaches {reached[0]}, and gemq quantizes only decoder linears: towers, routers, norms and embedders stay as they are"
            )
    example = skeleton.matrices[0].tensor.removesuffix(".weight")
    return f"this source has the parts {', '.join(parts)}; patterns match from the start of names like {example}"


def unit_bytes(plan: Plan, matrices: Iterable[Matrix], scheme: Scheme | None) -> int:
    """The bytes of `matrices` stored under `scheme`, or as the source has them."""
    if scheme is None:
        return sum(plan.skeleton.inventory[matrix.tensor].nbytes for matrix in matrices)
    return sum(spec.nbytes for matrix in matrices for spec in _stored_as(plan, matrix, scheme))


@dataclass(frozen=True)
class Stored:
    """A matrix as the checkpoint has it: its module there, its shape, and its first row in the source's tensor seen as [rows, in]."""

    module: str
    out_features: int
    in_features: int
    first_row: int


def stored_matrices(skeleton: Skeleton, matrix: Matrix) -> list[Stored]:
    """What becomes of `matrix`: itself, or one matrix an expert (gate and up apart, as vLLM reads a mixture of experts)."""
    name = skeleton.source_name(matrix.module)
    out, inputs = matrix.out_features, matrix.in_features
    if matrix.experts is None:
        return [Stored(name, out, inputs, 0)]
    parent, _, leaf = name.rpartition(".")
    halves = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
    rows = out // len(halves)
    return [
        Stored(f"{parent}.{expert}.{half}", rows, inputs, expert * out + number * rows)
        for expert in range(matrix.experts)
        for number, half in enumerate(halves)
    ]


def _stored_as(plan: Plan, matrix: Matrix, scheme: Scheme) -> list[TensorSpec]:
    return [
        spec
        for stored in stored_matrices(plan.skeleton, matrix)
        for spec in plan.storage.specs(stored.module, (stored.out_features, stored.in_features), scheme)
    ]


def _with_tensors(plan: Plan) -> Plan:
    skeleton = plan.skeleton
    replaced = set()
    for unit in plan.units:
        plan.written[unit.name] = [spec for matrix in unit.matrices for spec in _stored_as(plan, matrix, unit.scheme)]
        # an untied head is added beside the embedding that it came from
        replaced |= {matrix.tensor for matrix in unit.matrices if not (matrix.module == "lm_head" and skeleton.tied)}
    if plan.recipe.drop_redundant_kv:
        plan.dropped = skeleton.redundant_kv()
    if plan.recipe.smoothing is not None:
        plan.pairs = _pairs(plan)
        replaced |= {spec.name for unit in plan.units for spec in plan.adjusted(unit.name)}
    plan.copied = [spec for name, spec in skeleton.inventory.items() if name not in replaced and name not in set(plan.dropped)]
    return plan


def _pairs(plan: Plan) -> dict[str, Pair]:
    """The pairs that smoothing may scale: all that read the producer are units that take it, and a linear producer is itself quantized."""
    skeleton, quantized, pairs = plan.skeleton, plan.quantized_matrices, {}
    if skeleton.architecture.norm_is_one_plus_w is None:
        raise UsageError(
            f"recipe {plan.recipe.name} smooths, and how the norms of {skeleton.architecture.name} multiply is not known",
            "leave smoothing out of the recipe, or report this architecture as an issue of gemq",
        )
    mixtures = {matrix.layer for matrix in skeleton.matrices if matrix.experts is not None}
    kinds = {producer.unit: producer for producer in PRODUCERS}
    for unit in plan.units:
        producer = kinds.get(unit.matrices[0].kind.unit)
        if producer is None or unit.layer is None or not unit.scheme.can_be_smoothed:
            continue
        # beside a mixture of experts the dense MLP's norm is left alone, as are the experts' own
        module = f"model.layers.{unit.layer}.{producer.path}"
        left_alone = unit.layer in mixtures if producer.is_norm and producer.path != "input_layernorm" else False
        if left_alone or not (producer.is_norm or module in quantized):
            continue
        if getattr(skeleton.model.get_submodule(module), "bias", None) is None:
            pairs[unit.name] = Pair(unit.name, unit.layer, module, skeleton.source_name(module) + ".weight", producer.is_norm)
    return pairs


def require_pairs(plan: Plan) -> None:
    """Raise UsageError if the recipe smooths and nothing that it quantizes can be. A search may come upon such a mix, a person shouldn't."""
    if plan.recipe.smoothing is not None and not plan.pairs:
        raise UsageError(
            f"recipe {plan.recipe.name} smooths, and can none of what it quantizes: {', '.join(producer.unit for producer in PRODUCERS)} "
            "in integers, the last with up_proj",
            "leave smoothing out of the recipe, or quantize one of them",
        )


def with_format(recipe: Recipe, name: str) -> Recipe:
    """`recipe` stored in another checkpoint format: `compressed-tensors` or `gptq`."""
    valid = get_args(Recipe.model_fields["format"].annotation)
    if name not in valid:
        raise UsageError(f"--format is {name!r}", f"give {' or '.join(valid)}")
    return recipe.model_copy(update={"format": name})


def rule_for(recipe: Recipe, matrix: Matrix) -> Rule | None:
    """The first rule of `recipe` that names `matrix`, None where none does and it stays as it is."""
    return next((rule for rule in recipe.rules if _matches(rule, matrix)), None)


def with_head(recipe: Recipe, head: str) -> Recipe:
    """`recipe` with a head of its own scheme, whatever its rules say of the head: untied `int4` or `int8`, channel-wise, or `keep`."""
    rules = tuple(rule for rule in recipe.rules if rule.match != ("lm_head",))
    bits = {"int4": 4, "int8": 8, "keep": None}
    if head not in bits:
        raise UsageError(f"--lm-head is {head!r}", "give int4, int8 or keep")
    scheme: Any = "keep"
    if bits[head] is not None:
        scheme = {"weights": {"num_bits": bits[head], "strategy": "channel", "observer": "mse" if bits[head] == 4 else "minmax"}}
    # the first rule that matches decides, so this one is before a pattern or a rule of several parts that reaches the head too
    rule = Rule.model_validate({"match": ["lm_head"], "scheme": scheme, **({} if scheme == "keep" else {"method": "rtn"})})
    return recipe.model_copy(update={"rules": (rule, *rules)})


def describe_units(plan: Plan) -> list[dict[str, Any]]:
    """A row a unit, quantized or kept: unit, modules (as the checkpoint names them), linears, scheme, method, bytes_before, bytes_after."""
    inventory = plan.skeleton.inventory
    rows = []
    for unit in plan.units:
        rows.append({
            "unit": unit.name, "modules": [stored.module for matrix in unit.matrices for stored in stored_matrices(plan.skeleton, matrix)],
            "linears": len(unit.matrices), "scheme": unit.scheme.label(), "method": unit.method,
            "bytes_before": sum(inventory[matrix.tensor].nbytes for matrix in unit.matrices),
            "bytes_after": sum(spec.nbytes for spec in plan.written[unit.name]),
        })  # fmt: skip
    for matrix in plan.kept:
        nbytes = inventory[matrix.tensor].nbytes
        rows.append({"unit": matrix.module.removeprefix("model."), "modules": [plan.skeleton.source_name(matrix.module)], "linears": 1,
                     "scheme": f"as it is ({inventory[matrix.tensor].dtype})", "method": "", "bytes_before": nbytes,
                     "bytes_after": nbytes})  # fmt: skip
    return rows

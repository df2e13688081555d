"""What a search decides on, and what it may choose: units, the experts of a layer, the head, each with the schemes that its kernels take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemq.errors import UsageError
from gemq.quantize.plan import Plan, Unit, make_plan, rule_for, unit_bytes
from gemq.quantize.recipe_checks import why_not
from gemq.quantize.skeleton import Matrix, Skeleton
from gemq.recipes.model import Recipe, Rule, Scheme

KEEP = "keep"
HEAD = "lm_head"
SCHEMES: dict[str, Scheme] = {
    **{
        f"int4-g{size}": Scheme.model_validate({"weights": {"num_bits": 4, "strategy": "group", "group_size": size, "observer": "mse"}})
        for size in (128, 64, 32)
    },
    "int8": Scheme.model_validate({"weights": {"num_bits": 8, "strategy": "channel"}}),
    "fp8": Scheme.model_validate(
        {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}, "input_activations": {"type": "float"}}
    ),
}
HEAD_SCHEMES: dict[str, Scheme] = {
    "int4-channel": Scheme.model_validate({"weights": {"num_bits": 4, "strategy": "channel", "observer": "mse"}}),
    "int8": SCHEMES["int8"],
}
"""What `--lm-head int4` and `int8` give an untied head; any int4 candidate stands for the first."""
DEFAULT_CANDIDATES = ("int4-g128", "int4-g64", "int4-g32", "int8", KEEP)


def parse_candidates(text: str) -> tuple[str, ...]:
    """The candidates named in `text`, comma-separated, the kept weight always among them; raises UsageError for one that has no kernel."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in SCHEMES and name != KEEP:
            raise UsageError(f"candidate {name!r} is not known", f"choose among {', '.join([*SCHEMES, KEEP])}")
    if not set(names) - {KEEP}:
        raise UsageError("there is no candidate to choose", f"name some of {', '.join(SCHEMES)}")
    return tuple(dict.fromkeys([*names, KEEP]))


@dataclass(frozen=True)
class Decision:
    """What takes one scheme: a unit of the plan, all experts of a layer (vLLM reads their projections as one), or the head."""

    name: str
    layer: int | None
    units: tuple[Unit, ...]

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return tuple(matrix for unit in self.units for matrix in unit.matrices)

    @property
    def is_head(self) -> bool:
        return self.name == HEAD

    @property
    def is_experts(self) -> bool:
        return self.matrices[0].experts is not None

    @property
    def numel(self) -> int:
        return sum(unit.numel for unit in self.units)

    def scheme(self, label: str) -> Scheme | None:
        """The scheme behind a candidate's label, None for the kept weight."""
        return (HEAD_SCHEMES if self.is_head else SCHEMES).get(label)

    def labels(self, candidates: Sequence[str]) -> list[str]:
        """The candidates under the labels that they have here."""
        if not self.is_head:
            return list(candidates)
        any_int4 = any(name.startswith("int4") for name in candidates)
        return [*(["int4-channel"] if any_int4 else []), *(name for name in candidates if not name.startswith("int4"))]


@dataclass(frozen=True)
class Option:
    """A candidate that a decision may take: the bytes that a checkpoint has of it, and those that a decoded token reads."""

    label: str
    disk_bytes: int
    token_bytes: float


def search_plan(skeleton: Skeleton, recipe: Recipe, *, head: bool = True) -> Plan:
    """The plan whose units the search decides on: all that `recipe` quantizes by its rules, and the head unless `head` is False.

    Of the recipe only what is kept, the solver and the format count: smoothing, tuning and targets come with a build.
    """
    keeps = tuple(rule for rule in recipe.rules if rule.scheme == KEEP)
    int8 = SCHEMES["int8"]
    rules = [*keeps, Rule(match=("ple",), scheme=int8, optional=True, method="gptq"), Rule(match=("decoder",), scheme=int8, method="gptq")]
    if head:
        rules.append(Rule(match=(HEAD,), scheme=int8, method="rtn"))
    plain = Recipe(version=1, name=recipe.name, summary=recipe.summary, rules=tuple(rules), format=recipe.format,
                   gptq=recipe.gptq.model_copy(update={"asymmetric": 0.0}), drop_redundant_kv=recipe.drop_redundant_kv)  # fmt: skip
    return make_plan(skeleton, plain)


def decides_on_head(recipe: Recipe, skeleton: Skeleton) -> bool:
    """Whether a search under `recipe` may choose the head's scheme: no rule names the head, by its part or by a pattern."""
    return not any(matrix.module == HEAD and rule_for(recipe, matrix) is not None for matrix in skeleton.matrices)


def fixed_rules(recipe: Recipe, plan: Plan) -> list[Rule]:
    """A rule for each matrix that `recipe` gives a scheme and the search does not decide on: tables, and a head that a rule names."""
    decided = {matrix.module for decision in decisions_of(plan) for matrix in decision.matrices}
    outside = [matrix for matrix in (*plan.skeleton.tables, *plan.skeleton.matrices) if matrix.is_table or matrix.module == HEAD]
    found = []
    for matrix in outside:
        rule = rule_for(recipe, matrix)
        if rule is not None and matrix.module not in decided:
            found.append(rule.model_copy(update={"match": (HEAD if matrix.module == HEAD else matrix.kind.part,)}))
    return found


def decisions_of(plan: Plan) -> list[Decision]:
    """The decisions of `search_plan`'s plan, in the order of the walk, the head last."""
    found: dict[str, list[Unit]] = {}
    for unit in plan.units:
        found.setdefault(f"layers.{unit.layer}.experts" if unit.matrices[0].experts else unit.name, []).append(unit)
    made = [Decision(name, units[0].layer, tuple(units)) for name, units in found.items()]
    return sorted(made, key=lambda decision: decision.is_head)


def options_of(plan: Plan, decision: Decision, candidates: Sequence[str]) -> dict[str, Option]:
    """What `decision` may take, by label: what its shapes, the format and the kernels allow."""
    text = plan.skeleton.text
    top_k, experts = getattr(text, "top_k_experts", None), getattr(text, "num_experts", None)
    share = top_k / experts if decision.is_experts and top_k and experts else 1.0
    refused = refusals(plan, decision, candidates)
    options = {}
    for label in decision.labels(candidates):
        if label not in refused:
            stored = unit_bytes(plan, decision.matrices, decision.scheme(label))
            # a tied head that stays costs nothing on disk: it is the embedding
            on_disk = 0 if decision.is_head and plan.skeleton.tied and label == KEEP else stored
            options[label] = Option(label, on_disk, stored * share)
    return options


def refusals(plan: Plan, decision: Decision, candidates: Sequence[str]) -> dict[str, str]:
    """Label -> why `decision` can't take it, for those that it can't."""
    found = {}
    for label in decision.labels(candidates):
        scheme = decision.scheme(label)
        if scheme is None:
            if label != KEEP:
                found[label] = "a head is served as weight-only integers, one scale a row"
            continue
        reasons = [reason for matrix in decision.matrices if (reason := why_not(plan.recipe, matrix, scheme))]
        if reasons:
            found[label] = reasons[0].removeprefix(f"recipe {plan.recipe.name}: ")
    return found


def require_useful(plan: Plan, candidates: Sequence[str]) -> None:
    """Raise UsageError, with the reason, for a candidate that nothing in the model can take."""
    decisions = [decision for decision in decisions_of(plan) if not decision.is_head]

    def useful(name: str) -> bool:
        return any(name not in refusals(plan, decision, [name]) for decision in decisions)

    for name in candidates:
        if name != KEEP and decisions and not useful(name):
            why = refusals(plan, decisions[0], candidates)[name]
            others = [other for other in candidates if other != KEEP and useful(other)]
            fitting = ",".join(other for other in SCHEMES if useful(other))
            raise UsageError(f"no unit of this model can take the candidate {name}: {why}",
                             "leave it out of --candidates" if others else f"give --candidates {fitting}")  # fmt: skip

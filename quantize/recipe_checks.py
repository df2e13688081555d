"""What of a recipe a model can't take, and what to change: every change that is advised is planned before it is said.

A refusal carries the changed recipe. `complete_advice` plans it, and where it is refused again adds that refusal's change, so that a user who
follows the whole sentence has a recipe that can be carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gemq.errors import UsageError
from gemq.quantize.architectures import EXPERT_TENSORS, LAYER_LINEARS
from gemq.quantize.skeleton import Matrix, Skeleton
from gemq.quantize.storage import storage_of
from gemq.recipes.model import MARLIN_GROUP_SIZES, PARTS, Recipe, Rule, Scheme, built_in_names

KERNEL_MULTIPLE = 32  # of rows and columns, in vLLM's kernels
_MOST_CHANGES = 8


@dataclass(frozen=True)
class Change:
    """A change of a recipe: what to type, the recipe that has it, and whether it is made in the recipe's rules (else on the command line)."""

    text: str
    recipe: Recipe
    in_rules: bool = True


class Refused(UsageError):
    """A recipe that this model can't take, with a change that removes the reason."""

    def __init__(self, message: str, change: Change) -> None:
        super().__init__(message, change.text)
        self.change = change


def complete_advice(refusal: Refused, plan: Callable[[Recipe], object]) -> UsageError:
    """`refusal` with every change that is needed until `plan` takes the recipe."""
    changes, last = [refusal.change], ""
    while len(changes) < _MOST_CHANGES:
        try:
            plan(changes[-1].recipe)
            break
        except Refused as further:
            changes.append(further.change)
        except UsageError as further:
            last = further.next_step
            break
    name = changes[0].recipe.name
    copied = [f"copy the recipe (gemq recipes show {name} > mine.yaml)"] if name in built_in_names() else []
    inside = [change.text for change in changes if change.in_rules]
    texts = [*(change.text for change in changes if not change.in_rules), *(copied if inside else []), *inside, *([last] if last else [])]
    return UsageError(refusal.message, "; ".join(dict.fromkeys(texts)))


def unit_name(matrix: Matrix) -> str:
    """The unit that `matrix` belongs to: layers.3.mlp.gate_up_proj."""
    stem = matrix.module.removeprefix("model.")
    return stem.removesuffix(matrix.kind.path) + matrix.kind.unit


def pattern_of(skeleton: Skeleton, matrices: Iterable[Matrix]) -> tuple[str, ...]:
    """Recipe patterns for the complete units of `matrices`, in every layer that these lie in: all that vLLM fuses, all experts of a layer."""
    layers, everywhere = _layers(matrices), _layers(skeleton.matrices)
    found = []
    for names, where in layers.items():
        numbers = "|".join(str(layer) for layer in sorted(layer for layer in where if layer is not None))
        found.append(f"re:.*{names}$" if where == everywhere[names] else rf"re:.*layers\.({numbers})\.{names}$")
    return tuple(found)


def _layers(matrices: Iterable[Matrix]) -> dict[str, set[int | None]]:
    """A pattern for each unit's names within a layer -> the layers that have it."""
    found: dict[str, set[int | None]] = {}
    for matrix in matrices:
        parent, _, leaf = matrix.kind.path.rpartition(".")
        leaves = [kind.path.rpartition(".")[2] for kind in LAYER_LINEARS if kind.unit == matrix.kind.unit] or [leaf]
        names = (f"{parent}\\." if parent else "") + (leaves[0] if len(leaves) == 1 else f"({'|'.join(leaves)})")
        found.setdefault(r"experts\..*" if matrix.kind in EXPERT_TENSORS else names, set()).add(matrix.layer)
    return found


def shown_match(rule: Rule) -> str:
    """What a rule matches, as YAML has it."""
    return "[" + ", ".join(entry if entry in PARTS else f"'{entry}'" for entry in rule.match) + "]"


def with_rule(recipe: Recipe, number: int, rule: Rule) -> Recipe:
    """`recipe` with `rule` in place of its rule `number`, counted from 0."""
    return recipe.model_copy(update={"rules": (*recipe.rules[:number], rule, *recipe.rules[number + 1 :])})


def keeping(skeleton: Skeleton, recipe: Recipe, matrices: Iterable[Matrix]) -> Change:
    """The change that leaves the complete units of `matrices` as they are."""
    rule = Rule(match=pattern_of(skeleton, matrices), scheme="keep")
    return Change(f"put this rule first: {{match: {shown_match(rule)}, scheme: keep}}", recipe.model_copy(update={"rules": (rule, *recipe.rules)}))


@dataclass(frozen=True)
class Chosen:
    """The rule that takes a matrix: its number, counted from 0, and its scheme, None to keep."""

    number: int
    rule: Rule

    @property
    def scheme(self) -> Scheme | None:
        return None if self.rule.scheme == "keep" else self.rule.scheme

    @property
    def label(self) -> str:
        return "as it is" if self.scheme is None else self.scheme.label()


def check_fused(skeleton: Skeleton, recipe: Recipe, chosen: Mapping[str, Chosen]) -> None:
    """Refuse schemes that differ within what vLLM reads by one: the parts of a fused module, the experts of a layer."""
    groups: dict[str, list[Matrix]] = {}
    for matrix in skeleton.matrices:
        whole = f"the experts of layer {matrix.layer}" if matrix.experts is not None else unit_name(matrix)
        groups.setdefault(whole, []).append(matrix)
    split = {whole: matrices for whole, matrices in groups.items() if len({_label(chosen, matrix) for matrix in matrices}) > 1}
    if not split:
        return
    whole, matrices = next(iter(split.items()))
    said = ", ".join(f"{matrix.module.rpartition('.')[2]} {_label(chosen, matrix)}" for matrix in matrices)
    why = "which vLLM reads by one scheme" if matrices[0].experts is not None else "which vLLM fuses"
    first: dict[int, list[Matrix]] = {}  # the rule that takes the first part -> what it should take as a whole
    for parts in split.values():
        first.setdefault(min(chosen[part.module].number for part in parts if part.module in chosen), []).extend(parts)
    number, parts = min(first.items())
    rule, added = recipe.rules[number], pattern_of(skeleton, parts)
    shown = ", ".join(f"'{entry}'" for entry in added)
    raise Refused(
        f"recipe {recipe.name} splits {whole}, {why}: {said}",
        Change(f"give all of them one scheme: add {shown} to match: {shown_match(rule)}",
               with_rule(recipe, number, rule.model_copy(update={"match": (*rule.match, *added)}))),
    )  # fmt: skip


def _label(chosen: Mapping[str, Chosen], matrix: Matrix) -> str:
    return chosen[matrix.module].label if matrix.module in chosen else "as it is"


def check_format(recipe: Recipe, chosen: Mapping[str, Chosen], matrices: Sequence[Matrix]) -> None:
    """Refuse what the recipe's checkpoint format can't express."""
    for matrix in matrices:
        scheme = chosen[matrix.module].scheme if matrix.module in chosen else None
        if scheme is not None:
            try:
                storage_of(recipe.format).require_expressible(recipe.name, matrix, scheme)
            except UsageError as error:
                raise Refused(error.message, without_format(recipe, error.next_step)) from None


def without_format(recipe: Recipe, text: str) -> Change:
    """The change to compressed-tensors."""
    return Change(text, recipe.model_copy(update={"format": "compressed-tensors"}), in_rules=False)


def check_shapes(skeleton: Skeleton, recipe: Recipe, chosen: Mapping[str, Chosen], matrices: Sequence[Matrix]) -> None:
    """Refuse schemes that vLLM has no kernel for at the matrices' shapes."""
    quantized = [(matrix, scheme) for matrix in matrices if matrix.module in chosen and (scheme := chosen[matrix.module].scheme) is not None]
    unfit = [matrix for matrix, _ in quantized if not _fits_kernels(matrix)]
    if unfit:
        if len({unit_name(matrix) for matrix in unfit}) == len({unit_name(matrix) for matrix, _ in quantized}):
            raise UsageError(f"{_unfit(unfit[0])}, and nothing that recipe {recipe.name} quantizes has such a shape",
                             "serve this model unquantized")  # fmt: skip
        for matrix in unfit:
            if (rule := chosen[matrix.module].rule).match == ("lm_head",):
                rules = tuple(other for other in recipe.rules if other != rule)
                raise Refused(_unfit(matrix), Change("leave out --lm-head, or the rule with match: [lm_head]",
                                                     recipe.model_copy(update={"rules": rules}), in_rules=False))  # fmt: skip
        raise Refused(_unfit(unfit[0]), keeping(skeleton, recipe, unfit))
    for matrix, scheme in quantized:
        problem = _group_problem(recipe, matrix, scheme)
        if problem:
            raise Refused(problem, _smaller_groups(recipe, chosen, chosen[matrix.module].number, [each for each, _ in quantized]))


def _fits_kernels(matrix: Matrix) -> bool:
    return not (matrix.in_features % KERNEL_MULTIPLE or matrix.out_features % KERNEL_MULTIPLE)


def _unfit(matrix: Matrix) -> str:
    name = matrix.tensor.removesuffix(".weight") if matrix.module != "lm_head" else "lm_head"
    return f"{name} is {matrix.out_features} x {matrix.in_features}, and vLLM's kernels take multiples of {KERNEL_MULTIPLE}"


def _group_problem(recipe: Recipe, matrix: Matrix, scheme: Scheme) -> str:
    size = scheme.weights.group_size
    if size and matrix.in_features % size:
        name = matrix.tensor.removesuffix(".weight")
        return f"recipe {recipe.name}: group_size {size} doesn't divide the {matrix.in_features} inputs of {name}"
    return ""


def _smaller_groups(recipe: Recipe, chosen: Mapping[str, Chosen], number: int, matrices: Sequence[Matrix]) -> Change:
    """The largest group size that divides the inputs of all that rule `number` quantizes; 32 always does, where the kernels' multiples hold."""
    inputs = {matrix.in_features for matrix in matrices if chosen[matrix.module].number == number}
    fitting = [size for size in sorted(MARLIN_GROUP_SIZES, reverse=True) if not any(width % size for width in inputs)]
    rule = recipe.rules[number]
    assert rule.scheme != "keep"
    weights = rule.scheme.weights.model_copy(update={"group_size": fitting[0]})
    sizes = ", ".join(map(str, fitting))
    text = f"set group_size: {fitting[0]} in the rule with match: {shown_match(rule)} (sizes that divide the inputs of all that it matches: {sizes})"
    return Change(text, with_rule(recipe, number, rule.model_copy(update={"scheme": rule.scheme.model_copy(update={"weights": weights})})))


def why_not(recipe: Recipe, matrix: Matrix, scheme: Scheme) -> str:
    """Why `matrix` can't take `scheme` in the recipe's checkpoint format, or nothing."""
    if not _fits_kernels(matrix):
        return _unfit(matrix)
    try:
        storage_of(recipe.format).require_expressible(recipe.name, matrix, scheme)
    except UsageError as error:
        return error.message
    return _group_problem(recipe, matrix, scheme)

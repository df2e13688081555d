"""Embedding tables in a recipe: what of them can be stored so that vLLM reads it, and what is refused and why.

Looked at: vLLM 0.32.0. `VocabParallelEmbedding` asks the checkpoint's quantization config for a method that can look rows up. Of
compressed-tensors it gets `CompressedTensorsEmbeddingWNA16Int` (in vLLM since pull request 44340): weight-only integers, symmetric, by group
or by row, dequantized row by row as they are looked up. Of the gptq and AWQ formats it gets none (`gptq_utils.get_linear_quant_method` knows
linears and the head), and the method has no weight that a tied head could share. Gemma 3's and Gemma 4's models in vLLM hand their
quantization config and the names `embed_tokens` and `embed_tokens_per_layer` to both tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gemq.quantize.recipe_checks import Change, Chosen, Refused, shown_match, with_rule, without_format
from gemq.recipes.model import Recipe, Rule, Scheme

if TYPE_CHECKING:
    from gemq.quantize.skeleton import Matrix, Skeleton

_INTEGERS = "scheme: {weights: {num_bits: 8, strategy: channel}}"
_INT8 = Scheme.model_validate({"weights": {"num_bits": 8, "strategy": "channel"}})


def check_table(skeleton: Skeleton, recipe: Recipe, chosen: Mapping[str, Chosen], table: Matrix) -> None:
    """Refuse what vLLM could not serve of `table`; the sentence says which version was looked at."""
    choice = chosen.get(table.module)
    if choice is None or choice.scheme is None:
        return
    name, scheme, number, rule = table.tensor.removesuffix(".weight"), choice.scheme, choice.number, choice.rule
    weights = scheme.weights

    def change(text: str, **fields: object) -> Change:
        return Change(text, with_rule(recipe, number, rule.model_copy(update=fields)))

    if recipe.format != "compressed-tensors":
        raise Refused(
            f"recipe {recipe.name} quantizes the table {name}, and of the {recipe.format} format vLLM 0.32 reads only linears and the head "
            "quantized (gptq_utils.get_linear_quant_method)",
            without_format(recipe, "leave out --format: of compressed-tensors it reads tables too"),
        )
    if weights.type != "int" or scheme.input_activations is not None:
        raise Refused(
            f"recipe {recipe.name} gives the table {name} {scheme.label()}, and vLLM 0.32 reads tables only as weight-only integers "
            "(CompressedTensorsEmbeddingWNA16Int)",
            change(f"give it int4 or int8 in the rule with match: {shown_match(rule)}: {_INTEGERS}", scheme=_INT8),
        )
    if rule.method == "gptq":
        raise Refused(
            f"recipe {recipe.name} wants the table {name} solved by gptq, and a table is looked up, not multiplied: it has no Hessian",
            change(f"give the rule with match: {shown_match(rule)} method: rtn", method="rtn"),
        )
    head = chosen.get("lm_head")
    if table.module == "model.embed_tokens" and skeleton.tied and (head is None or head.scheme is None):
        head_rule = Rule(match=("lm_head",), scheme=_INT8, method="rtn")
        raise Refused(
            f"recipe {recipe.name} quantizes {name}, to which the head is tied, and vLLM 0.32 can't tie a head to a quantized table",
            Change("quantize the head too, which unties it: --lm-head int8, or a rule for lm_head",
                   recipe.model_copy(update={"rules": (head_rule, *recipe.rules)}), in_rules=False),
        )  # fmt: skip
    fitting = [f"group_size: {size}" for size in (128, 64, 32) if table.in_features % size == 0]
    if weights.group_size and table.in_features % weights.group_size:
        problem = f"recipe {recipe.name}: group_size {weights.group_size} doesn't divide the {table.in_features} columns of {name}"
        if not fitting and table.in_features % (32 // weights.num_bits):
            raise Refused(problem, _without_table(recipe, number, rule, table))
        size = next((size for size in (128, 64, 32) if table.in_features % size == 0), None)
        fields = {"group_size": size, "strategy": "group" if size else "channel"}
        text = f"set {fitting[0] if fitting else 'strategy: channel, without group_size,'} in the rule with match: {shown_match(rule)}"
        raise Refused(problem, change(text, scheme=scheme.model_copy(update={"weights": weights.model_copy(update=fields)})))
    if table.in_features % (32 // weights.num_bits):
        raise Refused(
            f"{name} has {table.in_features} columns, and {weights.label()} packs {32 // weights.num_bits} of them into a word",
            _without_table(recipe, number, rule, table),
        )


def _without_table(recipe: Recipe, number: int, rule: Rule, table: Matrix) -> Change:
    """The change that leaves `table` as it is."""
    left = tuple(entry for entry in rule.match if entry != table.kind.part)
    rules = (*recipe.rules[:number], *([rule.model_copy(update={"match": left})] if left else []), *recipe.rules[number + 1 :])
    return Change(f"leave that table out of the recipe: take {table.kind.part} out of match: {shown_match(rule)}",
                  recipe.model_copy(update={"rules": rules}))  # fmt: skip

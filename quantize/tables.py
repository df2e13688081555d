"""Embedding tables in a recipe: what of them can be stored so that vLLM reads it, and what is refused and why.

Looked at: vLLM 0.32.0. `VocabParallelEmbedding` asks the checkpoint's quantization config for a method that can look rows up. Of
compressed-tensors it gets `CompressedTensorsEmbeddingWNA16Int` (in vLLM since pull request 44340): weight-only integers, symmetric, by group
or by row, dequantized row by row as they are looked up. Of the gptq and AWQ formats it gets none (`gptq_utils.get_linear_quant_method` knows
linears and the head), and the method has no weight that a tied head could share. Gemma 3's and Gemma 4's models in vLLM hand their
quantization config and the names `embed_tokens` and `embed_tokens_per_layer` to both tables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gemq.errors import UsageError
from gemq.recipes.model import Recipe, Rule, Scheme

if TYPE_CHECKING:
    from gemq.quantize.skeleton import Matrix, Skeleton

_INTEGERS = "scheme: {weights: {num_bits: 8, strategy: channel}}"


def check_table(skeleton: Skeleton, recipe: Recipe, rule: Rule, table: Matrix, *, head_is_quantized: bool) -> None:
    """Raise UsageError if vLLM could not serve `table` under `rule`; the sentence says which version was looked at."""
    name, scheme = table.tensor.removesuffix(".weight"), rule.scheme
    assert isinstance(scheme, Scheme)
    weights = scheme.weights
    if recipe.format != "compressed-tensors":
        raise UsageError(
            f"recipe {recipe.name} quantizes the table {name}, and of the {recipe.format} format vLLM 0.32 reads only linears and the head "
            "quantized (gptq_utils.get_linear_quant_method)",
            "leave out --format: of compressed-tensors it reads tables too",
        )
    if weights.type != "int" or scheme.input_activations is not None:
        raise UsageError(
            f"recipe {recipe.name} gives the table {name} {scheme.label()}, and vLLM 0.32 reads tables only as weight-only integers "
            "(CompressedTensorsEmbeddingWNA16Int)",
            f"give it int4 or int8: {_INTEGERS}",
        )
    if rule.method == "gptq":
        raise UsageError(
            f"recipe {recipe.name} wants the table {name} solved by gptq, and a table is looked up, not multiplied: it has no Hessian",
            "give that rule method: rtn",
        )
    if table.module == "model.embed_tokens" and skeleton.tied and not head_is_quantized:
        raise UsageError(
            f"recipe {recipe.name} quantizes {name}, to which the head is tied, and vLLM 0.32 can't tie a head to a quantized table",
            "quantize the head too, which unties it: --lm-head int8, or a rule for lm_head",
        )
    if weights.group_size and table.in_features % weights.group_size:
        fitting = [size for size in (128, 64, 32) if table.in_features % size == 0]
        raise UsageError(
            f"recipe {recipe.name}: group_size {weights.group_size} doesn't divide the {table.in_features} columns of {name}",
            f"group sizes that divide it: {', '.join(map(str, fitting))}" if fitting else "use strategy: channel for it",
        )
    if table.in_features % (32 // weights.num_bits):
        raise UsageError(
            f"{name} has {table.in_features} columns, and {weights.label()} packs {32 // weights.num_bits} of them into a word",
            "leave that table out of the recipe",
        )

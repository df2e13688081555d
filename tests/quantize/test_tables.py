"""Embedding tables: off by default, rounded row by row where a recipe names them, and refused where vLLM could not look them up."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from tests.conftest import ROOT
from tests.models.gemma4 import build
from tests.models.inputs import gemma4_inputs, random_image
from tests.models.real_configs import real_config
from tests.quantize.dequantized import dequantized_copy
from tests.quantize.small_jobs import make_job, run_job

from gemq.errors import UsageError
from gemq.eval.local import LocalCheckpoint
from gemq.quantize.loading import RowEmbedding
from gemq.quantize.plan import describe_units, make_plan, with_head
from gemq.quantize.seal import check_seal
from gemq.quantize.skeleton import load_skeleton
from gemq.quantize.verify import verify_against_source
from gemq.quantize.walk import Walk, Walker
from gemq.recipes.model import Recipe, built_in_names, load_recipe, parse_recipe
from gemq.shards import ShardReader

TINY = ROOT / "tests" / "models" / "gemma4-tiny"
TABLES = """
version: 1
name: tables
summary: int4 decoder, int8 embedding, int4 PLE table, for tests
rules:
  - match: [embedding]
    scheme: {weights: {num_bits: 8, strategy: channel}}
  - match: [ple_embedding]
    scheme: {weights: {num_bits: 4, strategy: group, group_size: 32, observer: mse}}
  - match: [lm_head]
    method: rtn
    scheme: {weights: {num_bits: 8, strategy: channel}}
  - match: [decoder, ple]
    scheme: {weights: {num_bits: 4, strategy: group, group_size: 32}}
"""
PLE_RULE = "  - match: [ple_embedding]\n    scheme: {weights: {num_bits: 4, strategy: group, group_size: 32, observer: mse}}\n"
EMBEDDING, PLE = "model.language_model.embed_tokens", "model.language_model.embed_tokens_per_layer"


def recipe(text: str = TABLES) -> Recipe:
    return parse_recipe(text, "tables.yaml")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("e4b", tmp_path_factory.mktemp("tables") / "e4b")


@pytest.fixture(scope="module")
def checkpoint(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_job(source, tmp_path_factory.mktemp("tables") / "out", recipe()).directory


def load(directory: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(directory, dtype=dtype).eval()


@pytest.mark.parametrize("name", built_in_names())
def test_no_built_in_recipe_touches_a_table(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(real_config("e4b")))
    skeleton, _ = load_skeleton(tmp_path)
    plan = make_plan(skeleton, load_recipe(name))
    assert not any(unit.is_table for unit in plan.units)
    assert {f"{EMBEDDING}.weight", f"{PLE}.weight"} <= {spec.name for spec in plan.copied}


def test_a_pattern_for_everything_does_not_mean_the_tables(source):
    skeleton, _ = load_skeleton(source)
    text = TABLES.split("rules:")[0] + "rules:\n  - match: ['re:.*']\n    scheme: {weights: {num_bits: 8, strategy: channel}}\n"
    plan = make_plan(skeleton, recipe(text))
    assert "lm_head" in plan.quantized_matrices
    assert not any(unit.is_table for unit in plan.units)


def test_the_checkpoint_holds_packed_tables_and_nothing_else_changed(source, checkpoint):
    assert check_seal(checkpoint) == []
    comparison = verify_against_source(checkpoint, source)
    assert comparison.differences == []
    assert {EMBEDDING, PLE} <= {fit.module for fit in comparison.fits}
    written = ShardReader(checkpoint)
    assert f"{EMBEDDING}.weight" not in written
    assert written.info(f"{PLE}.weight_packed").shape == (512, 8 * 32 // 8)
    assert written.info(f"{PLE}.weight_scale").shape == (512, 8)


def test_the_config_names_each_table_and_unties_the_head(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["tie_word_embeddings"] is config["text_config"]["tie_word_embeddings"] is False
    targets = {target: group["weights"] for group in config["quantization_config"]["config_groups"].values() for target in group["targets"]}
    assert targets["re:.*embed_tokens$"]["strategy"] == "channel"
    assert targets["re:.*embed_tokens_per_layer$"]["num_bits"] == 4
    assert "Linear" in targets, "tables take no part in what the body's scheme is called"


def test_calibration_sees_the_rows_that_are_stored(source, checkpoint, tmp_path):
    job = make_job(source, tmp_path / "unused", recipe())
    walk = Walk(job.plan, job.reader, job.calibration.windows[:2])
    walk._solve_head = lambda events, walker: None  # type: ignore[method-assign]
    walk.run(Walker(lambda unit: None, lambda unit, weights, hessian: weights, lambda index: None))
    written, units = ShardReader(checkpoint), job.plan.quantized_matrices
    for name, module in (("embed_tokens", EMBEDDING), ("embed_tokens_per_layer", PLE)):
        scheme = units[f"model.{name}"].scheme
        stored = job.plan.storage.from_tensors(
            {suffix: written.read(f"{module}.{suffix}") for suffix in job.plan.storage.suffixes(scheme)}, scheme
        )
        table = getattr(walk.skeleton.decoder, name)
        assert isinstance(table, RowEmbedding)
        assert torch.equal(table.rows([0, 2, 77, 511]), stored[[0, 2, 77, 511]])
        assert not torch.equal(stored, job.reader.read(f"{module}.weight").float())


def test_what_is_looked_up_is_what_the_tables_stand_for(source, checkpoint, tmp_path):
    reference, original = load(dequantized_copy(checkpoint, source, recipe(), tmp_path / "float")), load(source)
    prompts = (
        gemma4_inputs(source, "the river below the mill froze"),
        gemma4_inputs(source, "<|image|> the wheel", images=[random_image()]),
    )
    with LocalCheckpoint.open(str(checkpoint)).loaded("cpu", "float32") as local, torch.no_grad():
        table = local._model.model.language_model.embed_tokens_per_layer.weight
        assert torch.equal(table, reference.model.language_model.embed_tokens_per_layer.weight.bfloat16().float())
        for given in prompts:
            ours, theirs, unquantized = (model(**given).logits for model in (local._model, reference, original))
            assert (ours - theirs).norm() < 0.05 * (ours - unquantized).norm()


def test_the_perplexity_command_reads_quantized_tables(tmp_path, shared_data):
    from gemq.eval.ppl import evaluate_ppl

    outcome = run_job(TINY, tmp_path / "out", recipe(TABLES.replace("num_bits: 4", "num_bits: 8")))
    judged = evaluate_ppl(str(outcome.directory), shared_data / "wikitext2-test.txt", reference=str(TINY), records=2, length=256)
    assert judged.ratio.value == pytest.approx(1, abs=0.01)
    assert judged.ratio.value != 1


def test_resumed_after_the_tables_the_result_is_the_same_and_they_are_not_solved_again(source, tmp_path):
    from tests.quantize.crash_child import run_child

    path = tmp_path / "tables.yaml"
    path.write_text(TABLES)
    whole = run_child(source, tmp_path / "whole", str(path))
    killed = run_child(source, tmp_path / "out", str(path), die_at="written:layers.1.self_attn.o_proj")
    assert killed.code == -9
    assert killed.points.count("solved:the tables") == 1
    resumed = run_child(source, tmp_path / "out", str(path))
    assert resumed.seal == whole.seal
    assert "written:embed_tokens_per_layer" not in resumed.points


def test_the_plan_counts_tables_on_disk_and_not_in_what_a_token_reads(source):
    skeleton, _ = load_skeleton(source)
    with_tables, without = make_plan(skeleton, recipe()), make_plan(skeleton, recipe(TABLES.replace(PLE_RULE, "")))
    assert with_tables.bytes_per_token() == without.bytes_per_token()
    assert with_tables.bits_per_weight() == without.bits_per_weight()
    assert with_tables.checkpoint_bytes() < without.checkpoint_bytes()
    rows = {row["unit"]: row for row in describe_units(with_tables)}
    assert rows["embed_tokens_per_layer"]["modules"] == [PLE]
    assert rows["embed_tokens_per_layer"]["method"] == "rtn"


HEAD_RULE = "  - match: [lm_head]\n    method: rtn\n    scheme: {weights: {num_bits: 8, strategy: channel}}\n"
INT8 = "{weights: {num_bits: 8, strategy: channel}}\n  - match: [ple_embedding]"
FP8 = "{weights: {num_bits: 8, type: float, strategy: channel}, input_activations: {type: float}}\n  - match: [ple_embedding]"


@pytest.mark.parametrize(
    ("edit", "says", "advice"),
    [
        ((INT8, FP8), "gives the table {0} fp8 channel, fp8 inputs, and vLLM 0.32 reads tables only as weight-only integers", "int4 or int8"),
        (("[ple_embedding]\n", "[ple_embedding]\n    method: gptq\n"), "{0}_per_layer solved by gptq, and a table is looked up", "rtn"),
        ((HEAD_RULE, ""), "quantizes {0}, to which the head is tied, and vLLM 0.32 can't tie", "--lm-head int8"),
        (("summary:", "format: gptq\nsummary:"), "the table {0}, and of the gptq format vLLM 0.32 reads only", "leave out --format"),
    ],
)
def test_what_vllm_could_not_look_up_is_refused_with_the_version_and_the_reason(source, edit, says, advice):
    skeleton, _ = load_skeleton(source)
    text = TABLES.replace(*edit)
    assert text != TABLES
    with pytest.raises(UsageError, match=re.escape(says.format(EMBEDDING))) as raised:
        make_plan(skeleton, recipe(text))
    assert advice in raised.value.next_step


def test_a_group_that_does_not_divide_the_columns_is_refused(tmp_path):
    skeleton, _ = load_skeleton(build("e4b", tmp_path / "odd", hidden_size_per_layer_input=12))
    text = TABLES.replace("[decoder, ple]", "[decoder]").replace("group_size: 32, observer", "group_size: 64, observer")
    with pytest.raises(UsageError, match=r"group_size 64 doesn't divide the 96 columns of model\.language_model\.embed_tokens_per_layer") as raised:
        make_plan(skeleton, recipe(text))
    assert "32" in raised.value.next_step


def test_the_head_option_is_enough_to_untie(source):
    skeleton, _ = load_skeleton(source)
    text = TABLES.replace(HEAD_RULE, "")
    plan = make_plan(skeleton, with_head(recipe(text), "int4"))
    assert plan.quantized_matrices["lm_head"].scheme.label() == "int4 channel"
    assert plan.quantized_matrices["model.embed_tokens"].scheme.label() == "int8 channel"

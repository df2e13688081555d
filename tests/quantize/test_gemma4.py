"""Gemma 4: the whole decoder, in every shape it comes in, and nothing but the decoder."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.conftest import ROOT
from tests.models.gemma4 import build
from tests.models.inputs import chirp, gemma4_inputs, random_image
from tests.models.real_configs import real_config
from tests.models.train_gemma4 import kl_nats_per_token, nats_per_token, token_stream
from tests.models.train_gemma4 import windows as text_windows
from tests.quantize.dequantized import dequantized_copy
from tests.quantize.small_jobs import run_job, windows
from tests.quantize.test_run import walk_hidden

from gemq.calibration.sets import CalibrationSet, load_calibration
from gemq.errors import IntegrityError, UsageError
from gemq.quantize.plan import make_plan
from gemq.quantize.run import Outcome
from gemq.quantize.seal import check_seal
from gemq.quantize.skeleton import load_skeleton
from gemq.quantize.verify import verify_against_source
from gemq.recipes.model import load_recipe, parse_recipe
from gemq.shards import ShardReader

KINDS = ("e4b", "e2b", "31b", "unified", "moe")
TINY = ROOT / "tests" / "models" / "gemma4-tiny"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = build(kind, tmp_path_factory.mktemp("gemma4") / kind)
        return made[kind]

    return get


@pytest.fixture(scope="module")
def quantized(built, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """A small job on a kind, carried out once and only looked at; "tiny" is the trained model."""
    made: dict[str, Outcome] = {}

    def get(kind: str) -> Outcome:
        if kind not in made:
            made[kind] = run_job(TINY if kind == "tiny" else built(kind), tmp_path_factory.mktemp("quantized") / kind)
        return made[kind]

    return get


def load(directory: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(directory, dtype=dtype, experts_implementation="eager").eval()


@pytest.mark.parametrize("kind", KINDS)
def test_the_walks_unquantized_output_is_transformers_own_bit_for_bit(built, kind):
    found = walk_hidden(built(kind), windows(512, 6, 40) + windows(512, 3, 17, seed=3))
    text = load(built(kind)).model.language_model
    with torch.no_grad():
        for batch, hidden in found:
            assert torch.equal(text(input_ids=batch).last_hidden_state, hidden)


@pytest.mark.parametrize("kind", KINDS)
def test_every_decoder_linear_is_quantized_and_everything_else_is_byte_identical(built, quantized, kind):
    source = built(kind)
    outcome = quantized(kind)
    assert check_seal(outcome.directory) == []
    assert verify_against_source(outcome.directory, source).differences == []
    before, after = ShardReader(source), ShardReader(outcome.directory)
    skeleton, _ = load_skeleton(source)
    reached = {matrix.tensor for matrix in skeleton.matrices if matrix.module != "lm_head"}
    for name in set(before.tensors) - reached:
        assert torch.equal(before.read(name).reshape(-1).view(torch.uint8), after.read(name).reshape(-1).view(torch.uint8)), name
    added = {name for name in after.tensors if name not in before.tensors}
    assert all(name.endswith((".weight_packed", ".weight_scale", ".weight_shape")) for name in added)
    assert not reached & set(after.tensors)
    assert not any("tower" in name or "router" in name for name in added)


# linears of the published sizes: 42 x 7 usual ones less the shared layers' k and v, + 42 + 42 + 1
@pytest.mark.parametrize(
    ("name", "linears", "gigabytes_a_token"),
    [("e4b", 343, 9.29), ("e2b", None, None), ("12b", None, None), ("31b", None, None), ("26b-a4b", None, None)],
)
def test_a_plan_from_a_config_alone(name, linears, gigabytes_a_token, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(real_config(name)))
    skeleton, reader = load_skeleton(tmp_path)
    assert reader is None
    found = [matrix for matrix in skeleton.matrices if matrix.module != "lm_head"]
    layers = skeleton.text.num_hidden_layers
    shared = getattr(skeleton.text, "num_kv_shared_layers", 0) or 0
    full_layers = sum(kind == "full_attention" for kind in skeleton.text.layer_types)
    full_with_k_for_v = full_layers if getattr(skeleton.text, "attention_k_eq_v", False) else 0
    per_layer_inputs = 2 * layers + 1 if getattr(skeleton.text, "hidden_size_per_layer_input", 0) else 0
    experts = 2 * layers if getattr(skeleton.text, "enable_moe_block", False) else 0
    assert len(found) == 7 * layers - 2 * shared - full_with_k_for_v + per_layer_inputs + experts
    if linears:
        assert len(found) == linears
    recipe = load_recipe("w4a16-g32")
    plan = make_plan(skeleton, recipe)
    before, after = plan.bytes_per_token()
    if gigabytes_a_token:
        assert before / 1e9 == pytest.approx(gigabytes_a_token, abs=0.005)
    assert 0.25 * before < after < 0.6 * before
    assert 4.4 < plan.bits_per_weight() < 5


@pytest.mark.parametrize("kind", ["e4b", "moe"])
def test_a_dry_run_lists_every_units_modules_by_their_names_in_the_checkpoint(built, quantized, kind):
    from typer.testing import CliRunner

    from gemq.cli import app

    source = built(kind)
    made = CliRunner().invoke(app, ["quantize", str(source), "--recipe", "w4a16-g32", "--dry-run", "--json"])
    assert made.exit_code == 0, made.output
    units = json.loads(made.stdout)["units"]
    listed = [module for unit in units for module in unit["modules"]]
    assert len(listed) == len(set(listed))
    outcome = quantized(kind)
    packed = {name.removesuffix(".weight_packed") for name in ShardReader(outcome.directory).tensors if name.endswith("packed")}
    assert {module for unit in units if unit["method"] for module in unit["modules"]} == packed
    fused = next(unit for unit in units if unit["unit"] == "layers.0.self_attn.qkv_proj")
    assert fused["modules"] == [f"model.language_model.layers.0.self_attn.{part}_proj" for part in "qkv"]


def test_the_fast_recipe_reads_what_was_measured_of_it_on_e4b(tmp_path):
    """Published: 2.40 GB a token with g128 everywhere and an int4 head; 3.973 B weights at 4.125 bits and 0.671 B at 4 give 2.385."""
    (tmp_path / "config.json").write_text(json.dumps(real_config("e4b")))
    skeleton, _ = load_skeleton(tmp_path)
    assert make_plan(skeleton, load_recipe("w4a16-fast")).bytes_per_token()[1] / 1e9 == pytest.approx(2.385, abs=0.002)


def test_group_128_is_refused_for_the_mixture_by_the_tensors_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(real_config("26b-a4b")))
    skeleton, _ = load_skeleton(tmp_path)
    with pytest.raises(UsageError, match=r"group_size 128 doesn't divide the (704|2112) inputs of model\.language_model\.layers\.0\.") as raised:
        make_plan(skeleton, load_recipe("w4a16"))
    assert "64, 32" in raised.value.next_step


def test_a_recipe_that_gives_a_mixtures_projections_two_schemes_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(real_config("26b-a4b")))
    skeleton, _ = load_skeleton(tmp_path)
    scheme = "{weights: {num_bits: %d, strategy: group, group_size: 32}}"
    (tmp_path / "mixed.yaml").write_text(
        "version: 1\nname: mixed\nsummary: two schemes in one mixture\nmethod: rtn\nrules:\n"
        f"  - {{match: ['re:.*experts[.]down_proj$'], scheme: {scheme % 8}}}\n  - {{match: [decoder], scheme: {scheme % 4}}}\n"
    )
    with pytest.raises(UsageError, match=r"splits the experts of layer 0, which vLLM reads by one scheme: gate_up_proj int4.*, down_proj int8"):
        make_plan(skeleton, load_recipe(str(tmp_path / "mixed.yaml")))


def test_w4a16_keeps_the_ple_linears_at_8_bits(built):
    skeleton, _ = load_skeleton(built("e4b"))
    labels = Counter((unit.matrices[0].kind.part, unit.scheme.weights.num_bits) for unit in make_plan(skeleton, load_recipe("w4a16-g32")).units)
    assert labels == {("attention", 4): 16, ("mlp", 4): 16, ("ple", 8): 17}


def test_redundant_kv_is_kept_by_default_and_dropped_on_request_with_a_note(built, quantized, tmp_path):
    source = built("e4b")
    skeleton, reader = load_skeleton(source)
    redundant = skeleton.redundant_kv()
    assert len(redundant) == 12
    kept = quantized("e4b")
    assert all(torch.equal(ShardReader(kept.directory).read(name), reader.read(name)) for name in redundant)
    dropping = load_recipe("w4a16-g32").model_copy(update={"drop_redundant_kv": True})
    dropped = run_job(source, tmp_path / "dropped", dropping)
    assert json.loads((dropped.directory / "gemq.json").read_text())["dropped_tensors"] == redundant
    assert not set(redundant) & set(ShardReader(dropped.directory).tensors)
    assert verify_against_source(dropped.directory, source).differences == []


def test_resumed_in_a_layer_that_shares_kv_the_result_is_the_same(built, tmp_path):
    from tests.quantize.crash_child import run_child

    source = built("e4b")
    whole = run_child(source, tmp_path / "whole", "w4a16-g32")
    killed = run_child(source, tmp_path / "out", "w4a16-g32", die_at="written:layers.6.self_attn.o_proj")
    assert killed.code == -9
    assert run_child(source, tmp_path / "out", "w4a16-g32").seal == whole.seal


@pytest.mark.parametrize("kind", ["e4b", "moe"])
def test_the_manifest_reports_every_unit(quantized, kind):
    outcome = quantized(kind)
    reports = outcome.manifest["units"]
    assert all(0 < report.get("output_error", report.get("weight_error", 0)) < 0.5 for report in reports.values())
    if kind == "moe":
        assert sum("experts" in name for name in reports) == 16


@pytest.fixture(scope="module")
def wikitext(shared_data: Path) -> CalibrationSet:
    return load_calibration(str(shared_data / "wikitext2-valid.txt"), model_dir=TINY, samples=64, length=256, seed=0)


@pytest.fixture(scope="module")
def held_out(shared_data: Path) -> torch.Tensor:
    return text_windows(token_stream(TINY, (shared_data / "wikitext2-test.txt").read_text(encoding="utf-8")))[:48]


def judged(checkpoint: Path, recipe, rows: torch.Tensor, work: Path) -> tuple[float, float]:
    """(nats a token, KL to the source) of a checkpoint's dequantized weights."""
    model = load(dequantized_copy(checkpoint, TINY, recipe, work))
    return nats_per_token(model, rows), kl_nats_per_token(load(TINY), model, rows)


@pytest.mark.slow
def test_gptq_beats_rounding_to_nearest_by_a_third_in_kl_on_the_trained_model(wikitext, held_out, tmp_path):
    gptq = load_recipe("w4a16-g32")
    body = gptq.rules[1].scheme.model_copy(update={"weights": gptq.rules[1].scheme.weights.model_copy(update={"observer": "minmax"})})
    rtn = gptq.model_copy(update={"method": "rtn", "rules": (gptq.rules[0], gptq.rules[1].model_copy(update={"scheme": body}))})
    divergence = {}
    for name, recipe in (("gptq", gptq), ("rtn", rtn)):
        run_job(TINY, tmp_path / name, recipe, calibration=wikitext)
        divergence[name] = judged(tmp_path / name, recipe, held_out, tmp_path / f"{name}-float")[1]
    assert divergence["rtn"] > 0.01, "int4 must move this model, or the comparison means nothing"
    assert divergence["gptq"] < divergence["rtn"] * 2 / 3


@pytest.mark.slow
def test_w8a16_costs_less_than_a_thousandth_of_perplexity_on_the_trained_model(held_out, tmp_path):
    recipe = load_recipe("w8a16")
    run_job(TINY, tmp_path / "out", recipe)
    quantized = judged(tmp_path / "out", recipe, held_out, tmp_path / "float")[0]
    assert abs(quantized - nats_per_token(load(TINY), held_out)) < 1e-3


def prompts() -> dict[str, dict[str, torch.Tensor]]:
    return {
        "text": gemma4_inputs(TINY, "The first of these was built in"),
        "image": gemma4_inputs(TINY, "<|image|> In the picture", images=[random_image()]),
        "audio": gemma4_inputs(TINY, "<|audio|> The tone", audio=[chirp()]),
    }


def test_text_image_and_audio_logits_are_those_of_the_dequantized_weights_and_the_towers_outputs_are_bit_identical(quantized, tmp_path):
    recipe = load_recipe("w4a16-g32")
    outcome = quantized("tiny")
    reference = load(dequantized_copy(outcome.directory, TINY, recipe, tmp_path / "float"), torch.bfloat16)
    source, served = load(TINY, torch.bfloat16), load(outcome.directory, torch.bfloat16)
    seen: dict[int, list[torch.Tensor]] = {}
    for number, model in enumerate((source, served)):
        for tower in ("embed_vision", "embed_audio"):
            getattr(model.model, tower).register_forward_hook(lambda module, args, out, n=number: seen.setdefault(n, []).append(out))
    for kind, given in prompts().items():
        with torch.no_grad():
            implied, found, original = (model(**given).logits.float() for model in (reference, served, source))
        assert torch.isfinite(found).all()
        assert (found - implied).norm() < 0.3 * (found - original).norm(), kind
    assert len(seen[0]) == 2
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(seen[1], seen[0], strict=True))


@pytest.mark.parametrize("name", ["w4a16-g32", "fp8", "w8a8"])
def test_transformers_loads_every_format_of_gemma4(quantized, name, tmp_path):
    outcome = quantized("tiny") if name == "w4a16-g32" else run_job(TINY, tmp_path / "out", name)
    given = prompts()["image"]
    with torch.no_grad():
        found, original = (load(folder, torch.bfloat16)(**given).logits.float() for folder in (outcome.directory, TINY))
    assert (found - original).norm() < 0.4 * original.norm()


def edited_config(source: Path, copy: Path, **text) -> Path:
    shutil.copytree(source, copy)
    config = json.loads((copy / "config.json").read_text())
    config["text_config"].update(text)
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def test_a_config_whose_layer_types_and_shared_layers_disagree_is_refused(built, tmp_path):
    kinds = json.loads((built("e4b") / "config.json").read_text())["text_config"]["layer_types"]
    bad = ["sliding_attention"] * (len(kinds) - 1) + ["full_attention"]
    with pytest.raises(UsageError, match=r"layers\.7\.self_attn shares the K/V of an earlier full_attention layer"):
        load_skeleton(edited_config(built("e4b"), tmp_path / "a", layer_types=bad))
    with pytest.raises(UsageError, match="num_hidden_layers 8 and 7 layer_types"):
        load_skeleton(edited_config(built("e4b"), tmp_path / "b", layer_types=kinds[:-1]))
    with pytest.raises(UsageError, match="num_kv_shared_layers 8 of 8"):
        load_skeleton(edited_config(built("e4b"), tmp_path / "c", num_kv_shared_layers=8))


def test_a_source_that_lacks_a_towers_shard_is_refused_by_name(tmp_path):
    source = build("e4b", tmp_path / "model", max_shard_bytes=400_000)
    index = json.loads((source / "model.safetensors.index.json").read_text())
    victim = next(file for name, file in index["weight_map"].items() if "audio_tower" in name)
    (source / victim).unlink()
    with pytest.raises(IntegrityError, match=victim):
        run_job(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("kind", "victim"),
    [
        ("e4b", "model.audio_tower.layers.1.self_attn.q_proj.linear.weight"),
        ("e4b", "model.vision_tower.encoder.layers.0.mlp.down_proj.output_max"),
        ("e4b", "model.embed_vision.embedding_projection.weight"),
        ("e4b", "model.language_model.layers.5.layer_scalar"),
        ("31b", "model.vision_tower.std_scale"),
        ("moe", "model.language_model.layers.2.router.per_expert_scale"),
        ("unified", "model.vision_embedder.patch_dense.weight"),
    ],
)
def test_a_source_that_lacks_a_tensor_is_refused_by_its_name_whatever_it_is_called_on_the_hub(built, kind, victim, tmp_path):
    from safetensors.torch import load_file, save_file

    source = shutil.copytree(built(kind), tmp_path / "model")
    tensors = load_file(source / "model.safetensors")
    del tensors[victim]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    # transformers' own name of the 12B's patch embedder
    named = victim.replace("vision_embedder", "embed_vision")
    with pytest.raises(IntegrityError, match=f"the source has no tensor {named}, which its config implies"):
        load_skeleton(source)


def test_clip_bounds_may_be_missing_all_together(built, tmp_path):
    from safetensors.torch import load_file, save_file

    source = shutil.copytree(built("e4b"), tmp_path / "model")
    tensors = load_file(source / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(("_min", "_max"))}
    assert len(kept) < len(tensors)
    save_file(kept, source / "model.safetensors", metadata={"format": "pt"})
    load_skeleton(source)


def test_a_towers_tensor_of_another_shape_is_refused_by_its_name(built, tmp_path):
    from safetensors.torch import load_file, save_file

    source = shutil.copytree(built("e4b"), tmp_path / "model")
    tensors = load_file(source / "model.safetensors")
    name = "model.audio_tower.layers.1.self_attn.q_proj.linear.weight"
    tensors[name] = tensors[name][:-8].contiguous()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(IntegrityError, match=rf"{name} has the shape \[56, 64\], its config implies \[64, 64\]"):
        load_skeleton(source)


@pytest.mark.parametrize("pattern", ["re:model.vision_tower.*", "re:model.audio_tower.*", "re:.*router.*", "re:model.embed_vision.*"])
def test_a_recipe_that_reaches_into_a_tower_or_the_router_is_refused_by_the_tensors_name(built, pattern):
    skeleton, _ = load_skeleton(built("moe" if "router" in pattern else "e4b"))
    text = "version: 1\nname: mine\nsummary: for tests\nrules:\n  - match: ['{}']\n    scheme: {{weights: {{num_bits: 8, strategy: channel}}}}\n"
    with pytest.raises(UsageError, match="matches no linear") as raised:
        make_plan(skeleton, parse_recipe(text.format(pattern), "mine.yaml"))
    assert "quantizes only decoder linears" in raised.value.next_step

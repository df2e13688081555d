"""The checkpoint: what it holds, that transformers loads it, and that its logits are those of its dequantized weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.quantize.dequantized import dequantized_copy, save_unquantized
from tests.quantize.small_jobs import make_job, run_job, windows

from gemq.calibration.sets import CalibrationSet
from gemq.errors import IntegrityError, UsageError
from gemq.quantize.checkpoint import checkpoint_config
from gemq.quantize.plan import make_plan, with_head
from gemq.quantize.seal import check_seal
from gemq.quantize.skeleton import load_skeleton
from gemq.quantize.verify import verify_against_source
from gemq.quantize.walk import Walk, Walker
from gemq.recipes.model import built_in_names, load_recipe
from gemq.shards import ShardReader


def load(directory: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def logits(directory: Path, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return load(directory)(ids).logits


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name == "w4a16-tuned" else name for name in built_in_names()])
def test_a_checkpoint_verifies_and_gives_the_logits_of_its_dequantized_weights(gemma3, tmp_path, name):
    recipe = load_recipe(name)
    outcome = run_job(gemma3, tmp_path / "out", recipe)
    assert check_seal(outcome.directory) == []
    assert verify_against_source(outcome.directory, gemma3).differences == []
    ids = torch.tensor(windows(512, 2, 24, seed=9))
    found = logits(outcome.directory, ids)
    implied = logits(dequantized_copy(outcome.directory, gemma3, recipe, tmp_path / "dequantized"), ids)
    plain = logits(gemma3, ids)
    assert torch.isfinite(found).all()
    if "a8" in name or name == "fp8":  # the inputs are rounded too: near, and nearer than 4 bits would be
        assert (found - implied).norm() < 0.2 * implied.norm()
    else:
        torch.testing.assert_close(found, implied, rtol=1e-2, atol=2e-2)  # transformers dequantizes to bfloat16 scales' precision
        assert (found - implied).norm() < 0.2 * (found - plain).norm()


def test_an_untied_int4_head_is_added_beside_the_embedding(gemma3, tmp_path):
    outcome = run_job(gemma3, tmp_path / "out", with_head(load_recipe("w4a16-g32"), "int4"))
    tensors = ShardReader(outcome.directory).tensors
    assert tensors["lm_head.weight_packed"].shape == (512, 128 * 4 // 32)
    assert tensors["model.embed_tokens.weight"].nbytes == ShardReader(gemma3).tensors["model.embed_tokens.weight"].nbytes
    config = json.loads((outcome.directory / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert verify_against_source(outcome.directory, gemma3).differences == []


def test_everything_that_is_not_quantized_is_byte_identical_in_the_multimodal_class_too(gemma3_multimodal, tmp_path):
    outcome = run_job(gemma3_multimodal, tmp_path / "out")
    source, made = ShardReader(gemma3_multimodal), ShardReader(outcome.directory)
    quantized = {name.removesuffix("_packed") for name in made.tensors if name.endswith("weight_packed")}
    assert len(quantized) == 28
    assert set(source.tensors) - quantized == {name for name in made.tensors if not name.endswith(("_packed", "_scale", "_shape"))}
    for name in set(source.tensors) - quantized:
        assert torch.equal(source.read(name).view(torch.uint8), made.read(name).view(torch.uint8)), name
    names = {path.name for path in gemma3_multimodal.iterdir()} - {path.name for path in gemma3_multimodal.glob("*.safetensors*")}
    assert names <= {path.name for path in outcome.directory.iterdir()}


def test_transformers_loads_the_multimodal_checkpoint_and_its_tower_is_bit_identical(gemma3_multimodal, tmp_path):
    from transformers import AutoModelForImageTextToText

    outcome = run_job(gemma3_multimodal, tmp_path / "out")
    # transformers keeps a quantized model in bfloat16
    before = AutoModelForImageTextToText.from_pretrained(gemma3_multimodal, dtype=torch.bfloat16)
    after = AutoModelForImageTextToText.from_pretrained(outcome.directory, dtype=torch.bfloat16)
    pixels = torch.rand(1, 3, 56, 56, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    with torch.no_grad():
        features = [model.model.get_image_features(pixels) for model in (before, after)]
    assert torch.equal(*(getattr(feature, "pooler_output", feature) for feature in features))


def test_the_walks_unquantized_output_is_transformers_own_bit_for_bit(gemma3, gemma3_multimodal):
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    for source, auto in ((gemma3, AutoModelForCausalLM), (gemma3_multimodal, AutoModelForImageTextToText)):
        found = walk_hidden(source, windows(512, 6, 40) + windows(512, 3, 17, seed=3))
        model = auto.from_pretrained(source, dtype=torch.float32).eval()
        text = model.model if auto is AutoModelForCausalLM else model.model.language_model
        with torch.no_grad():
            for batch, hidden in found:
                assert torch.equal(text(input_ids=batch).last_hidden_state, hidden)


def walk_hidden(source: Path, token_windows: list[list[int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The final hidden states of a walk that stops at every unit and leaves its weights as they are, batch by batch."""
    skeleton, reader = load_skeleton(source)
    plan = make_plan(skeleton, load_recipe("w4a16-g32"))
    walk = Walk(plan, reader, token_windows)
    seen: list[torch.Tensor] = []
    walk._solve_head = lambda events, walker: seen.extend(event.hidden for event in events)  # type: ignore[method-assign]
    stops: list[str] = []

    def solve(unit, weights, hessian):
        stops.append(unit.name)
        return weights

    walk.run(Walker(lambda unit: None, solve, lambda index: None, lambda units, module, rows_of: stops.extend(unit.name for unit in units)))
    assert sorted(stops) == sorted(unit.name for unit in plan.units)
    return list(zip(walk.batches, seen, strict=True))


def test_each_unit_is_calibrated_on_the_outputs_of_what_was_quantized_before_it(gemma3, tmp_path):
    """The second layer's Hessian, from a forward through the checkpoint's own first layer."""
    job = make_job(gemma3, tmp_path / "out")
    seen = {}
    walk = Walk(job.plan, job.reader, job.calibration.windows)

    def solve(unit, weights, hessian):
        seen[unit.name] = hessian.mean(unit.name)
        return [torch.zeros_like(weight) if unit.layer == 0 else weight for weight in weights]

    walk.run(Walker(lambda unit: None, solve, lambda index: None))
    _, reader = load_skeleton(gemma3)
    state = {name: reader.read(name).float() for name in reader.tensors}
    for matrix in job.plan.quantized_matrices:
        if ".layers.0." in matrix:
            state[f"{matrix}.weight"].zero_()
    model = load(save_unquantized(gemma3, state, tmp_path / "zeroed"))
    inputs = []
    model.model.layers[1].self_attn.q_proj.register_forward_pre_hook(lambda module, args: inputs.append(args[0].reshape(-1, 128)))
    with torch.no_grad():
        for batch in walk.batches:
            model(batch)
    rows = torch.cat(inputs)
    torch.testing.assert_close(seen["layers.1.self_attn.qkv_proj"], rows.T @ rows / rows.shape[0], rtol=1e-4, atol=1e-5)


def test_gptq_moves_the_logits_less_than_rounding_to_nearest(gemma3, tmp_path):
    ids = torch.tensor(windows(512, 8, 32))
    plain = logits(gemma3, ids)
    distance = {}
    for method in ("rtn", "gptq"):
        recipe = load_recipe("w4a16-g32").model_copy(update={"method": method})
        run_job(gemma3, tmp_path / method, recipe, calibration=CalibrationSet.of(windows(512, 64, 32, seed=4), {"kind": "test"}))
        distance[method] = (logits(tmp_path / method, ids) - plain).norm().item()
    assert distance["gptq"] < 0.9 * distance["rtn"]


def test_the_manifest_says_what_was_done(gemma3, tmp_path):
    outcome = run_job(gemma3, tmp_path / "out", seed=7)
    manifest = json.loads((outcome.directory / "gemq.json").read_text())
    assert manifest["seed"] == 7
    assert set(manifest["versions"]) >= {"gemq", "torch", "transformers", "compressed-tensors"}
    assert manifest["calibration"]["sha256"] == make_job(gemma3, tmp_path / "x").calibration.sha256
    assert manifest["source"]["files"]["model.safetensors"]
    assert len(manifest["units"]) == 16
    assert all(0 < report["output_error"] < 0.5 for report in manifest["units"].values())
    assert (outcome.directory / "recipe.yaml").read_text() == load_recipe("w4a16-g32").to_yaml()


def test_the_same_job_twice_gives_the_same_seal_and_another_seed_of_windows_another(gemma3, tmp_path):
    first = run_job(gemma3, tmp_path / "a")
    assert run_job(gemma3, tmp_path / "b").seal == first.seal
    other = CalibrationSet.of(windows(512, seed=5), {"kind": "test"})
    assert run_job(gemma3, tmp_path / "c", calibration=other).seal != first.seal


def test_several_shards_and_one_hold_the_same_tensors(gemma3, tmp_path, monkeypatch):
    whole = run_job(gemma3, tmp_path / "one")
    import gemq.quantize.run as run
    from gemq.shards import ShardWriter

    monkeypatch.setattr(run, "ShardWriter", lambda directory, specs: ShardWriter(directory, specs, max_shard_bytes=150_000))
    split = run_job(gemma3, tmp_path / "many")
    files = sorted(split.directory.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    merged = {name: tensor for file in files for name, tensor in load_file(file).items()}
    single = load_file(whole.directory / "model.safetensors")
    assert merged.keys() == single.keys()
    assert all(torch.equal(merged[name].view(torch.uint8), single[name].view(torch.uint8)) for name in single)


def test_config_names_only_keys_that_compressed_tensors_reads(gemma3, gemma3_multimodal):
    from compressed_tensors.quantization import QuantizationConfig

    for source in (gemma3, gemma3_multimodal):
        skeleton, _ = load_skeleton(source)
        for name in built_in_names():
            config = checkpoint_config(make_plan(skeleton, load_recipe(name)))["quantization_config"]
            parsed = QuantizationConfig.model_validate(config)
            assert set(config) <= set(QuantizationConfig.model_fields)
            assert len(parsed.config_groups) == len(config["config_groups"])


def damaged(source: Path, copy: Path, edit) -> Path:
    import shutil

    shutil.copytree(source, copy)
    edit(copy)
    return copy


def poison(value: float):
    def edit(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        tensors["model.layers.2.mlp.up_proj.weight"][3, 5] = value
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return edit


@pytest.mark.parametrize("method", ["gptq", "rtn"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named_and_nothing_is_published(gemma3, tmp_path, method, value):
    source = damaged(gemma3, tmp_path / "source", poison(value))
    recipe = load_recipe("w4a16-g32").model_copy(update={"method": method})
    with pytest.raises(IntegrityError, match=r"model\.layers\.2\.mlp\.up_proj\.weight holds 1 of 32768 values"):
        run_job(source, tmp_path / "out", recipe)
    assert not (tmp_path / "out").exists()


def test_a_truncated_shard_is_refused_before_anything_is_written(gemma3, tmp_path):
    def cut(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])

    with pytest.raises(IntegrityError, match="not a whole safetensors file"):
        run_job(damaged(gemma3, tmp_path / "source", cut), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_missing_shard_is_named(gemma3_multimodal, tmp_path):
    victim = sorted(gemma3_multimodal.glob("*.safetensors"))[1].name
    with pytest.raises(IntegrityError, match=victim):
        run_job(damaged(gemma3_multimodal, tmp_path / "source", lambda folder: (folder / victim).unlink()), tmp_path / "out")


def test_a_missing_tensor_is_named(gemma3, tmp_path):
    def drop(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        del tensors["model.layers.1.input_layernorm.weight"]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(IntegrityError, match=r"no tensor model\.layers\.1\.input_layernorm\.weight"):
        run_job(damaged(gemma3, tmp_path / "source", drop), tmp_path / "out")


def test_an_output_that_exists_is_left_alone(gemma3, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        run_job(gemma3, tmp_path / "out")
    assert (tmp_path / "out" / "mine.txt").read_text() == "mine"


def test_a_quantized_source_is_refused(gemma3, tmp_path):
    run_job(gemma3, tmp_path / "out")
    with pytest.raises(UsageError, match="quantized already \\(compressed-tensors\\)"):
        run_job(tmp_path / "out", tmp_path / "again")

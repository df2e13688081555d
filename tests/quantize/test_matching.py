"""What gemq writes is what vLLM looks for: the rules of quantize/matching.py, by which plans are refused and checkpoints verified.

tests/serve/test_vllm_matching.py compares these rules with vLLM's own code, case by case.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.gemma3 import build_gemma3_multimodal
from tests.quantize.dequantized import dequantized_copy
from tests.quantize.loader_cases import EXPERTS, MODELS, SPOILT, Case, cases, recipe_of, spoil
from tests.quantize.small_jobs import run_job, windows
from typer.testing import CliRunner

from gemq.cli import app
from gemq.errors import GemqError, UsageError
from gemq.eval.local import LocalCheckpoint
from gemq.eval.windows import write_records
from gemq.quantize import targets
from gemq.quantize.architectures import ARCHITECTURES
from gemq.quantize.audit import audit_structure
from gemq.quantize.matching import Unreadable, is_known, schemes_in_vllm, stored_by, unmatched
from gemq.quantize.plan import make_plan, with_format
from gemq.quantize.run import Outcome
from gemq.quantize.seal import write_seal
from gemq.quantize.skeleton import Skeleton, load_skeleton
from gemq.quantize.verify import verify_against_source
from gemq.recipes.model import load_recipe

CASES = {case.name: case for case in cases()}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder, made = tmp_path_factory.mktemp("models"), {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = MODELS[name](folder / name)
        return made[name]

    return get


@pytest.fixture(scope="module")
def skeleton_of(models: Callable[[str], Path]) -> Callable[[str], Skeleton]:
    made: dict[str, Skeleton] = {}

    def get(name: str) -> Skeleton:
        if name not in made:
            made[name] = load_skeleton(models(name))[0]
        return made[name]

    return get


@pytest.fixture(scope="module")
def quantized(models, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """The checkpoint of a case, made once and only looked at."""
    made: dict[str, Outcome] = {}

    def get(name: str) -> Outcome:
        if name not in made:
            case = CASES[name]
            made[name] = run_job(models(case.model), tmp_path_factory.mktemp("quantized") / "out", case.recipe)
        return made[name]

    return get


def config_of(skeleton: Skeleton, case: Case) -> tuple[dict[str, Any], dict[str, str | None]]:
    """The config that a plan would write, and how it would store each module."""
    plan = make_plan(skeleton, case.recipe)
    return {**skeleton.config, "quantization_config": plan.storage.quantization_config(plan)}, stored_by(plan)


def exit_code(*arguments: str | Path) -> int:
    """That of a command, run in this process."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return done.exception.exit_code if isinstance(done.exception, GemqError) else done.exit_code


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_names_in_vllm_are_known_of_every_architecture(name):
    assert is_known({"architectures": [name]})


@pytest.mark.parametrize("name", CASES)
def test_every_module_is_found_in_the_scheme_that_it_is_stored_in(name, skeleton_of):
    config, stored = config_of(skeleton_of(CASES[name].model), CASES[name])
    assert unmatched(config, stored) == []
    found = schemes_in_vllm(config, stored)
    assert {module for asked in found for module in asked.modules} <= stored.keys()
    assert any(scheme is not None for scheme in found.values())


@pytest.mark.parametrize("wrong", SPOILT)
def test_what_vllm_would_not_find_is_named(wrong, skeleton_of):
    case = CASES[SPOILT[wrong][0]]
    config, stored = config_of(skeleton_of(case.model), case)
    SPOILT[wrong][1](config)
    assert unmatched(config, stored)


def test_a_name_with_dots_is_renamed_as_vllm_does_and_a_bare_one_is_not(skeleton_of):
    config, stored = config_of(skeleton_of("e4b"), CASES["e4b/full-layers-kept"])
    ignore = config["quantization_config"]["ignore"]
    kept = [entry for entry in ignore if "layers" in entry]
    config["quantization_config"]["ignore"] = [entry for entry in ignore if entry not in kept]
    assert unmatched(config, stored)
    kept_modules = [f"model.language_model.layers.3.self_attn.{part}_proj" for part in "qkvo"]
    config["quantization_config"]["ignore"] += kept_modules
    assert unmatched(config, stored) == []
    config["quantization_config"]["ignore"][-1] = "o_proj"
    assert [module for module, _ in unmatched(config, stored)] == ["model.language_model.layers.3.self_attn.o_proj"]


def test_two_schemes_found_within_one_mixture_end_vllm(skeleton_of):
    config, stored = config_of(skeleton_of("moe"), CASES["moe/experts-in-two-schemes"])
    groups = config["quantization_config"]["config_groups"]
    text = json.dumps(groups).replace("(?:gate_proj|up_proj|down_proj)", "(?:gate_proj|up_proj)", 1)
    config["quantization_config"]["config_groups"] = json.loads(text)
    found = [scheme for asked, scheme in schemes_in_vllm(config, stored).items() if asked.kind == "RoutedExperts"]
    assert any(isinstance(scheme, Unreadable) for scheme in found)


# --- the gate: nothing that would not match is begun


def test_a_plan_whose_targets_name_the_fused_experts_is_refused_before_any_work(models, skeleton_of, tmp_path, monkeypatch):
    """As gemq wrote them before: vLLM asks for `experts.0.gate_proj`."""
    monkeypatch.setattr(targets, "_EXPERTS", r"experts\.(?:gate_up_proj|down_proj)")
    with pytest.raises(UsageError, match="experts"):
        make_plan(skeleton_of("moe"), EXPERTS["experts-kept-in-some-layers"])
    (tmp_path / "recipe.yaml").write_text(EXPERTS["experts-in-two-schemes"].to_yaml())
    for more in (["--dry-run"], ["--output", tmp_path / "out", "--eval-data", "none"]):
        assert exit_code("quantize", models("moe"), "--recipe", tmp_path / "recipe.yaml", *more) == 2
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("name", ["experts-alone", "experts-kept"])
def test_a_mixture_is_not_stored_as_gptq(name, skeleton_of):
    with pytest.raises(UsageError, match="experts") as raised:
        make_plan(skeleton_of("moe"), with_format(EXPERTS[name], "gptq"))
    assert "compressed-tensors" in raised.value.next_step
    make_plan(skeleton_of("moe"), EXPERTS[name])


def test_a_tower_that_vllm_has_no_module_for_is_refused(tmp_path):
    """transformers writes such names only when it is told not to keep the layout of the Hub's files."""
    skeleton, _ = load_skeleton(build_gemma3_multimodal(tmp_path / "model"))
    with pytest.raises(UsageError, match="vision_tower") as raised:
        make_plan(skeleton, load_recipe("w4a16-g32"))
    assert "save_original_format" in raised.value.next_step


# --- verify


@pytest.mark.parametrize("name", EXPERTS)
def test_verify_takes_gemqs_own_mixtures(name, models, quantized):
    checkpoint = quantized(f"moe/{name}").directory
    structure = audit_structure(checkpoint)
    assert structure.differences == []
    assert verify_against_source(checkpoint, models("moe"), structure).differences == []
    assert exit_code("verify", checkpoint, "--source", models("moe")) == 0


@pytest.mark.parametrize("wrong", ["targets name the fused experts", "ignore names the fused experts", "a bare lm_head",
                                   "no list where keys are values (gptq)"])  # fmt: skip
def test_verify_refuses_what_vllm_would_not_find(wrong, quantized, tmp_path):
    copy = spoil(quantized(SPOILT[wrong][0]).directory, tmp_path / "copy", wrong)
    write_seal(copy)
    assert exit_code("verify", copy) == 4


# --- local evaluation


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor(windows(512, 2, 24, seed=5))).logits


def local_logits(checkpoint: Path) -> torch.Tensor:
    with LocalCheckpoint.open(str(checkpoint)).loaded("cpu", "float32") as loaded:
        return logits(loaded.causal_model)


def transformers_model(directory: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32, experts_implementation="eager").eval()


@pytest.mark.parametrize("name", ["w4a16-g32", "experts-in-two-schemes-and-kept", "experts-alone", "experts-kept", "tables", "head-int4"])
def test_a_mixtures_logits_are_those_of_the_dequantized_weights(name, models, quantized, tmp_path):
    case = CASES[f"moe/{name}"]
    checkpoint = quantized(case.name).directory
    copy = dequantized_copy(checkpoint, models("moe"), case.recipe, tmp_path / "float")
    reference = transformers_model(copy)
    table = reference.get_input_embeddings().weight
    table.data = table.data.bfloat16().float()  # a quantized table is looked up in bfloat16, and a router may turn on its last bits
    expected, found = logits(reference), local_logits(checkpoint)
    noise, moved = (found - expected).pow(2).mean(), (expected - local_logits(models("moe"))).pow(2).mean()
    assert noise < moved / 500, (noise, moved)


def _fp8(value: torch.Tensor) -> torch.Tensor:
    scale = value.abs().amax(-1, keepdim=True) / 448
    return (value / scale).to(torch.float8_e4m3fn).float() * scale


def _int8(value: torch.Tensor) -> torch.Tensor:
    scale = value.abs().amax(-1, keepdim=True) / 127.5
    return (value / scale).round().clamp(-128, 127) * scale


@pytest.mark.parametrize(("scheme", "rounded"), [("float", _fp8), ("int", _int8)])
def test_experts_inputs_are_rounded_where_their_scheme_does(scheme, rounded, models, tmp_path, monkeypatch):
    """The reference rounds the inputs of each linear that transformers' own experts compute, in other layers nothing."""
    recipe = recipe_of(("experts", f"{{weights: {{num_bits: 8, type: {scheme}, strategy: channel}}, input_activations: {{type: {scheme}}}}}"))
    checkpoint = run_job(models("moe"), tmp_path / "out", recipe).directory
    reference = transformers_model(dequantized_copy(checkpoint, models("moe"), recipe, tmp_path / "float"))
    weights_alone = logits(reference)
    linear = torch.nn.functional.linear
    experts = {parameter.data_ptr() for name, parameter in reference.named_parameters() if ".experts." in name}

    def rounding(value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        of_experts = weight.untyped_storage().data_ptr() in experts
        return linear(rounded(value) if of_experts and value.numel() else value, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", rounding)
    expected = logits(reference)
    monkeypatch.undo()
    found = local_logits(checkpoint)
    assert (expected - weights_alone).abs().max() > 1e-3
    assert (found - expected).pow(2).mean() < 0.02 * (expected - weights_alone).pow(2).mean()


@pytest.mark.parametrize("lost", ["experts.1.up_proj.weight_packed", "experts.3.", "experts.0.down_proj.weight_scale"])
def test_a_mixture_with_parts_missing_is_not_evaluated(lost, quantized, tmp_path):
    copy = shutil.copytree(quantized("moe/w4a16-g32").directory, tmp_path / "copy")
    tensors = load_file(copy / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if f"layers.2.{lost}" not in name}
    assert len(kept) < len(tensors)
    save_file(kept, copy / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "records.jsonl").write_text(json.dumps({"id": "a", "context_token_ids": [2], "target_token_ids": [20, 21, 22]}) + "\n")
    assert exit_code("eval-ppl", copy, "--data", tmp_path / "records.jsonl", "--device", "cpu") == 4


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(calibration, held-out records) of random ids."""
    folder, draw = tmp_path_factory.mktemp("texts"), random.Random(1)
    calibration = folder / "calibration.jsonl"
    calibration.write_text("".join(json.dumps({"text": " ".join(draw.choices(["the", "of", "a", "to", "in"], k=60))}) + "\n" for _ in range(16)))
    write_records(folder / "held-out.jsonl", windows(512, 8, 32, seed=9))
    return calibration, folder / "held-out.jsonl"


def test_quantize_with_its_evaluation_ends_well_on_a_mixture(models, texts, tmp_path):
    calibration, held_out = texts
    (tmp_path / "recipe.yaml").write_text(EXPERTS["experts-in-two-schemes-and-kept"].to_yaml())
    done = exit_code("quantize", models("moe"), "--recipe", tmp_path / "recipe.yaml", "--calibration", calibration, "--samples", 4, "--length", 32,
                       "--eval-data", held_out, "--device", "cpu", "--output", tmp_path / "out")  # fmt: skip
    assert done == 0
    assert exit_code("eval-kl", tmp_path / "out", "--data", held_out, "--reference", models("moe"), "--device", "cpu") == 0


@pytest.mark.slow
def test_a_search_within_a_budget_ends_well_on_a_mixture(models, texts, tmp_path):
    calibration, held_out = texts
    done = exit_code("quantize", models("moe"), "--calibration", calibration, "--samples", 4, "--length", 32, "--recipe", "w4a16-g32",
                       "--eval-data", held_out, "--kl-budget", "0.5", "--candidates", "int4-g64,int4-g32,int8", "--device", "cpu",
                       "--search-state", tmp_path / "state", "--output", tmp_path / "out", "--json")  # fmt: skip
    assert done == 0
    assert audit_structure(tmp_path / "out").differences == []
    assert exit_code("verify", tmp_path / "out", "--source", models("moe")) == 0

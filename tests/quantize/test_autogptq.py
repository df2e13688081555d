"""`--format gptq`: the same integers as compressed-tensors, in AutoGPTQ's layout; what it can't hold is refused; verify reads it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_jobs import run_job

from gemq.errors import IntegrityError, UsageError
from gemq.eval.gptq_format import read_state_dict
from gemq.quantize import autogptq, packing, run
from gemq.quantize.audit import audit_structure
from gemq.quantize.plan import make_plan, with_format, with_head
from gemq.quantize.schemes import quantization_of
from gemq.quantize.skeleton import load_skeleton
from gemq.quantize.verify import verify_against_source
from gemq.recipes.model import Recipe, Scheme, load_recipe, parse_recipe
from gemq.shards import ShardReader

MIXED = """
version: 1
name: mixed
summary: int8 attention with int4 around it, but for the first layer's down_proj
method: rtn
rules:
  - match: ['re:.*layers\\.0\\.mlp\\.down_proj']
    scheme: keep
  - match: [attention]
    scheme: {weights: {num_bits: 8, strategy: channel}}
  - match: [mlp]
    scheme: {weights: {num_bits: 4, strategy: group, group_size: 32}}
"""
# vLLM's own names for what it fuses
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}


def recipe(name: str, head: str | None = None, form: str = "gptq") -> Recipe:
    used = parse_recipe(MIXED, "mixed.yaml") if name == "mixed" else load_recipe(name)
    return with_format(used if head is None else with_head(used, head), form)


@pytest.fixture(scope="module")
def pairs(gemma3: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Recipe -> the checkpoint in compressed-tensors and in gptq."""
    torch.set_num_threads(2)  # as the tests have it: how products are split decides their last bits
    folder = tmp_path_factory.mktemp("pairs")
    made = {}
    for name, head in (("w4a16-g32", None), ("mixed", "int8")):
        both = [run_job(gemma3, folder / f"{name}-{form}", recipe(name, head, form)).directory for form in ("compressed-tensors", "gptq")]
        made[name] = (both[0], both[1])
    return made


both = pytest.mark.parametrize("name", ["w4a16-g32", "mixed"])


def config_of(checkpoint: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
    return found


@both
def test_both_formats_stand_for_the_same_weights_to_the_last_bit(pairs: dict[str, tuple[Path, Path]], gemma3: Path, name: str) -> None:
    packed, gptq = (ShardReader(path) for path in pairs[name])
    plan = make_plan(load_skeleton(gemma3)[0], recipe(name, "int8" if name == "mixed" else None))
    compared = 0
    for unit in plan.units:
        for matrix in unit.matrices:
            module = plan.skeleton.source_name(matrix.module)
            ours = {suffix: gptq.read(f"{module}.{suffix}") for suffix in autogptq.suffixes(unit.scheme)}
            theirs = {suffix: packed.read(f"{module}.{suffix}") for suffix in packing.suffixes(unit.scheme)}
            assert torch.equal(autogptq.from_tensors(ours, unit.scheme), packing.from_tensors(theirs, unit.scheme))
            compared += 1
    assert compared == len(plan.quantized_matrices)
    others = {key for key in gptq.tensors if key.rpartition(".")[2] not in autogptq.OUTPUT_AXES}
    assert others == {key for key in packed.tensors if key.rpartition(".")[2] not in ("weight_packed", "weight_scale", "weight_shape")}
    assert all(torch.equal(gptq.read(key), packed.read(key)) for key in others)


@both
def test_the_readers_of_eval_and_of_transformers_tools_see_the_same_weights(pairs: dict[str, tuple[Path, Path]], name: str) -> None:
    """eval's reader is written from the format's description alone: zero points plus one, groups by g_idx."""
    packed, gptq = pairs[name]
    state = read_state_dict(gptq, config_of(gptq)["quantization_config"])
    reader = ShardReader(packed)
    weights = [key.removesuffix(".weight_packed") for key in reader.tensors if key.endswith(".weight_packed")]
    assert weights
    for module in weights:
        bits = 32 * reader.info(f"{module}.weight_packed").shape[1] // int(reader.read(f"{module}.weight_shape")[1])
        weights_of = {"num_bits": bits, "strategy": "channel" if reader.info(f"{module}.weight_scale").shape[1] == 1 else "group"}
        size = None if weights_of["strategy"] == "channel" else 32
        scheme = Scheme.model_validate({"weights": {**weights_of, "group_size": size}})
        tensors = {suffix: reader.read(f"{module}.{suffix}") for suffix in packing.suffixes(scheme)}
        assert torch.equal(state[f"{module}.weight"], packing.from_tensors(tensors, scheme))


def test_a_word_is_what_the_format_says() -> None:
    """Worked by hand: inputs -8, -7, ... -1 of one output are the levels 0 to 7, lowest nibble first."""
    scheme = Scheme.model_validate({"weights": {"num_bits": 4, "strategy": "channel"}})
    stored = torch.arange(-8, 0, dtype=torch.int8).repeat(8, 4)
    tensors = autogptq.to_tensors(stored, torch.full((8, 1), 0.5), scheme, (8, 32))
    assert tensors["qweight"].shape == (4, 8)
    assert set(tensors["qweight"].flatten().tolist()) == {0x76543210}
    assert tensors["qzeros"].tolist() == [[0x77777777]]
    assert tensors["g_idx"].tolist() == [0] * 32
    assert tensors["scales"].dtype == torch.bfloat16
    eight = Scheme.model_validate({"weights": {"num_bits": 8, "strategy": "group", "group_size": 32}})
    tensors = autogptq.to_tensors(torch.tensor([[-128, 127, 0, 1] * 16] * 4, dtype=torch.int8), torch.ones(4, 2), eight, (4, 64))
    assert tensors["qweight"].shape == (16, 4)
    assert {word & 0xFFFFFFFF for word in tensors["qweight"].flatten().tolist()} == {0x8180FF00}
    assert {word & 0xFFFFFFFF for word in tensors["qzeros"].flatten().tolist()} == {0x7F7F7F7F}
    assert tensors["g_idx"].tolist() == [0] * 32 + [1] * 32


def test_a_matrix_written_in_pieces_of_rows_is_the_matrix_written_whole(gemma3: Path, pairs: dict[str, tuple[Path, Path]], tmp_path: Path,
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_ROWS_AT_ONCE", 5000)
    again = run_job(gemma3, tmp_path / "again", recipe("mixed", "int8"))
    assert (again.directory / "model.safetensors").read_bytes() == (pairs["mixed"][1] / "model.safetensors").read_bytes()


def test_what_was_written_is_resumed_to_the_same_bytes(gemma3: Path, pairs: dict[str, tuple[Path, Path]], tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    from gemq import atomic

    def stop(name: str) -> None:
        if name == "solved:layer 1":
            raise KeyboardInterrupt

    monkeypatch.setattr(atomic, "on_write_point", stop)
    with pytest.raises(KeyboardInterrupt):
        run_job(gemma3, tmp_path / "out", recipe("w4a16-g32"))
    monkeypatch.setattr(atomic, "on_write_point", None)
    with pytest.raises(UsageError, match="another recipe"):
        run_job(gemma3, tmp_path / "out", recipe("w4a16-g32", form="compressed-tensors"))
    outcome = run_job(gemma3, tmp_path / "out", recipe("w4a16-g32"), resume="required")
    assert (outcome.directory / "gemq.seal.json").read_bytes() == (pairs["w4a16-g32"][1] / "gemq.seal.json").read_bytes()


# --- the config, as vLLM's reader takes it


def as_vllm_reads(config: dict[str, Any], module: str) -> tuple[int, int] | None:
    """(bits, group size) that vLLM gives the module of that name of its own, None for an unquantized one: dynamic's first match decides."""
    for pattern, own in config["dynamic"].items():
        if re.match(pattern.removeprefix("-:").removeprefix("+:"), module):
            return None if pattern.startswith("-:") else (own["bits"], own["group_size"])
    if module.endswith("lm_head") and not config["lm_head"]:
        return None
    return config["bits"], config["group_size"]


def test_vllm_is_told_every_modules_scheme_by_its_own_and_by_the_fused_name(pairs: dict[str, tuple[Path, Path]]) -> None:
    config = config_of(pairs["mixed"][1])["quantization_config"]
    for layer in range(3):
        for leaf in ("q_proj", "k_proj", "v_proj", "o_proj"):
            for name in {leaf, FUSED.get(leaf, leaf)}:
                assert as_vllm_reads(config, f"model.layers.{layer}.self_attn.{name}") == (8, -1)
        for name in ("gate_proj", "up_proj", "gate_up_proj"):
            assert as_vllm_reads(config, f"model.layers.{layer}.mlp.{name}") == (4, 32)
        assert as_vllm_reads(config, f"model.layers.{layer}.mlp.down_proj") == (None if layer == 0 else (4, 32))
    assert as_vllm_reads(config, "lm_head") == (8, -1)
    assert config_of(pairs["mixed"][1])["tie_word_embeddings"] is False
    plain = config_of(pairs["w4a16-g32"][1])["quantization_config"]
    assert {key: plain[key] for key in ("quant_method", "checkpoint_format", "bits", "group_size", "sym", "desc_act", "lm_head")} == {
        "quant_method": "gptq", "checkpoint_format": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False, "lm_head": False}
    assert json.loads((pairs["w4a16-g32"][1] / "quantize_config.json").read_text()) == plain


def test_towers_are_left_out_by_name(gemma3_multimodal: Path) -> None:
    config = autogptq.quantization_config(make_plan(load_skeleton(gemma3_multimodal)[0], recipe("w4a16-g32")))
    assert as_vllm_reads(config, "vision_tower.vision_model.encoder.layers.0.self_attn.qkv_proj") is None
    assert as_vllm_reads(config, "language_model.model.layers.0.self_attn.qkv_proj") == (4, 32)
    assert as_vllm_reads(config, "language_model.lm_head") is None


@pytest.mark.parametrize(("name", "reason"), [("fp8", "no FP8"), ("w8a8", "no quantized inputs|no FP8 and no quantized inputs")])
def test_what_the_format_has_no_words_for_is_refused(gemma3: Path, name: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as caught:
        make_plan(load_skeleton(gemma3)[0], recipe(name))
    assert "compressed-tensors" in caught.value.next_step


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(UsageError, match="--format is 'awq'"):
        with_format(load_recipe("w4a16"), "awq")
    with pytest.raises(UsageError, match="format"):
        parse_recipe(MIXED + "format: awq\n", "mixed.yaml")
    assert parse_recipe(MIXED + "format: gptq\n", "mixed.yaml").format == "gptq"
    assert load_recipe("w4a16").format == "compressed-tensors"


# --- verify


@both
def test_verify_accounts_for_every_tensor(pairs: dict[str, tuple[Path, Path]], gemma3: Path, name: str) -> None:
    checkpoint = pairs[name][1]
    structure = audit_structure(checkpoint)
    assert structure.differences == []
    comparison, other = verify_against_source(checkpoint, gemma3, structure), verify_against_source(pairs[name][0], gemma3)
    assert comparison.differences == []
    assert comparison.kinds["quantized"].count == len(structure.units) == other.kinds["quantized"].count
    assert comparison.kinds["copied"] == other.kinds["copied"]
    for ours, theirs in zip(comparison.fits, other.fits, strict=True):
        assert (ours.module, ours.error, ours.shift_rms) == (theirs.module, theirs.error, theirs.shift_rms)
        assert "gptq" in ours.scheme


def edited(checkpoint: Path, copy: Path, name: str, edit: Any) -> Path:
    shutil.copytree(checkpoint, copy)
    tensors = load_file(copy / "model.safetensors")
    tensors[name] = edit(tensors[name].clone())
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


MODULE = "model.layers.1.mlp.up_proj"


def test_zero_points_and_groups_that_vllm_would_not_look_at_are_named(pairs: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    checkpoint = pairs["w4a16-g32"][1]

    def one_more(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[-1] += 1
        return tensor

    for part, what in (("qzeros", "zero point of symmetric weights"), ("g_idx", "in their order")):
        (difference,) = audit_structure(edited(checkpoint, tmp_path / part, f"{MODULE}.{part}", one_more)).differences
        assert difference.path == f"{MODULE}.{part}"
        assert what in difference.what


@pytest.mark.parametrize("edit", [lambda t: t.roll(1, 0), lambda t: t.roll(1, 1), lambda t: t ^ 0x77777777], ids=["rows", "columns", "flipped"])
def test_moved_and_changed_integers_are_named(pairs: dict[str, tuple[Path, Path]], gemma3: Path, tmp_path: Path, edit: Any) -> None:
    checkpoint = edited(pairs["w4a16-g32"][1], tmp_path / "edited", f"{MODULE}.qweight", edit)
    assert [difference.path for difference in verify_against_source(checkpoint, gemma3).differences] == [MODULE]


def test_a_scale_of_another_size_is_named(pairs: dict[str, tuple[Path, Path]], gemma3: Path, tmp_path: Path) -> None:
    checkpoint = edited(pairs["mixed"][1], tmp_path / "edited", "lm_head.scales", lambda scales: scales * 1.5)
    assert [difference.path for difference in verify_against_source(checkpoint, gemma3).differences] == ["lm_head"]


def test_missing_and_surplus_tensors_are_named(pairs: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    copy = shutil.copytree(pairs["w4a16-g32"][1], tmp_path / "copy")
    tensors = load_file(copy / "model.safetensors")
    del tensors[f"{MODULE}.g_idx"]
    tensors[f"{MODULE}.weight"] = torch.zeros(4, 4)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    assert {difference.path for difference in audit_structure(copy).differences} == {f"{MODULE}.g_idx", f"{MODULE}.weight"}


def test_a_linear_that_the_config_says_is_quantized_and_is_not_is_named(pairs: dict[str, tuple[Path, Path]], gemma3: Path,
                                                                        tmp_path: Path) -> None:
    copy = shutil.copytree(pairs["w4a16-g32"][1], tmp_path / "copy")
    tensors = load_file(copy / "model.safetensors")
    for part in autogptq.OUTPUT_AXES:
        del tensors[f"{MODULE}.{part}"]
    tensors[f"{MODULE}.weight"] = load_file(gemma3 / "model.safetensors")[f"{MODULE}.weight"]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    (difference,) = audit_structure(copy).differences
    assert difference.path == f"{MODULE}.weight"
    assert "is not quantized" in difference.what


@pytest.mark.parametrize(("key", "value", "says"), [
    ("bits", 3, "4 and 8"), ("sym", False, "symmetric"), ("desc_act", True, "desc_act"), ("group_size", 0, "group_size"),
    ("checkpoint_format", "marlin", "checkpoint_format"), ("dynamic", {"a": 1}, "dynamic"), ("dynamic", {"(": {}}, "not a regular expression"),
])
def test_a_config_that_vllm_would_not_take_is_refused(key: str, value: object, says: str) -> None:
    sound = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
    assert quantization_of({"quantization_config": sound}).schemes[0].label() == "int4 g32 gptq"
    with pytest.raises(IntegrityError, match=says):
        quantization_of({"quantization_config": {**sound, key: value}}).scheme_of("model.x_proj", is_linear=True)

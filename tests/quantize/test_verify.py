"""A checkpoint against its config, its source and an arena's rules, read by eyes that are not gemq's writer."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from sealed_checkpoint import GROUPS, TEXT, checkpoint_tensors, config, quantized, write_checkpoint, write_source, write_tensors
from typer.testing import CliRunner

from gemq.commands import verify as command
from gemq.errors import GemqError, IntegrityError, UsageError
from gemq.quantize.arena_rules import check_arena
from gemq.quantize.audit import Quantization, Scheme, audit_structure, quantization_of, read_shard, read_tensors
from gemq.quantize.seal import Difference
from gemq.quantize.stored import decode, unpack
from gemq.quantize.verify import Comparison, nearest_e4m3, verify_against_source

Tensors = dict[str, torch.Tensor]
REDUNDANT = f"{TEXT}.layers.2.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source") / "source")


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("honest") / "checkpoint")


@pytest.fixture
def tensors() -> Tensors:
    return checkpoint_tensors()


def names(differences: list[Difference]) -> list[str]:
    return [difference.path for difference in differences]


def judged(tmp_path: Path, source: Path, tensors: Tensors, **made: Any) -> Comparison:
    directory = write_checkpoint(tmp_path / "edited", tensors, **made)
    structure = audit_structure(directory)
    assert structure.differences == []
    return verify_against_source(directory, source, structure)


# --- the whole checkpoint


def test_an_honest_checkpoint_is_accounted_for_to_the_last_tensor(honest: Path, source: Path) -> None:
    structure = audit_structure(honest)
    assert structure.differences == []
    comparison = verify_against_source(honest, source, structure)
    assert comparison.differences == []
    kinds = comparison.kinds
    assert {kind: tally.count for kind, tally in kinds.items()} == {
        "quantized": 3 + 3 + 3 + 3 + 4 + 4 + 1, "copied": 4 + 4 + 3, "smoothed": 0, "added": 0, "dropped": 0, "missing": 0, "changed": 0}
    stored = sum(tensor.nbytes for tensor in structure.tensors.values())
    assert sum(tally.checkpoint_bytes for tally in kinds.values()) == stored
    # the tied embedding is the source of two tensors
    embedding = read_tensors(source)[0][f"{TEXT}.embed_tokens.weight"].nbytes
    original = sum(tensor.nbytes for tensor in read_tensors(source)[0].values())
    assert sum(tally.source_bytes for tally in kinds.values()) == original + embedding
    assert {fit.scheme for fit in comparison.fits} == {
        "int4 g32 pack-quantized", "int3 g32 pack-quantized", "int8 channel pack-quantized", "int4 channel pack-quantized",
        "float8 channel float-quantized", "int8 channel int-quantized"}
    assert max(fit.shift_rms for fit in comparison.fits) < 0.01


def test_the_source_itself_is_all_copied(source: Path) -> None:
    comparison = verify_against_source(source, source)
    assert names(comparison.differences) == ["gemq.json"]  # the source has no manifest
    assert comparison.kinds["copied"].count == len(read_tensors(source)[0])


# --- every edit of a tensor is named


def test_any_changed_copy_is_named(tmp_path: Path, source: Path, tensors: Tensors) -> None:
    name = "model.vision_tower.input_proj.weight"
    raw = tensors[name].clone().view(torch.int16)
    raw[63, 47] ^= 1
    comparison = judged(tmp_path, source, {**tensors, name: raw.view(torch.bfloat16)})
    assert names(comparison.differences) == [name]
    assert "from byte 6142 of 6144" in comparison.differences[0].what
    assert comparison.kinds["changed"].count == 1


def test_a_copy_in_another_dtype_is_named(tmp_path: Path, source: Path, tensors: Tensors) -> None:
    name = "model.vision_tower.clip_max"
    assert names(judged(tmp_path, source, {**tensors, name: tensors[name].to(torch.bfloat16)}).differences) == [name]


@pytest.mark.parametrize("suffix", ["weight_packed", "weight_scale"])
def test_two_swapped_tensors_of_one_shape_are_both_named(tmp_path: Path, source: Path, tensors: Tensors, suffix: str) -> None:
    one, other = f"{TEXT}.layers.0.self_attn.q_proj", f"{TEXT}.layers.2.self_attn.o_proj"
    swapped = {**tensors, f"{one}.{suffix}": tensors[f"{other}.{suffix}"], f"{other}.{suffix}": tensors[f"{one}.{suffix}"]}
    assert names(judged(tmp_path, source, swapped).differences) == [one, other]


def test_swapped_copies_are_both_named(tmp_path: Path, source: Path, tensors: Tensors) -> None:
    one, other = (f"{TEXT}.layers.{layer}.self_attn.k_norm.weight" for layer in (0, 1))
    assert names(judged(tmp_path, source, {**tensors, one: tensors[other], other: tensors[one]}).differences) == [one, other]


def test_every_swap_of_two_quantized_tensors_is_found(tmp_path: Path, source: Path, tensors: Tensors) -> None:
    """All pairs of one dtype and shape among weights and scales; what is compared are the two units' names."""
    candidates = [name for name in sorted(tensors)
                  if name.rpartition(".")[2] in ("weight_packed", "weight_scale") or tensors[name].element_size() == 1]
    pairs = [(one, other) for number, one in enumerate(candidates) for other in candidates[number + 1:]
             if (tensors[one].dtype, tensors[one].shape) == (tensors[other].dtype, tensors[other].shape)
             and one.rpartition(".")[2] == other.rpartition(".")[2]]  # fmt: skip
    chance = random.Random(3)
    for number, (one, other) in enumerate(chance.sample(pairs, min(40, len(pairs)))):
        swapped = {**tensors, one: tensors[other], other: tensors[one]}
        found = names(judged(tmp_path / str(number), source, swapped).differences)
        assert found == sorted({one.rpartition(".")[0], other.rpartition(".")[0]})


@pytest.mark.parametrize("factor", [2.0, 0.5, -1.0, 16.0, 1 / 16])
@pytest.mark.parametrize("module", [f"{TEXT}.layers.0.self_attn.q_proj", f"{TEXT}.layers.0.mlp.up_proj", f"{TEXT}.layers.1.mlp.down_proj",
                                    f"{TEXT}.layers.1.self_attn.v_proj", f"{TEXT}.layers.1.per_layer_input_gate", "lm_head"])  # fmt: skip
def test_one_scale_made_twice_or_half_as_large_is_named(tmp_path: Path, source: Path, tensors: Tensors, factor: float, module: str) -> None:
    scale = tensors[f"{module}.weight_scale"].clone()
    scale[5, -1] *= factor
    comparison = judged(tmp_path, source, {**tensors, f"{module}.weight_scale": scale})
    assert names(comparison.differences) == [module]
    assert "of row 5 " in comparison.differences[0].what or "rms" in comparison.differences[0].what


def test_all_scales_a_quarter_too_large_are_named(tmp_path: Path, source: Path, tensors: Tensors) -> None:
    name = f"{TEXT}.layers.0.self_attn.q_proj.weight_scale"
    assert names(judged(tmp_path, source, {**tensors, name: tensors[name] * 1.25}).differences) == [name.rpartition(".")[0]]


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_a_scale_that_is_no_scale_is_named(tmp_path: Path, source: Path, tensors: Tensors, value: float) -> None:
    scale = tensors["lm_head.weight_scale"].clone()
    scale[0, 0] = value
    comparison = judged(tmp_path, source, {**tensors, "lm_head.weight_scale": scale})
    assert [str(difference) for difference in comparison.differences] == ["lm_head: has a scale that is zero or no finite number"]


def test_a_zeroed_row_is_named(tmp_path: Path, source: Path, tensors: Tensors) -> None:
    module = f"{TEXT}.layers.0.mlp.gate_proj"
    weight = tensors[f"{module}.weight"].clone()
    weight[7] = 0
    assert names(judged(tmp_path, source, {**tensors, f"{module}.weight": weight}).differences) == [module]


def gptq_like(weight: torch.Tensor, group: dict[str, Any], inputs: torch.Tensor) -> torch.Tensor:
    """`weight` moved the way GPTQ moves it: each column's error is taken over by those after it, as the inputs' Hessian says."""
    scale = quantized(weight, group)["weight_scale"].float()
    size, half = weight.shape[1] // scale.shape[1], 2 ** (group["weights"]["num_bits"] - 1)
    hessian = inputs.T @ inputs / len(inputs)
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(weight.shape[1])
    upper = torch.linalg.cholesky(torch.linalg.inv(hessian.double()), upper=True).float()
    moved, result = weight.float().clone(), torch.zeros(weight.shape)
    for column in range(weight.shape[1]):
        step = scale[:, column // size]
        result[:, column] = (moved[:, column] / step).round().clamp(-half, half - 1)
        error = (moved[:, column] - result[:, column] * step) / upper[column, column]
        moved[:, column + 1 :] -= error[:, None] * upper[column, column + 1 :]
    return result.to(torch.int8)


@pytest.mark.parametrize("seed", range(5))
def test_gptq_on_strongly_correlated_inputs_is_not_accused(tmp_path: Path, source: Path, tensors: Tensors, seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    from sealed_checkpoint import source_tensors

    edited = dict(tensors)
    for name in ("layers.0.self_attn.q_proj", "layers.2.mlp.up_proj", "layers.0.self_attn.o_proj"):
        module = f"{TEXT}.{name}"
        group = GROUPS["three" if "mlp" in name else "attention"]
        weight = source_tensors()[f"{module}.weight"]
        inputs = torch.randn(512, 6, generator=made) @ torch.randn(6, weight.shape[1], generator=made)
        inputs += 0.3 * torch.randn(inputs.shape, generator=made)
        moved = gptq_like(weight, group, inputs)
        edited[f"{module}.weight_packed"] = pack_to_int32(moved, group["weights"]["num_bits"])
        assert not torch.equal(edited[f"{module}.weight_packed"], tensors[f"{module}.weight_packed"])
    assert judged(tmp_path, source, edited).differences == []


# --- added, missing, dropped


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("name", ["drafter.weight", f"{TEXT}.layers.0.self_attn.q_proj.bias", f"{TEXT}.layers.3.self_attn.k_norm.weight",
                                  f"{TEXT}.layers.0.self_attn.k_scale", "lm_head.bias", "model.vision_tower.head.weight"])  # fmt: skip
def test_an_added_tensor_is_named_whatever_the_manifest_declares(
    tmp_path: Path, source: Path, tensors: Tensors, name: str, declared: bool
) -> None:
    more = {**tensors, name: torch.zeros(4, 4, dtype=torch.bfloat16)}
    comparison = judged(tmp_path, source, more, manifest={"added_tensors": [name]} if declared else None)
    assert names(comparison.differences) == [name]
    assert (comparison.added, comparison.kinds["added"].checkpoint_bytes) == ([name], 32)


def with_kv_scales(tmp_path: Path, tensors: Tensors, scales: Tensors) -> tuple[Path, Any]:
    directory = write_checkpoint(tmp_path / "edited", {**tensors, **scales})
    document = json.loads((directory / "config.json").read_text())
    document["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    (directory / "config.json").unlink()
    (directory / "config.json").write_text(json.dumps(document))
    return directory, audit_structure(directory)


@pytest.mark.parametrize("made", [torch.tensor([0.25]), torch.tensor(0.25, dtype=torch.bfloat16)])
def test_scales_of_a_quantized_kv_cache_may_be_added(tmp_path: Path, source: Path, tensors: Tensors, made: torch.Tensor) -> None:
    scales = {f"{TEXT}.layers.{layer}.self_attn.{part}_scale": made for layer in range(3) for part in "kv"}
    directory, structure = with_kv_scales(tmp_path, tensors, scales)
    comparison = verify_against_source(directory, source, structure)
    assert (comparison.differences, sorted(comparison.added)) == ([], sorted(scales))


@pytest.mark.parametrize(("module", "made"), [
    ("layers.0.self_attn", torch.tensor([0.0])), ("layers.0.self_attn", torch.tensor([float("nan")])),
    ("layers.0.self_attn", torch.tensor([-1.0])), ("layers.0.self_attn", torch.ones(2)),
    ("layers.0.self_attn", torch.tensor([1], dtype=torch.int8)), ("layers.3.self_attn", torch.ones(1)), ("layers.0.mlp", torch.ones(1)),
    ("self_attn", torch.ones(1))])  # fmt: skip
def test_a_kv_scale_that_is_no_scale_or_of_no_attention_is_named(
    tmp_path: Path, source: Path, tensors: Tensors, module: str, made: torch.Tensor
) -> None:
    name = f"{TEXT}.{module}.k_scale"
    sound = {f"{TEXT}.layers.{layer}.self_attn.{part}_scale": torch.ones(1) for layer in range(3) for part in "kv"}
    directory, structure = with_kv_scales(tmp_path, tensors, {**sound, name: made})
    assert names(verify_against_source(directory, source, structure).differences) == [name]


def test_a_missing_tensor_is_named(tmp_path: Path, source: Path, tensors: Tensors) -> None:
    del tensors["model.vision_tower.clip_max"]
    comparison = judged(tmp_path, source, tensors)
    assert names(comparison.differences) == ["model.vision_tower.clip_max"]
    assert comparison.kinds["missing"].count == 1


def test_redundant_kv_is_dropped_only_if_the_manifest_says_so(tmp_path: Path, source: Path, tensors: Tensors) -> None:
    del tensors[REDUNDANT]
    assert names(judged(tmp_path / "a", source, tensors).differences) == [REDUNDANT]
    comparison = judged(tmp_path / "b", source, tensors, manifest={"dropped_tensors": [REDUNDANT]})
    assert comparison.differences == []
    assert comparison.kinds["dropped"].count == 1


@pytest.mark.parametrize("name", [f"{TEXT}.layers.1.self_attn.k_norm.weight", "model.vision_tower.clip_max", f"{TEXT}.norm.weight"])
def test_a_manifest_can_not_excuse_what_a_forward_reads(tmp_path: Path, source: Path, tensors: Tensors, name: str) -> None:
    del tensors[name]
    assert names(judged(tmp_path, source, tensors, manifest={"dropped_tensors": [name]}).differences) == [name]


def test_redundant_kv_may_be_kept_as_it_is_though_every_other_layers_is_quantized(tmp_path: Path, source: Path, tensors: Tensors) -> None:
    """No forward reads it, whatever the config's targets say of its name; another layer's may not be left unquantized."""
    for layer, sound in ((2, True), (0, False)):
        module = f"{TEXT}.layers.{layer}.self_attn.k_proj"
        kept = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[0] != module}
        directory = write_checkpoint(tmp_path / str(layer), kept | {f"{module}.weight": torch.zeros(64, 64, dtype=torch.bfloat16)})
        config = json.loads((directory / "config.json").read_text())
        group = copy.deepcopy(next(iter(config["quantization_config"]["config_groups"].values())))
        config["quantization_config"]["config_groups"]["all"] = {**group, "targets": [r"re:.*k_proj$"]}
        (directory / "config.json").write_text(json.dumps(config))
        differences = audit_structure(directory).differences
        assert (f"{module}.weight" not in names(differences)) is sound


def test_dropped_tensors_that_are_there_or_never_were_are_named(tmp_path: Path, source: Path, tensors: Tensors) -> None:
    comparison = judged(tmp_path, source, tensors, manifest={"dropped_tensors": [REDUNDANT, "x"]})
    assert names(comparison.differences) == sorted([REDUNDANT, "x"])


def test_a_head_that_the_source_does_not_tie_is_added(tmp_path: Path, tensors: Tensors) -> None:
    untied = write_source(tmp_path / "source")
    (untied / "config.json").write_text(json.dumps({"tie_word_embeddings": False, "text_config": {}}))
    added = [name for name in names(judged(tmp_path, untied, tensors).differences) if name.startswith("lm_head")]
    assert sorted(added) == [f"lm_head.{part}" for part in ("weight_packed", "weight_scale", "weight_shape")]


def test_a_head_under_another_name_is_added(tmp_path: Path, source: Path, tensors: Tensors) -> None:
    """The config's pattern would find it, and no engine loads it."""
    renamed = {name.replace("lm_head.", "model.lm_head."): tensor for name, tensor in tensors.items()}
    found = names(judged(tmp_path, source, renamed).differences)
    assert found == [f"model.lm_head.{part}" for part in ("weight_packed", "weight_scale", "weight_shape")]


def test_a_broken_source_is_an_error_of_its_own(tmp_path: Path, honest: Path) -> None:
    broken = write_source(tmp_path / "source")
    shard = sorted(broken.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(IntegrityError, match=r"source .* is not whole"):
        verify_against_source(honest, broken)
    with pytest.raises(UsageError, match="no directory"):
        verify_against_source(honest, tmp_path / "nowhere")


# --- config and tensors


Change = Callable[[dict[str, Any]], object]


def structure_differences(tmp_path: Path, tensors: Tensors, change: Change = lambda groups: None) -> list[Difference]:
    groups = copy.deepcopy(GROUPS)
    change(groups)
    return audit_structure(write_checkpoint(tmp_path / "edited", tensors, groups)).differences


@pytest.mark.parametrize(("suffix", "made"), [
    ("weight_packed", torch.zeros(64, 7, dtype=torch.int32)), ("weight_packed", torch.zeros(64, 8, dtype=torch.int64)),
    ("weight_scale", torch.ones(64, 1, dtype=torch.bfloat16)), ("weight_scale", torch.ones(64, 2, dtype=torch.int32)),
    ("weight_shape", torch.tensor([64, 96])), ("weight_shape", torch.tensor([-1, 64])), ("weight_shape", torch.tensor([64, 65])),
    ("weight_shape", torch.tensor([64, 64, 1])), ("weight_zero_point", torch.zeros(8, 2, dtype=torch.int32)),
    ("weight_g_idx", torch.zeros(64, dtype=torch.int32))])  # fmt: skip
def test_dtypes_and_shapes_are_what_the_config_implies(tmp_path: Path, tensors: Tensors, suffix: str, made: torch.Tensor) -> None:
    module = f"{TEXT}.layers.0.self_attn.q_proj"
    found = structure_differences(tmp_path, {**tensors, f"{module}.{suffix}": made})
    assert found
    assert {path.startswith(module) for path in names(found)} == {True}


@pytest.mark.parametrize("suffix", ["weight_packed", "weight_scale", "weight_shape"])
def test_a_part_of_a_unit_that_is_not_there_is_named(tmp_path: Path, tensors: Tensors, suffix: str) -> None:
    name = f"{TEXT}.layers.0.self_attn.q_proj.{suffix}"
    del tensors[name]
    assert name in names(structure_differences(tmp_path, tensors))


def test_config_and_tensors_must_agree_on_what_is_quantized(tmp_path: Path, tensors: Tensors) -> None:
    def aim_at_tower(groups: dict[str, Any]) -> None:
        groups["ple"]["targets"] = [f"{TEXT}.layers.0.self_attn.k_proj", REDUNDANT.removesuffix(".weight")]

    # the redundant one is nobody's: no forward reads it, so no server misses its scales
    found = structure_differences(tmp_path, tensors, aim_at_tower)
    assert sorted(names(found)) == sorted(
        [f"{TEXT}.layers.{layer}.per_layer_input_gate" for layer in range(3)] + [f"{TEXT}.layers.0.self_attn.k_proj.weight"]
    )


def test_a_wrong_scheme_is_found_in_the_shapes(tmp_path: Path, tensors: Tensors) -> None:
    def more_bits(groups: dict[str, Any]) -> None:
        groups["attention"]["weights"]["num_bits"] = 8

    assert f"{TEXT}.layers.0.self_attn.q_proj.weight_packed" in names(structure_differences(tmp_path, tensors, more_bits))


def scheme(*targets: str) -> Scheme:
    return Scheme("pack-quantized", 4, "int", True, "group", 32, False, targets)


def test_targets_match_by_compressed_tensors_rules() -> None:
    from compressed_tensors.utils.match import is_match, match_targets

    targets = ["a.q_proj", "re:.*k_proj", "re:a\\.[vo]_proj$", "Linear", "a"]
    ignore = ["re:.*o_proj", "b.q_proj"]
    rules = Quantization([scheme(target) for target in targets], tuple(ignore))
    for module in ("a.q_proj", "x.a.q_proj", "a.q_proj2", "b.k_proj", "a.v_proj", "xa.v_proj", "a.o_proj", "b.q_proj", "a"):
        linear = torch.nn.Linear(1, 1)
        theirs = [] if is_match(module, linear, ignore) else match_targets(module, linear, targets)
        ours = rules.scheme_of(module, is_linear=True)
        assert (ours.targets[0] if ours else None) == (theirs[0] if theirs else None), module


@pytest.mark.parametrize("stated", [
    1, {}, {"config_groups": {}}, {"quant_method": "gptq", "config_groups": {}},
    {"quant_method": "compressed-tensors", "config_groups": {"a": 1}},
    {"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["Linear"], "weights": None}}},
    {"quant_method": "compressed-tensors", "config_groups": {}, "ignore": [1]},
    *({"quant_method": "compressed-tensors", "format": form, "config_groups": {"a": {"targets": ["Linear"], "weights": weights}}}
      for form, weights in [("dense", {}), ("pack-quantized", {"num_bits": 9}), ("pack-quantized", {"num_bits": 4, "type": "float"}),
                            ("float-quantized", {"num_bits": 8, "type": "int"}), ("pack-quantized", {"strategy": "group"}),
                            ("pack-quantized", {"strategy": "group", "group_size": 0}), ("pack-quantized", {"strategy": "block"}),
                            ("pack-quantized", {"num_bits": True, "strategy": "channel"})])])  # fmt: skip
def test_a_config_that_can_not_be_understood_is_refused(stated: object) -> None:
    with pytest.raises(IntegrityError, match="quantization_config"):
        quantization_of({"quantization_config": stated})


def edit_groups(change: Change) -> Change:
    return lambda stated: [change(group) for group in stated["config_groups"].values() if group["format"] != "pack-quantized"]


@pytest.mark.parametrize("change", [
    edit_groups(lambda group: group.update(input_activations=None)),
    *(edit_groups(lambda group, values=values: group["input_activations"].update(values))  # type: ignore[misc]
      for values in ({"num_bits": 4}, {"symmetric": False}, {"strategy": "tensor"}, {"dynamic": False}, {"type": "complex"})),
    lambda stated: stated["config_groups"]["attention"].update(input_activations={"num_bits": 8, "type": "int", "dynamic": True}),
    lambda stated: stated["config_groups"]["attention"].update(output_activations={"num_bits": 8, "type": "int", "dynamic": True}),
    lambda stated: stated["config_groups"]["attention"]["weights"].update(dynamic=True),
    lambda stated: stated["config_groups"]["attention"]["weights"].update(actorder="group"),
    lambda stated: stated["config_groups"]["attention"]["weights"].update(block_structure=[2, 2]),
    lambda stated: stated.update(transform_config={"config_groups": {"u": {"type": "hadamard"}}}),
    lambda stated: stated.update(sparsity_config={"format": "sparse-24-bitmask"})])  # fmt: skip
def test_a_config_that_serves_the_same_tensors_in_another_way_is_refused(change: Change) -> None:
    """Inputs quantized otherwise or not at all, transforms, sparsity: none of it shows in a tensor's shape."""
    sound = copy.deepcopy(config(GROUPS)["quantization_config"])
    assert len(quantization_of({"quantization_config": sound}).schemes) == len(GROUPS)
    change(sound)
    with pytest.raises(IntegrityError, match="quantization_config"):
        quantization_of({"quantization_config": sound})


def test_a_pattern_that_is_no_pattern_is_refused() -> None:
    with pytest.raises(IntegrityError, match="not a regular expression"):
        Quantization([scheme("re:(")]).scheme_of("a", is_linear=True)


# --- shards


def shard_bytes(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def item(begin: int, end: int, dtype: str = "U8", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def test_a_whole_shard_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    header = {"__metadata__": {"format": "pt"}, "b": item(4, 8, "F32", [1]), "a": item(0, 4), "empty": item(4, 4)}
    path.write_bytes(shard_bytes(header, bytes(8)))
    found = [(tensor.name, tensor.shape, tensor.nbytes) for tensor in read_shard(path).values()]
    assert found == [("a", (4,), 4), ("empty", (0,), 0), ("b", (1,), 4)]


@pytest.mark.parametrize("raw", [
    b"", b"1234567", shard_bytes({}, length=2**63), shard_bytes({}, length=3), shard_bytes(b""), shard_bytes(b"[]"), shard_bytes(b" {}"),
    shard_bytes({"a": item(0, 4)}, bytes(3)), shard_bytes({"a": item(0, 4)}, bytes(5)), shard_bytes({"a": item(1, 5)}, bytes(5)),
    shard_bytes({"a": item(0, 4), "b": item(5, 6)}, bytes(6)), shard_bytes({"a": item(0, 4), "b": item(3, 6)}, bytes(6)),
    shard_bytes({"a": item(0, 4), "b": item(0, 4)}, bytes(8)), shard_bytes({"a": item(0, 4, "F32", [2])}, bytes(4)),
    shard_bytes({"a": item(4, 0, shape=[4])}, bytes(4)), shard_bytes({"a": item(0, 4, "F4")}, bytes(4)),
    shard_bytes({"a": item(0, 4, shape=[-4])}, bytes(4)),
    shard_bytes({"a": item(0, 4, shape=[4.0])}, bytes(4)), shard_bytes({"a": item(0, 1, shape=[True])}, bytes(1)),  # type: ignore[list-item]
    shard_bytes({"a": {**item(0, 4), "x": 1}}, bytes(4)), shard_bytes({"a": 1}), shard_bytes({"": item(0, 0)}),
    shard_bytes({"a\n": item(0, 0)}),
    shard_bytes({"__metadata__": {"a": 1}}), shard_bytes({"__metadata__": []}), shard_bytes(b'{"a":NaN}'), shard_bytes(b'{"\\ud800":1}'),
    shard_bytes(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
    shard_bytes(b'{"a":{"dtype":"U8","shape":[' + b"9" * 4000 + b"," + b"9" * 4000 + b'],"data_offsets":[0,0]}}'),
    shard_bytes(b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,0]}}'), shard_bytes(b'{"a":' + b"[" * 99_999),
    shard_bytes("{}".encode("utf-16"))])  # fmt: skip
def test_a_shard_that_is_not_whole_is_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(raw)
    with pytest.raises(IntegrityError):
        read_shard(tmp_path / "a.safetensors")


def edit_index(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / "model.safetensors.index.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(("change", "named"), [
    (lambda index: index["weight_map"].pop(f"{TEXT}.norm.weight"), f"{TEXT}.norm.weight"),
    (lambda index: index["weight_map"].update({"x": "model-00001-of-00004.safetensors"}), "x"),
    (lambda index: index["weight_map"].update({f"{TEXT}.norm.weight": "../x.safetensors"}), f"{TEXT}.norm.weight"),
    (lambda index: index["metadata"].update(total_size=1), "model.safetensors.index.json"),
    (lambda index: index.pop("weight_map"), "model.safetensors.index.json"),
    (lambda index: index.update(weight_map=[1]), "model.safetensors.index.json"),
    (lambda index: index["weight_map"].update({"x": 1}), "model.safetensors.index.json")])  # fmt: skip
def test_index_and_shards_agree(tmp_path: Path, source: Path, change: Callable[[dict[str, Any]], object], named: str) -> None:
    directory = write_source(tmp_path / "source")
    edit_index(directory, change)
    assert names(read_tensors(directory)[1]) == [named]


def test_a_shard_beside_the_index_and_a_tensor_in_two_shards_are_named(tmp_path: Path) -> None:
    directory = write_source(tmp_path / "source")
    write_tensors(directory, {f"{TEXT}.norm.weight": torch.zeros(64, dtype=torch.bfloat16)})
    assert f"{TEXT}.norm.weight" in names(read_tensors(directory)[1])
    (directory / "model.safetensors.index.json").unlink()
    assert "model.safetensors.index.json" in names(read_tensors(directory)[1])


# --- numbers


@pytest.mark.parametrize("bits", range(1, 9))
def test_unpacking_reverses_compressed_tensors_packing(bits: int) -> None:
    for columns in (1, 31, 32, 33, 64, 97):
        values = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (5, columns), dtype=torch.int8)
        packed = pack_to_int32(values, bits)
        assert np.array_equal(unpack(packed.numpy().tobytes(), 5, columns, bits), values.numpy())


def test_float_types_are_decoded_like_torch_does() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    np.testing.assert_array_equal(decode(codes.numpy().tobytes(), "F8_E4M3"), codes.view(torch.float8_e4m3fn).float().numpy())
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    np.testing.assert_array_equal(decode(every.numpy().tobytes(), "BF16"), every.view(torch.bfloat16).float().numpy())
    values = torch.cat([torch.linspace(-460, 460, 20_001), torch.logspace(-12, 2, 5_000)])
    ours, theirs = nearest_e4m3(values.numpy()), values.clamp(-448, 448).to(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(ours, theirs)


# --- arenas


def arena(tmp_path: Path, source: Path, tensors: Tensors, **made: Any) -> list[str]:
    directory = write_checkpoint(tmp_path / "entry", tensors, **made)
    structure = audit_structure(directory)
    return names(check_arena(directory, source, "lowbarena", structure, verify_against_source(directory, source, structure)))


def test_an_honest_checkpoint_keeps_to_the_arenas_rules(tmp_path: Path, source: Path, tensors: Tensors) -> None:
    assert arena(tmp_path, source, tensors) == []


def test_other_tensors_may_have_one_percent_of_the_bytes(tmp_path: Path, source: Path, tensors: Tensors) -> None:
    whole = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    small = {**tensors, "extra.weight": torch.zeros(whole // 101, dtype=torch.int8)}
    large = {**tensors, "extra.weight": torch.zeros(whole // 97, dtype=torch.int8)}
    assert arena(tmp_path / "small", source, small) == []
    assert arena(tmp_path / "large", source, large) == ["extra.weight"]


@pytest.mark.parametrize(("name", "content"), [
    ("extra.py", b"import os"), ("kernels.so", b""), ("modeling_small.py", b"# other code\n"), ("drafter.gguf", b""),
    ("pytorch_model.bin", b""), ("vocabulary.txt", b"GGUF123"), ("data.json", b"\x80\x04xyz"),
    ("notes", shard_bytes({"a": item(0, 4)}, bytes(4)))])  # fmt: skip
def test_code_and_weights_beyond_the_model_are_named(tmp_path: Path, source: Path, tensors: Tensors, name: str, content: bytes) -> None:
    assert arena(tmp_path, source, tensors, extra={name: content}) == [name]


def test_a_code_file_of_the_source_must_be_there(tmp_path: Path, tensors: Tensors) -> None:
    more = write_source(tmp_path / "source")
    (more / "tokenization_small.py").write_text("")
    assert arena(tmp_path, more, tensors) == ["tokenization_small.py"]


# --- the command


def run(*arguments: object) -> tuple[Any, str]:
    app = typer.Typer()
    app.callback()(lambda: None)
    command.register(app)
    result = CliRunner().invoke(app, ["verify", *map(str, arguments)])
    command.output.mode.json = False
    return result.exception, result.stdout


def test_the_command_prints_the_table_and_the_digest(honest: Path, source: Path) -> None:
    error, out = run(honest, "--source", source, "--arena", "lowbarena")
    assert error is None
    for kind in ("quantized", "copied", "added", "dropped", "missing", "changed"):
        assert kind in out
    from gemq.quantize.seal import seal_digest

    assert f"seal {seal_digest(honest)}" in out
    assert "every byte agrees" in out


def test_fast_says_that_it_read_no_content(honest: Path) -> None:
    error, out = run(honest, "--fast")
    assert error is None
    assert "no content was read" in out


def test_the_command_names_differences_and_exits_4(tmp_path: Path, source: Path, tensors: Tensors) -> None:
    scale = tensors["lm_head.weight_scale"]
    directory = write_checkpoint(tmp_path / "edited", {**tensors, "lm_head.weight_scale": scale * 2})
    (directory / "notes.txt").write_text("")
    error, out = run(directory, "--source", source, "--json")
    assert isinstance(error, IntegrityError)
    assert error.exit_code == 4
    document = json.loads(out)
    assert not document["ok"]
    assert {difference["path"] for difference in document["differences"]} == {"notes.txt", "lm_head"}
    assert document["source"]["kinds"]["quantized"]["count"] == 21


def test_a_damaged_config_does_not_hide_what_the_seal_finds(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "edited")
    (directory / "config.json").chmod(0o644)
    (directory / "config.json").write_text("{")
    error, out = run(directory, "--json")
    assert isinstance(error, IntegrityError)
    assert [difference["path"] for difference in json.loads(out)["differences"]] == ["config.json", "config.json"]


def test_what_a_download_leaves_is_told_from_damage(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "downloaded")
    (directory / ".cache" / "huggingface").mkdir(parents=True)
    (directory / ".cache" / "huggingface" / "x.lock").write_text("")
    (directory / ".gitattributes").write_text("")
    error, _ = run(directory)
    assert isinstance(error, IntegrityError)
    assert "remove .cache and .gitattributes" in error.next_step


@pytest.mark.parametrize(("arguments", "said"), [
    (["--arena", "lowbarena"], "--source"), (["--arena", "moon", "--source", "."], "lowbarena"), (["--fast", "--source", "."], "give one"),
    (["--source", "nowhere"], "unquantized")])  # fmt: skip
def test_wrong_uses_are_said(honest: Path, arguments: list[str], said: str) -> None:
    error, _ = run(honest, *arguments)
    assert isinstance(error, GemqError)
    assert error.exit_code == 2
    assert said in error.next_step


def test_the_config_of_the_builder_is_one_that_compressed_tensors_reads() -> None:
    from compressed_tensors.quantization import QuantizationConfig

    assert len(QuantizationConfig.model_validate(config(GROUPS)["quantization_config"]).config_groups) == len(GROUPS)

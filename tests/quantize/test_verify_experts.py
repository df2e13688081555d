"""A mixture's checkpoint, its experts stored one by one, against a source that has them fused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from sealed_checkpoint import read_all, write_tensors
from tests.models.gemma4 import build_gemma4_moe
from tests.quantize.small_jobs import run_job

from gemq.quantize.arena_rules import check_arena
from gemq.quantize.audit import Tensor, audit_structure, read_tensors
from gemq.quantize.pairs import expert_matrices
from gemq.quantize.verify import Comparison, verify_against_source

Tensors = dict[str, torch.Tensor]
EXPERTS = "model.language_model.layers.1.experts"
LAYERS, COUNT = 2, 4
BODY = {"w4a16-g32": "weight_packed", "w8a8": "weight", "fp8": "weight"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    types = ["sliding_attention", "full_attention"]
    return build_gemma4_moe(tmp_path_factory.mktemp("source") / "moe", num_hidden_layers=LAYERS, layer_types=types)


@pytest.fixture(scope="module", params=list(BODY))
def honest(request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A checkpoint, and the suffix of its experts' integers or floats."""
    return run_job(source, tmp_path_factory.mktemp("honest") / "checkpoint", request.param).directory, BODY[request.param]


def judged(out: Path, source: Path, honest: Path, tensors: Tensors, **manifest: Any) -> tuple[list[str], Comparison]:
    """The names of what a checkpoint of `tensors` with the config of `honest` does wrong, lowbarena's rules included."""
    out.mkdir()
    for path in honest.iterdir():
        if path.suffix != ".safetensors" and not path.name.endswith(".index.json"):
            shutil.copyfile(path, out / path.name)
    (out / "gemq.json").write_text(json.dumps(json.loads((honest / "gemq.json").read_text()) | manifest))
    write_tensors(out, tensors, 1_000_000)
    structure = audit_structure(out)
    comparison = verify_against_source(out, source, structure)
    differences = [*structure.differences, *comparison.differences, *check_arena(out, source, "lowbarena", structure, comparison)]
    return [difference.path for difference in differences], comparison


def of_expert(tensors: Tensors, expert: int) -> Tensors:
    """An expert's tensors by the rest of their names."""
    return {name.removeprefix(f"{EXPERTS}.{expert}."): tensor for name, tensor in tensors.items() if name.startswith(f"{EXPERTS}.{expert}.")}


def put(tensors: Tensors, expert: int, parts: Tensors) -> Tensors:
    return {**tensors, **{f"{EXPERTS}.{expert}.{rest}": tensor for rest, tensor in parts.items()}}


DOCUMENTS = {"gemq.json", "recipe.yaml"}


def tensors_of(found: list[str]) -> list[str]:
    """What was found but in the documents, which are of another checkpoint where a test changes what is quantized."""
    return [path for path in found if path not in DOCUMENTS]


def modules(*experts: int) -> list[str]:
    return [f"{EXPERTS}.{expert}.{leaf}" for expert in experts for leaf in ("down_proj", "gate_proj", "up_proj")]


def test_every_expert_is_a_unit_and_the_fused_tensors_are_accounted_for(source: Path, honest: tuple[Path, str]) -> None:
    directory, _ = honest
    structure = audit_structure(directory)
    assert structure.differences == []
    comparison = verify_against_source(directory, source, structure)
    assert comparison.differences == []
    kinds = comparison.kinds
    assert [kinds[kind].count for kind in ("added", "dropped", "missing", "changed")] == [0, 0, 0, 0]
    assert sum(".experts." in fit.module for fit in comparison.fits) == LAYERS * COUNT * 3
    assert sum(tally.checkpoint_bytes for tally in kinds.values()) == sum(tensor.nbytes for tensor in structure.tensors.values())
    assert sum(tally.source_bytes for tally in kinds.values()) == sum(tensor.nbytes for tensor in read_tensors(source)[0].values())
    assert check_arena(directory, source, "lowbarena", structure, comparison) == []


def test_an_expert_is_compared_with_its_own_rows(source: Path) -> None:
    """What `expert_matrices` points at are the rows that transformers' experts use: gate, then up, of expert after expert."""
    tensors, raw = read_all(source), read_tensors(source)[0]
    found = [matrix for leaf in ("gate_up_proj", "down_proj") for matrix in expert_matrices(raw[f"{EXPERTS}.{leaf}"])]
    assert sorted(matrix.name for matrix in found) == sorted(f"{module}.weight" for module in modules(*range(COUNT)))
    for matrix in found:
        expert, leaf, _ = matrix.name.removeprefix(f"{EXPERTS}.").split(".")
        half = tensors[f"{EXPERTS}.gate_up_proj"].shape[1] // 2
        wanted = {
            "gate_proj": tensors[f"{EXPERTS}.gate_up_proj"][:, :half], "up_proj": tensors[f"{EXPERTS}.gate_up_proj"][:, half:],
            "down_proj": tensors[f"{EXPERTS}.down_proj"]}[leaf][int(expert)].contiguous()  # fmt: skip
        content = matrix.file.read_bytes()[matrix.start : matrix.start + matrix.nbytes]
        assert matrix.shape == tuple(wanted.shape)
        assert content == wanted.view(torch.uint8).numpy().tobytes()


def test_a_missing_expert_is_named_with_the_tensor_that_has_it(tmp_path: Path, source: Path, honest: tuple[Path, str]) -> None:
    tensors = read_all(honest[0])
    for rest in of_expert(tensors, 3):
        del tensors[f"{EXPERTS}.3.{rest}"]
    found, comparison = judged(tmp_path / "edited", source, honest[0], tensors)
    assert found == [f"{module}.weight" for module in modules(3)]
    assert comparison.kinds["missing"].count == 3
    assert comparison.differences[1].what == f"is missing: the source has it in {EXPERTS}.gate_up_proj"


def test_the_last_of_a_layers_experts_missing_leaves_the_fused_tensors_missing(
    tmp_path: Path, source: Path, honest: tuple[Path, str]
) -> None:
    tensors = {name: tensor for name, tensor in read_all(honest[0]).items() if not name.startswith(EXPERTS)}
    found, _ = judged(tmp_path / "edited", source, honest[0], tensors)
    assert tensors_of(found) == [f"{EXPERTS}.down_proj", f"{EXPERTS}.gate_up_proj"]
    assert set(found) > DOCUMENTS, "which say that these experts are quantized"


def test_a_manifest_can_not_drop_an_expert(tmp_path: Path, source: Path, honest: tuple[Path, str]) -> None:
    tensors = read_all(honest[0])
    for rest in of_expert(tensors, 3):
        del tensors[f"{EXPERTS}.3.{rest}"]
    dropped = [f"{module}.weight" for module in modules(3)]
    found, comparison = judged(tmp_path / "edited", source, honest[0], tensors, dropped_tensors=[*dropped, f"{EXPERTS}.down_proj"])
    assert found == sorted([*dropped, f"{EXPERTS}.down_proj"])
    assert comparison.kinds["dropped"].count == 0


def test_two_swapped_experts_are_named_matrix_by_matrix(tmp_path: Path, source: Path, honest: tuple[Path, str]) -> None:
    tensors = read_all(honest[0])
    found, _ = judged(tmp_path / "edited", source, honest[0], put(put(tensors, 0, of_expert(tensors, 2)), 2, of_expert(tensors, 0)))
    assert found == modules(0, 2)


def test_an_expert_put_twice_is_named(tmp_path: Path, source: Path, honest: tuple[Path, str]) -> None:
    tensors = read_all(honest[0])
    found, _ = judged(tmp_path / "edited", source, honest[0], put(tensors, 1, of_expert(tensors, 0)))
    assert found == modules(1)


def test_gate_and_up_swapped_within_an_expert_are_named(tmp_path: Path, source: Path, honest: tuple[Path, str]) -> None:
    tensors = read_all(honest[0])
    halves = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    swapped = {f"{halves[rest.split('.')[0]]}.{rest.split('.')[1]}": tensor
               for rest, tensor in of_expert(tensors, 1).items() if "down" not in rest}  # fmt: skip
    found, _ = judged(tmp_path / "edited", source, honest[0], put(tensors, 1, swapped))
    assert found == modules(1)[1:]


@pytest.mark.parametrize("leaf", ["gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize("factor", [2.0, 4.0, -1.0])
def test_one_edited_scale_is_named(tmp_path: Path, source: Path, honest: tuple[Path, str], leaf: str, factor: float) -> None:
    tensors = read_all(honest[0])
    tensors[f"{EXPERTS}.3.{leaf}.weight_scale"][17, -1] *= factor
    found, _ = judged(tmp_path / "edited", source, honest[0], tensors)
    assert found == [f"{EXPERTS}.3.{leaf}"]


@pytest.mark.parametrize("factor", [1.25, 0.5])
def test_all_scales_of_a_matrix_edited_are_named(tmp_path: Path, source: Path, honest: tuple[Path, str], factor: float) -> None:
    tensors = read_all(honest[0])
    tensors[f"{EXPERTS}.2.up_proj.weight_scale"] *= factor
    found, _ = judged(tmp_path / "edited", source, honest[0], tensors)
    assert found == [f"{EXPERTS}.2.up_proj"]


@pytest.mark.parametrize("leaf", ["gate_proj", "up_proj", "down_proj"])
def test_a_zeroed_row_is_named(tmp_path: Path, source: Path, honest: tuple[Path, str], leaf: str) -> None:
    directory, body = honest
    tensors = read_all(directory)
    rows = tensors[f"{EXPERTS}.0.{leaf}.{body}"]
    rows[5] = -0x77777778 if body == "weight_packed" else 0  # eight zeros, each stored as 8
    found, _ = judged(tmp_path / "edited", source, directory, tensors)
    assert found == [f"{EXPERTS}.0.{leaf}"]


def test_an_expert_more_than_the_source_has_is_added(tmp_path: Path, source: Path, honest: tuple[Path, str]) -> None:
    tensors = read_all(honest[0])
    found, comparison = judged(tmp_path / "edited", source, honest[0], put(tensors, COUNT, of_expert(tensors, 0)))
    more = [f"{EXPERTS}.{COUNT}.{rest}" for rest in of_expert(tensors, 0)]
    assert sorted(comparison.added) == sorted(more)
    assert set(found) == set(more)


def test_experts_fused_and_apart_at_once_are_additions(tmp_path: Path, source: Path, honest: tuple[Path, str]) -> None:
    tensors, fused = read_all(honest[0]), f"{EXPERTS}.down_proj"
    _, comparison = judged(tmp_path / "edited", source, honest[0], {**tensors, fused: read_all(source)[fused]})
    assert sorted(comparison.added) == sorted(name for name in tensors if name.startswith(EXPERTS) and ".down_proj." in name)


def test_kept_experts_are_copies(tmp_path: Path, source: Path, honest: tuple[Path, str]) -> None:
    tensors = {name: tensor for name, tensor in read_all(honest[0]).items() if ".experts." not in name}
    fused = {name: tensor for name, tensor in read_all(source).items() if ".experts." in name}
    found, _ = judged(tmp_path / "not-ignored", source, honest[0], {**tensors, **fused})
    assert found, "vLLM would read them as quantized"
    assert all(".experts." in name for name in tensors_of(found))
    ignoring = tmp_path / "ignoring"
    shutil.copytree(honest[0], ignoring)
    config = json.loads((honest[0] / "config.json").read_text())
    config["quantization_config"]["ignore"].append(r"re:.*experts\.\d+\..*")
    (ignoring / "config.json").chmod(0o644)
    (ignoring / "config.json").write_text(json.dumps(config))
    found, comparison = judged(tmp_path / "edited", source, ignoring, {**tensors, **fused})
    assert tensors_of(found) == []
    assert not any(".experts." in fit.module for fit in comparison.fits)


@pytest.mark.parametrize(("name", "shape"), [
    ("a.experts.gate_up_proj", (4, 3, 2)), ("a.experts.down_proj", (8, 3)), ("a.mlp.down_proj", (4, 4, 2)),
    ("a.experts.down_proj", (2**40, 0, 2)), ("a.experts.down_proj.weight", (4, 4, 2))])  # fmt: skip
def test_what_is_no_fused_tensor_stays_whole(name: str, shape: tuple[int, ...]) -> None:
    assert expert_matrices(Tensor(name, "BF16", shape, Path("x"), 0, 2 * torch.Size(shape).numel())) == []

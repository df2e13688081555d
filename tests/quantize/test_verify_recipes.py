"""`verify_against_source` on what gemq's best recipes make of every architecture, and on those checkpoints with forged weights or documents."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.quantize.loader_cases import MODELS
from tests.quantize.small_jobs import run_job

from gemq.quantize.audit import read_tensors
from gemq.quantize.stored import decode, read
from gemq.quantize.verify import verify_against_source
from gemq.recipes.model import Recipe, load_recipe

Tensors = dict[str, torch.Tensor]
KINDS = ["gemma3", "e4b", "e2b", "31b", "moe-128", "unified"]
O_PROJ, DOWN = "model.language_model.layers.3.self_attn.o_proj", "model.language_model.layers.4.mlp.down_proj"


def recipe(name: str) -> Recipe:
    """A built-in recipe; its tuning is cut short."""
    built_in = load_recipe(name)
    return built_in if built_in.tuning is None else built_in.model_copy(update={"tuning": built_in.tuning.model_copy(update={"iterations": 20})})


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def source(kind: str) -> Path:
        if kind not in made:
            made[kind] = MODELS[kind](tmp_path_factory.mktemp("sources") / kind)
        return made[kind]

    return source


@pytest.fixture(scope="module")
def honest(sources: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_job(sources("e2b"), tmp_path_factory.mktemp("honest") / "checkpoint", recipe("w4a16-best")).directory


def differences(checkpoint: Path, source: Path) -> list[str]:
    return [str(difference) for difference in verify_against_source(checkpoint, source).differences]


def paths(checkpoint: Path, source: Path) -> set[str]:
    return {difference.path for difference in verify_against_source(checkpoint, source).differences}


def copied(checkpoint: Path, to: Path) -> Path:
    shutil.copytree(checkpoint, to)
    for path in to.iterdir():
        path.chmod(0o644)
    return to


@pytest.mark.parametrize("name", ["w4a16-best", pytest.param("w4a16-tuned", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_best_recipes_make_is_accepted(sources, tmp_path, kind, name):
    made = run_job(sources(kind), tmp_path / "checkpoint", recipe(name)).directory
    assert differences(made, sources(kind)) == []


def test_targets_that_go_the_whole_way_are_accepted_too(sources, tmp_path):
    best = load_recipe("w4a16-best")
    whole = best.model_copy(update={"gptq": best.gptq.model_copy(update={"asymmetric": 1.0})})
    assert differences(run_job(sources("e2b"), tmp_path / "checkpoint", whole).directory, sources("e2b")) == []


# --- forged weights under asymmetric targets


def scaled(factor: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[f"{O_PROJ}.weight_scale"][5] *= factor

    return change


def rows_swapped(tensors: Tensors) -> None:
    for suffix in ("weight_packed", "weight_scale"):
        rows = tensors[f"{O_PROJ}.{suffix}"]
        rows[[0, 1]] = rows[[1, 0]]


def layers_swapped(tensors: Tensors) -> None:
    for suffix in ("weight_packed", "weight_scale"):
        one, other = f"{DOWN}.{suffix}", f"{DOWN.replace('.4.', '.5.')}.{suffix}"
        tensors[one], tensors[other] = tensors[other], tensors[one]


@pytest.mark.parametrize(("change", "named"), [
    (scaled(2.0), {O_PROJ}), (scaled(0.5), {O_PROJ}), (rows_swapped, {O_PROJ}), (layers_swapped, {DOWN, DOWN.replace(".4.", ".5.")})],
    ids=["double", "half", "rows", "layers"])  # fmt: skip
def test_forged_weights_are_named(sources, honest, tmp_path, change, named):
    copy = copied(honest, tmp_path / "copy")
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    assert paths(copy, sources("e2b")) == named


# --- documents that say something else than is stored


def in_json(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(copy: Path) -> None:
        document = json.loads((copy / name).read_text())
        change(document)
        (copy / name).write_text(json.dumps(document))

    return edit


def in_recipe(old: str, new: str) -> Callable[[Path], None]:
    def edit(copy: Path) -> None:
        text = (copy / "recipe.yaml").read_text()
        assert old in text
        (copy / "recipe.yaml").write_text(text.replace(old, new))

    return edit


KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
QKV = "layers.0.self_attn.qkv_proj"
FORGED: dict[str, tuple[str, Callable[[Path], object]]] = {
    "another scheme": ("gemq.json", in_json("gemq.json", lambda found: found["units"][QKV].update(scheme="int8 channel"))),
    "no units": ("gemq.json", in_json("gemq.json", lambda found: found.update(units={}))),
    "units left out": ("gemq.json", in_json("gemq.json", lambda found: found.pop("units"))),
    "units in a list": ("gemq.json", in_json("gemq.json", lambda found: found.update(units=list(found["units"])))),
    "a unit without a scheme": ("gemq.json", in_json("gemq.json", lambda found: found["units"].update({QKV: {}}))),
    "one unit missing": ("gemq.json", in_json("gemq.json", lambda found: found["units"].pop(QKV))),
    "one unit too many": ("gemq.json", in_json("gemq.json", lambda found: found["units"].update(lm_head={"scheme": "int4 channel"}))),
    "another recipe's name": ("recipe.yaml", in_json("gemq.json", lambda found: found.update(recipe="w4a16"))),
    "no recipe": ("recipe.yaml", lambda copy: (copy / "recipe.yaml").unlink()),
    "a recipe that is none": ("recipe.yaml", lambda copy: (copy / "recipe.yaml").write_text("version: 1\nname: w4a16-best\n")),
    "a recipe that is no text": ("recipe.yaml", lambda copy: (copy / "recipe.yaml").write_bytes(b"\xff\xfe")),
    "a recipe of another group size": ("recipe.yaml", in_recipe("group_size: 128", "group_size: 64")),
    "a recipe of less": ("recipe.yaml", in_recipe("- decoder", "- attention")),
    "a recipe of more": ("recipe.yaml", in_recipe("- decoder", "- decoder\n  - lm_head")),
    "a recipe of another format": ("recipe.yaml", in_recipe("format: compressed-tensors", "format: gptq")),
    "a KV cache without scales": ("config.json", in_json("config.json", lambda found: found["quantization_config"].update(kv_cache_scheme=KV))),
}


@pytest.mark.parametrize("forged", FORGED)
def test_documents_that_contradict_the_tensors_are_named(sources, honest, tmp_path, forged):
    named, edit = FORGED[forged]
    copy = copied(honest, tmp_path / "copy")
    edit(copy)
    assert paths(copy, sources("e2b")) == {named}


def test_one_missing_scale_of_a_kv_cache_is_named(sources, honest, tmp_path):
    copy = copied(honest, tmp_path / "copy")
    in_json("config.json", lambda found: found["quantization_config"].update(kv_cache_scheme=KV))(copy)
    tensors = load_file(copy / "model.safetensors")
    attentions = {name.removesuffix("k_proj.weight_packed") for name in tensors if name.endswith("self_attn.k_proj.weight_packed")}
    tensors.update({f"{name}{part}_scale": torch.ones(1) for name in attentions for part in "kv"})
    missing = "model.language_model.layers.0.self_attn.v_scale"
    for absent, wrong in ((None, set()), (missing, {missing})):
        kept = {name: tensor for name, tensor in tensors.items() if name != absent}
        save_file(kept, copy / "model.safetensors", metadata={"format": "pt"})
        assert paths(copy, sources("e2b")) == wrong


def test_a_file_that_was_written_again_to_its_path_is_read_again(tmp_path):
    """In one thread, whose last file stays open."""
    path, seen = tmp_path / "model.safetensors", []
    for value in (1.0, 2.0):
        path.unlink(missing_ok=True)
        save_file({"x": torch.full((4,), value)}, path)
        tensor = read_tensors(tmp_path)[0]["x"]
        seen.append(decode(read(tensor, 0, tensor.nbytes), tensor.dtype).tolist())
    assert seen == [[1.0] * 4, [2.0] * 4]

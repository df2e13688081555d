"""A model of vLLM's loader: for every architecture and kind of recipe, each of vLLM's modules finds the scheme and the tensors that gemq wrote.

vLLM's own classes, config parsing, name mapping and loaders run, in one process, on a CPU and without a server; gemq's own rules for what
vLLM would do (quantize/matching.py), by which it refuses what would not match, are compared with them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.models.gemma3 import build_gemma3_multimodal
from tests.quantize.loader_cases import MODELS, SPOILT, Case, cases, spoil
from tests.quantize.small_jobs import run_job

from gemq.quantize.audit import audit_structure
from gemq.quantize.matching import Unreadable, asked_modules, schemes_in_vllm, stored_by
from gemq.quantize.plan import make_plan
from gemq.quantize.skeleton import Skeleton, load_skeleton
from gemq.serve import vllm_cpu_mends

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]
SCRIPT = Path(__file__).with_name("vllm_loader.py")
CASES = {case.name: case for case in cases()}
UNLOADED = "gemma3 with the tower's names in transformers 5"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every case's checkpoint, quantized by gemq, and the spoilt ones."""
    folder = tmp_path_factory.mktemp("loader")
    made = {}
    models = {name: build(folder / name) for name, build in MODELS.items()}
    for number, case in enumerate(CASES.values()):
        made[case.name] = run_job(models[case.model], folder / f"made-{number}", case.recipe).directory
    for number, wrong in enumerate(SPOILT):
        made[wrong] = spoil(made[SPOILT[wrong][0]], folder / f"spoilt-{number}", wrong)
    made[UNLOADED] = build_gemma3_multimodal(folder / "unquantized")
    return made


@pytest.fixture(scope="module")
def skeletons(checkpoints: dict[str, Path]) -> dict[str, Skeleton]:
    folder = checkpoints[next(iter(CASES))].parent
    return {name: load_skeleton(folder / name)[0] for name in MODELS}


@pytest.fixture(scope="module")
def verdicts(checkpoints: dict[str, Path], vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What vLLM makes of each checkpoint (see vllm_loader.py)."""
    folder = tmp_path_factory.mktemp("verdicts")
    shutil.copy(vllm_cpu_mends.__file__, folder / "_gemq_mends.py")
    (folder / "cases.json").write_text(json.dumps({name: str(path) for name, path in checkpoints.items()}))
    environment = {"PYTHONPATH": str(folder), "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_INT4_W4A8": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
                   "HF_HUB_OFFLINE": "1"}  # fmt: skip
    done = subprocess.run([str(vllm_python), str(SCRIPT), str(folder / "cases.json"), str(folder / "out.json")],
                          env={**os.environ, **environment}, capture_output=True, text=True, timeout=1400)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    assert found.keys() == checkpoints.keys()
    return found


def planned(case: Case, skeletons: dict[str, Skeleton]) -> dict[str, str | None]:
    return stored_by(make_plan(skeletons[case.model], case.recipe))


def in_vllm(verdict: dict[str, Any]) -> dict[str, str | None]:
    """vLLM's name of a module -> the label of the scheme that it found."""
    return {name.removesuffix(".routed_experts"): module["scheme"] for name, module in verdict["modules"].items()}


def config_of(checkpoint: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
    return found


@pytest.mark.parametrize("name", CASES)
def test_every_module_finds_its_scheme_and_its_tensors(name: str, checkpoints, skeletons, verdicts) -> None:
    case, verdict = CASES[name], verdicts[name]
    assert verdict["error"] == ""
    assert verdict["unloaded"] == [], "parameters that no tensor of the checkpoint filled"
    redundant = [tensor.rpartition(".layers.")[2] for tensor in skeletons[case.model].redundant_kv()]
    without_use = [tensor for tensor in verdict["dropped"] if case.recipe.format != "gptq" or not tensor.endswith(".g_idx")]
    assert [tensor for tensor in without_use if tensor.rpartition("layers.")[2] not in redundant] == []
    found, stored = in_vllm(verdict), planned(case, skeletons)
    wanted = {}
    for asked in asked_modules(config_of(checkpoints[name]), stored):
        (wanted[asked.name],) = {stored[module] for module in asked.modules}
    assert {module: label for module, label in found.items() if label != wanted.get(module)} == {}
    assert {module for module, label in wanted.items() if label is not None} <= found.keys()
    assert any(found.values())


@pytest.mark.parametrize("name", CASES)
def test_gemqs_own_rules_give_what_vllm_gives(name: str, checkpoints, skeletons, verdicts) -> None:
    found = in_vllm(verdicts[name])
    ours = {}
    for asked, scheme in schemes_in_vllm(config_of(checkpoints[name]), planned(CASES[name], skeletons)).items():
        assert not isinstance(scheme, Unreadable)
        ours[asked.name] = scheme.label() if scheme else None
    assert {module: ours.get(module) for module in found} == found
    assert audit_structure(checkpoints[name]).differences == []


@pytest.mark.parametrize("wrong", SPOILT)
def test_a_wrong_config_is_noticed_by_vllm_and_by_gemq(wrong: str, checkpoints, skeletons, verdicts) -> None:
    case, verdict = CASES[SPOILT[wrong][0]], verdicts[wrong]
    stored = planned(case, skeletons)
    in_ours = schemes_in_vllm(config_of(checkpoints[wrong]), stored)
    ours = {asked.name: str(scheme) if isinstance(scheme, Unreadable) else scheme and scheme.label() for asked, scheme in in_ours.items()}
    differ = {asked.name for asked in in_ours if any(stored[module] != ours[asked.name] for module in asked.modules)}
    assert differ, "gemq finds nothing wrong"
    assert verdict["error"] or verdict["unloaded"] or {name for name, label in in_vllm(verdict).items() if name in differ and label == ours[name]}
    assert audit_structure(checkpoints[wrong]).differences


def test_what_gemq_refuses_as_not_loaded_is_not_loaded(verdicts) -> None:
    assert "vision_tower.embeddings" in verdicts[UNLOADED]["error"]

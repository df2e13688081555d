"""The packaged pair on the real vLLM: two starts, one by serve.py and one by launch.sh, with a small Gemma 4 of three towers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_vllm import GemqServe, alive, wait_until

from gemq.quantize.seal import write_seal
from gemq.serve import server as room
from gemq.serve.contract import Endpoint, check
from gemq.serve.probes import picture, tone
from gemq.serve.server import free_port
from gemq.serve.watchdog import descendants

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]
START_SECONDS = 900
SETTINGS = {"MAX_MODEL_LEN": "1024", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "2"}
PROMPT = [2, 20, 30, 40, 50, 60, 70, 80]
RECIPE = """
version: 1
name: int4-int8
summary: int4 g32 for the decoder and int8 for the PLE linears, rounded to nearest
method: rtn
rules:
  - match: [ple]
    scheme: {weights: {num_bits: 8, strategy: channel}}
  - match: [decoder]
    scheme: {weights: {num_bits: 4, strategy: group, group_size: 32}}
"""


@dataclass
class Served:
    """A running `gemq serve` and what it printed."""

    command: GemqServe
    url: str
    model: str
    pid: int

    def post(self, path: str, **body: object) -> httpx.Response:
        return httpx.post(f"{self.url}/{path}", json={"model": self.model, **body}, timeout=300)

    def processes(self) -> list[int]:
        return [self.pid, *descendants(self.pid)]

    def engine_core(self) -> int:
        """The process that computes, by the title that vLLM gives it."""
        titled = [pid for pid in descendants(self.pid) if Path(f"/proc/{pid}/comm").read_text().startswith("VLLM::EngineCor")]
        assert len(titled) == 1
        return titled[0]


def start(folder: Path, *arguments: str | Path, vllm_python: Path, environment: dict[str, str] | None = None) -> Served:
    folder.mkdir()
    settings = {**SETTINGS, **(environment or {})}
    command = GemqServe(*arguments, "--python", vllm_python, "--port", free_port(), cwd=folder, environment=settings)
    told = command.address(START_SECONDS)
    return Served(command, str(told["url"]), str(told["model"]), int(str(told["pid"])))


@pytest.fixture(scope="module")
def sealed(small_gemma4: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sealed") / "gemma4-small"
    shutil.copytree(small_gemma4, folder)
    write_seal(folder)
    return folder


@pytest.fixture(scope="module")
def quantized(small_gemma4: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in int4, with its PLE linears in int8: every packed format that a recipe writes."""
    folder = tmp_path_factory.mktemp("quantized")
    (folder / "recipe.yaml").write_text(RECIPE)
    gemq = [sys.executable, "-c", "from gemq.cli import main; main()"]
    command = [*gemq, "quantize", str(small_gemma4), "--recipe", str(folder / "recipe.yaml")]
    subprocess.run([*command, "--output", str(folder / "gemma4-int4")], check=True, timeout=600, stderr=subprocess.DEVNULL)
    return folder / "gemma4-int4"


@pytest.fixture(scope="module")
def served(sealed: Path, vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    running = start(tmp_path_factory.mktemp("serve") / "run", sealed, vllm_python=vllm_python)
    yield running
    if running.command.process.poll() is None:
        running.command.end(signal.SIGTERM)


def chat(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "what is this"}, part]}]


def test_the_model_is_listed_by_its_name(served: Served) -> None:
    assert [model["id"] for model in httpx.get(f"{served.url}/models").json()["data"]] == ["gemma4-small"]
    log = next(served.command.out.parent.glob("gemq-serve-*.log")).read_text()
    assert "serve.py: the seal holds, 7 files" in log


def test_integer_prompts_give_the_same_ids_twice_and_exactly_as_many_as_asked(served: Served) -> None:
    options = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    first, second = (served.post("completions", add_special_tokens=False, **options).json() for _ in range(2))
    ids = first["choices"][0]["token_ids"]
    assert len(ids) == first["usage"]["completion_tokens"] == 24
    assert ids == second["choices"][0]["token_ids"]
    assert first["usage"]["prompt_tokens"] == len(PROMPT)


def test_prompt_logprobs_are_complete(served: Served) -> None:
    answer = served.post("completions", prompt=PROMPT, max_tokens=1, prompt_logprobs=1, add_special_tokens=False).json()
    scored = answer["choices"][0]["prompt_logprobs"]
    assert len(scored) == len(PROMPT)
    assert scored[0] is None
    for target, entry in zip(PROMPT[1:], scored[1:], strict=True):
        assert entry[str(target)]["logprob"] < 0


@pytest.mark.parametrize("part", [
    {"type": "image_url", "image_url": {"url": picture()}},
    {"type": "input_audio", "input_audio": {"data": tone(), "format": "wav"}},
], ids=["image", "audio"])
def test_every_modality_is_answered(served: Served, part: dict[str, Any]) -> None:
    plain = served.post("chat/completions", messages=[{"role": "user", "content": "what is this"}], max_tokens=4, temperature=0)
    answer = served.post("chat/completions", messages=chat(part), max_tokens=4, temperature=0)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] >= plain.json()["usage"]["prompt_tokens"] + 30


def test_the_endpoint_keeps_the_whole_contract(served: Served) -> None:
    table = check(Endpoint(served.url, vocabulary=512))
    assert len(table) == 13
    assert [f"{point.name}: {point.seen}" for point in table if not point.kept] == []


def test_a_second_server_on_the_port_is_refused_in_seconds(served: Served, sealed: Path, vllm_python: Path) -> None:
    port, before = served.url.removesuffix("/v1").rpartition(":")[2], time.monotonic()
    second = GemqServe(sealed, "--python", vllm_python, "--port", port, cwd=served.command.out.parent / "..")
    assert second.process.wait(60) == 2
    assert port in second.err.read_text()
    assert time.monotonic() - before < 60
    assert httpx.get(f"{served.url}/models").status_code == 200


def test_gemq_serve_ends_when_the_engine_core_is_killed(served: Served) -> None:
    processes, before = served.processes(), time.monotonic()
    os.kill(served.engine_core(), signal.SIGKILL)
    assert served.command.process.wait(120) == 1
    assert time.monotonic() - before < 60
    wait_until(lambda: not any(alive(pid) for pid in processes), 10, "no process is left")
    said = served.command.err.read_text()
    assert "ended by itself" in said or "died" in said


def test_lowbarenas_package_serves_int4_and_ctrl_c_leaves_no_process(quantized: Path, vllm_python: Path, tmp_path: Path) -> None:
    package = tmp_path / "package"
    (package / "engine").mkdir(parents=True)
    shutil.copy(room.ROOM / "launch.sh", package / "engine")
    (package / "submission.json").write_text(json.dumps({"task_id": "small", "artifact": {"uri": "o/r", "revision": "0" * 40}}))
    running = start(tmp_path / "run", package, "--checkpoint", quantized, vllm_python=vllm_python, environment={"GEMQ_PROFILE": "memory"})
    assert running.model == "small"
    assert [f"{point.name}: {point.seen}" for point in check(Endpoint(running.url, vocabulary=512)) if not point.kept] == []
    processes = running.processes()
    assert len(processes) >= 4  # watchdog, API server, engine core, worker
    assert running.command.end(signal.SIGINT) == 0, running.command.err.read_text()
    assert not any(alive(pid) for pid in processes)

"""The packaged pair on the real vLLM: two starts, one by serve.py and one by launch.sh, with a small Gemma 4 of three towers.

gemq's measurements and vLLM's own benchmark client are tried on the first of them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from benchmarks.stub_server import Engine, StubServer
from fake_vllm import GemqServe, alive, wait_until
from test_vllm_packages import LARGEST_DIFFERENCE, TINY, wikitext_records

from gemq import atomic
from gemq.errors import GemqError, IntegrityError, StoppedSafely, UsageError
from gemq.eval import endpoint as measured
from gemq.eval.bench import arena_summary, run_bench
from gemq.eval.decoded import read_decoded
from gemq.eval.greedy_run import Job, evaluate_greedy
from gemq.eval.kl import evaluate_kl, record_reference
from gemq.eval.ppl import evaluate_ppl
from gemq.eval.vllm_load import VllmClient
from gemq.eval.workloads import Load, Workload, prompts_for
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


LOADS = (Load(name="chat", requests=3, output_tokens=12, chat=True, warmups=1),
         Load(name="ids", requests=4, output_tokens=12, input_tokens=40, in_flight=2, warmups=1),
         Load(name="streamed", requests=4, output_tokens=12, input_tokens=40, in_flight=2, streamed=True, warmups=1))  # fmt: skip
PROMPTS = {load.name: prompts_for(load, None, vocabulary=500, bos=2) for load in LOADS}


def records_of(name: str, path: Path) -> Path:
    """The prompts of a load as token records."""
    lines = [{"id": p.id, "context_token_ids": [2], "target_token_ids": list(p.tokens or ())[1:]} for p in PROMPTS[name]]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_gemqs_measurements(served: Served, sealed: Path, tmp_path: Path) -> None:
    end = measured.Endpoint.open(served.url)
    result, _ = run_bench(end, Workload(name="small", loads=LOADS), PROMPTS, target="small")
    # the numbers of a request that was answered are there, and the endpoint is found honest
    for one in result.loads:
        run = one.runs[0]
        assert run.output_tokens == 12 * len(PROMPTS[one.load.name])
        assert run.tps == pytest.approx(run.output_tokens / run.duration_s)
        assert one.first_token_ms is not None
        assert one.between_tokens_ms is not None
        assert 0 < one.first_token_ms.mean < 60_000
        assert len(one.audit) == 3
    assert not result.broken
    assert arena_summary(result, result.loads[0], "job")["completed"] == 3
    # captured twice, one prompt at a time: the same ids, and records that another command can read
    sent = tmp_path / "prompts.jsonl"
    sent.write_text("".join(json.dumps({"id": p.id, "prompt_token_ids": list(p.tokens or ())}) + "\n" for p in PROMPTS["ids"]))
    greedy = evaluate_greedy(Job(served.url, served.url, prompts=sent, tokens=12, output_dir=tmp_path / "greedy"))
    assert greedy.identical_share == 1.0
    assert len(read_decoded(tmp_path / "greedy" / "decode.jsonl")) == 4
    # KL through prompt_logprobs: nothing against what was recorded of it, next to nothing against the same checkpoint in transformers
    records, kept = records_of("ids", tmp_path / "records.jsonl"), tmp_path / "reference.jsonl"
    assert record_reference(served.url, records, kept) == 4
    assert evaluate_kl(served.url, records, reference=str(kept)).kl_nats.value == pytest.approx(0.0, abs=1e-9)
    local = evaluate_kl(served.url, records, reference=str(sealed), device="cpu", dtype="float32")
    assert 0 <= local.kl_nats.value < 0.01
    assert local.covered is not None
    assert local.covered > 0.02
    with pytest.raises(UsageError, match="max allowed"):
        evaluate_kl(served.url, records, reference=str(sealed), top=50)


class Liar(Engine):
    """Says that it made one token more than it did."""

    def usage(self, prompt: list[int], made: list[int], asked: int) -> dict[str, int]:
        return {"prompt_tokens": len(prompt), "completion_tokens": len(made) + 1, "total_tokens": 0}


class Short(Engine):
    """Makes a token less than it was asked for, and doesn't say so."""

    def decode(self, ids: list[int], count: int) -> list[int]:
        return super().decode(ids, count - 1)

    def usage(self, prompt: list[int], made: list[int], asked: int) -> dict[str, int]:
        return {"prompt_tokens": len(prompt), "completion_tokens": asked, "total_tokens": 0}


class Narrow(Engine):
    """Has a window that is too short, and does not say so in its list of models."""

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any], float]:
        return 400, {"error": {"message": "This model's maximum context length is 7 tokens."}}, 0.0


def test_vllms_own_benchmark_client(served: Served, vllm_python: Path, tmp_path: Path) -> None:
    loads = (LOADS[0], LOADS[2])
    workload = Workload(name="small", loads=loads)
    with VllmClient(vllm_python) as client:
        result, _ = run_bench(measured.Endpoint.open(served.url), workload, PROMPTS, target="small", runs=2, client=client, client_kind="vllm")
        for one in result.loads:
            assert one.client == client.name
            assert client.name.startswith("vllm 0.")
            assert [run.output_tokens for run in one.runs] == [12 * len(PROMPTS[one.load.name])] * 2
            assert one.first_token_ms is not None
            assert 0 < one.first_token_ms.mean < one.runs[0].latency_ms.mean
            assert one.tps.lower_95 is not None
        assert not result.broken
        assert arena_summary(result, result.loads[0], "job")["benchmark_dependencies"][-1] == client.name.replace(" ", "==")
        # who cheats, refuses or dies is told as with gemq's own client
        cases: list[tuple[type[Engine], int | None, type[GemqError], str]] = [
            (Liar, None, IntegrityError, "its usage says 13"), (Short, None, IntegrityError, "made 11 tokens"),
            (Narrow, None, UsageError, "7 tokens"), (Engine, 3, StoppedSafely, "finished requests are kept in"),
        ]  # fmt: skip
        for engine, dies_after, kind, word in cases:
            output = tmp_path / f"{engine.__name__}-{dies_after}"
            with StubServer(engine(), dies_after) as stub, atomic.resumable_directory(output, "bench") as partial, pytest.raises(kind) as error:
                run_bench(measured.Endpoint.open(stub.url), Workload(name="one", loads=loads[1:]), PROMPTS, target="stub", client=client,
                          client_kind="vllm", partial=partial)  # fmt: skip
            assert word in error.value.message, error.value.message


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


def test_lowbarenas_package_serves_int4_and_ctrl_c_leaves_no_process(
    quantized: Path, vllm_python: Path, shared_data: Path, tmp_path: Path
) -> None:
    package = tmp_path / "package"
    (package / "engine").mkdir(parents=True)
    shutil.copy(room.ROOM / "launch.sh", package / "engine")
    (package / "submission.json").write_text(json.dumps({"task_id": "small", "artifact": {"uri": "o/r", "revision": "0" * 40}}))
    running = start(tmp_path / "run", package, "--checkpoint", quantized, vllm_python=vllm_python, environment={"GEMQ_PROFILE": "memory"})
    assert running.model == "small"
    assert [f"{point.name}: {point.seen}" for point in check(Endpoint(running.url, vocabulary=512)) if not point.kept] == []
    data = tmp_path / "records.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in wikitext_records(TINY, shared_data)))
    local = evaluate_ppl(str(quantized), data, device="cpu", dtype="float32").ppl.value
    assert evaluate_ppl(running.url, data).ppl.value == pytest.approx(local, rel=LARGEST_DIFFERENCE)
    processes = running.processes()
    assert len(processes) >= 4  # watchdog, API server, engine core, worker
    assert running.command.end(signal.SIGINT) == 0, running.command.err.read_text()
    assert not any(alive(pid) for pid in processes)

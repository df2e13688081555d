"""`gemq serve` starts what is packaged, tells why a start fails, and leaves no process behind. With a stand-in for vLLM."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from fake_vllm import GemqServe, alive, wait_until

from gemq.errors import GemqError, IntegrityError, UsageError
from gemq.serve import server as room
from gemq.serve.server import find_python, free_port, plan, serving

SERVE = room.ROOM
Start = Callable[..., GemqServe]


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that won't end is killed after two seconds here."""
    monkeypatch.setattr(room, "GRACE_SECONDS", 2.0)


def group_of(pid: int) -> list[int]:
    """The watchdog and everything below it."""
    from gemq.serve.watchdog import descendants

    return [pid, *descendants(pid)]


def test_a_server_answers_within_the_block_and_is_gone_after_it(checkpoint: Path, fake_python: Path, tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    with serving(checkpoint, python=fake_python, log=log) as server:
        assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"] == server.model == "checkpoint"
        server.require_alive()
        processes = group_of(server.pid)
        assert len(processes) > 1
    assert not any(alive(pid) for pid in processes)
    assert "Application startup complete" in log.read_text()


def test_a_server_that_demands_the_key_is_waited_for_with_it_and_past_a_proxy(
    checkpoint: Path, fake_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "a-secret-key")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    with serving(checkpoint, python=fake_python, timeout=30) as server:
        server.require_alive()


def test_a_server_that_demands_another_key_is_not_waited_for(checkpoint: Path, fake_python: Path) -> None:
    with pytest.raises(UsageError, match="another API key") as refused, serving(checkpoint, python=fake_python, timeout=60,
                                                                                 environment={"VLLM_API_KEY": "another"}):  # fmt: skip
        pass
    assert "VLLM_API_KEY" in refused.value.next_step


def test_a_block_that_fails_ends_the_server_too(checkpoint: Path, fake_python: Path) -> None:
    processes: list[int] = []

    def fail() -> None:
        with serving(checkpoint, python=fake_python) as server:
            processes.extend(group_of(server.pid))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert len(processes) > 1
    assert not any(alive(pid) for pid in processes)


def test_an_engine_that_ignores_sigterm_is_killed_with_its_children(checkpoint: Path, fake_python: Path, tmp_path: Path) -> None:
    note = tmp_path / "child"
    before = time.monotonic()
    with serving(checkpoint, python=fake_python, environment={"FAKE_DEAF": "1", "FAKE_CHILD": str(note)}) as server:
        processes = [*group_of(server.pid), int(note.read_text())]
    assert not any(alive(pid) for pid in processes)
    assert time.monotonic() - before < 60


def test_an_engine_that_dies_leaves_no_child(checkpoint: Path, fake_python: Path, tmp_path: Path) -> None:
    note = tmp_path / "child"
    with serving(checkpoint, python=fake_python, environment={"FAKE_DIE_AFTER": "1", "FAKE_CHILD": str(note)}) as server:
        wait_until(lambda: server.process.poll() is not None, 30, "the watchdog ends with the engine")
        assert not alive(int(note.read_text()))
        with pytest.raises(GemqError, match="worker died of a test") as caught:
            server.require_alive()
    assert caught.value.exit_code == 1


def test_an_engine_whose_core_died_is_noticed_though_it_still_answers(checkpoint: Path, fake_python: Path) -> None:
    def dead(server: room.Server) -> bool:
        try:
            server.require_alive()
        except GemqError as error:
            return "worker died of a test" in error.message
        return False

    with serving(checkpoint, python=fake_python, environment={"FAKE_DIE_AFTER": "0.5", "FAKE_HALF_DEAD": "1"}) as server:
        wait_until(lambda: dead(server), 30, "the dead core is noticed")
        assert server.process.poll() is None


@pytest.mark.parametrize(("says", "mends"), [
    ("RuntimeError: operator torchvision::nms does not exist", "make serve-env"),
    ("ValueError: Model architectures ['Qwen9ForCausalLM'] are not supported for now.", "architecture"),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "--profile memory"),
])
def test_a_start_that_fails_tells_the_logs_reason_and_what_mends_it(says: str, mends: str, checkpoint: Path, fake_python: Path) -> None:
    before = time.monotonic()
    with pytest.raises(GemqError) as caught, serving(checkpoint, python=fake_python, environment={"FAKE_FAIL": says}):
        pytest.fail("it must not start")
    assert says in caught.value.message
    assert mends in caught.value.next_step
    assert time.monotonic() - before < 60


def test_a_flipped_byte_ends_the_start_with_exit_4(checkpoint: Path, fake_python: Path) -> None:
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(b"\x01" + weights.read_bytes()[1:])
    with pytest.raises(IntegrityError, match=r"model\.safetensors is not what was sealed"), serving(checkpoint, python=fake_python):
        pytest.fail("it must not start")
    with serving(checkpoint, python=fake_python, verify=False) as server:
        server.require_alive()


def test_a_taken_port_ends_the_start_with_exit_2(checkpoint: Path, fake_python: Path) -> None:
    with serving(checkpoint, python=fake_python) as first:
        port = int(first.url.rpartition(":")[2])
        with pytest.raises(UsageError, match=str(port)) as caught, serving(checkpoint, python=fake_python, port=port):
            pytest.fail("it must not start")
        assert "another --port" in caught.value.next_step
        first.require_alive()


def test_a_start_that_takes_too_long_is_ended(checkpoint: Path, tmp_path: Path) -> None:
    sleeper = tmp_path / "sleeper"
    note = tmp_path / "pid"
    sleeper.write_text(f"#!/bin/sh\necho $$ > {note}\nexec sleep 600\n")
    sleeper.chmod(0o755)
    with pytest.raises(GemqError, match="does not answer after 1 s"), serving(checkpoint, python=sleeper, timeout=1):
        pytest.fail("it must not start")
    assert not alive(int(note.read_text()))


def test_ctrl_c_and_sigterm_stop_it_cleanly(gemq_serve: Start, checkpoint: Path, fake_python: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        one = gemq_serve(checkpoint, "--python", fake_python, "--port", free_port())
        told = one.address(60)
        processes = group_of(int(str(told["pid"])))
        assert httpx.get(f"{told['url']}/models").status_code == 200
        assert one.end(number) == 0, one.err.read_text()
        assert not any(alive(pid) for pid in processes)


def test_nothing_outlives_gemq_when_it_is_killed(gemq_serve: Start, checkpoint: Path, fake_python: Path, tmp_path: Path) -> None:
    note = tmp_path / "child"
    one = gemq_serve(checkpoint, "--python", fake_python, "--port", free_port(), environment={"FAKE_CHILD": str(note)})
    processes = [*group_of(int(str(one.address(60)["pid"]))), int(note.read_text())]
    assert all(alive(pid) for pid in processes)
    assert one.end(signal.SIGKILL) == -signal.SIGKILL
    wait_until(lambda: not any(alive(pid) for pid in processes), 40, "every process of the engine is gone")


def test_nothing_outlives_the_watchdog_when_it_is_killed(gemq_serve: Start, checkpoint: Path, fake_python: Path) -> None:
    one = gemq_serve(checkpoint, "--python", fake_python, "--port", free_port())
    watchdog = int(str(one.address(60)["pid"]))
    processes = group_of(watchdog)
    os.kill(watchdog, signal.SIGKILL)
    wait_until(lambda: not any(alive(pid) for pid in processes), 20, "the engine is asked to end by the kernel")
    assert one.process.wait(30) == 1


def test_gemq_serve_ends_when_the_engine_dies_and_says_why(gemq_serve: Start, checkpoint: Path, fake_python: Path) -> None:
    one = gemq_serve(checkpoint, "--python", fake_python, "--port", free_port(), environment={"FAKE_DIE_AFTER": "2"})
    one.address(60)
    assert one.process.wait(30) == 1
    assert "worker died of a test" in one.err.read_text()


def submission(folder: Path, checkpoint: Path) -> Path:
    """A submission as Efficient Gemma wants it, with a serve.py of its own."""
    shutil.copytree(checkpoint, folder / "model")
    shutil.copy(SERVE / "serve.py", folder / "serve.py")
    (folder / "manifest.json").write_text(json.dumps({
        "name": "n", "description": "d", "dependencies": [], "model_id": "model", "served_model_name": "gemma", "port": 8000,
        "serve": ["python", "serve.py"], "env": {"GEMQ_PROFILE": "memory"}}))
    return folder


def test_a_submission_is_started_by_its_own_manifest(checkpoint: Path, fake_python: Path, tmp_path: Path) -> None:
    folder, note = submission(tmp_path / "submission", checkpoint), tmp_path / "note"
    with serving(folder, python=fake_python, environment={"FAKE_NOTE": str(note)}) as server:
        assert server.model == "gemma"
    told = json.loads(note.read_text())
    value = dict(zip(told["arguments"], told["arguments"][1:], strict=False))
    assert value["--model"] == str(folder / "model")
    assert value["--max-num-seqs"] == "64"


def test_lowbarenas_engine_is_started_by_its_launch_sh(checkpoint: Path, fake_python: Path, tmp_path: Path) -> None:
    folder, note = tmp_path / "package", tmp_path / "note"
    (folder / "engine").mkdir(parents=True)
    shutil.copy(SERVE / "launch.sh", folder / "engine" / "launch.sh")
    (folder / "submission.json").write_text(json.dumps({"task_id": "qwen3-8b", "artifact": {"uri": "o/r", "revision": "0" * 40},
                                                        "serving": {"kv_cache_dtype": "fp8"}}))
    environment = {"FAKE_NOTE": str(note), "GEMQ_PYTHON": str(fake_python)}
    with serving(folder, python=fake_python, checkpoint=checkpoint, environment=environment) as server:
        assert server.model == "qwen3-8b"
    value = json.loads(note.read_text())["arguments"]
    assert value[value.index("--kv-cache-dtype") + 1] == "fp8"
    assert value[value.index("--model") + 1] == str(checkpoint)


def test_a_folder_that_is_neither_is_refused(tmp_path: Path, fake_python: Path) -> None:
    with pytest.raises(UsageError, match="neither a checkpoint"):
        plan(tmp_path, python=fake_python, host="127.0.0.1", port=1)
    (tmp_path / "manifest.json").write_text("[]")
    with pytest.raises(UsageError, match="no JSON object"):
        plan(tmp_path, python=fake_python, host="127.0.0.1", port=1)


def test_a_python_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere"):
        find_python(tmp_path / "nowhere")


def test_a_log_is_read_for_its_causes_not_its_tracebacks() -> None:
    from gemq.serve.symptoms import diagnose

    log = """\
(EngineCore pid=5) INFO 11-29 17:41:04 [core.py:133] Initializing
(EngineCore pid=5) ERROR 11-29 17:41:05 [core.py:1] EngineCore failed to start.
(EngineCore pid=5) ERROR 11-29 17:41:05 [core.py:1] Traceback (most recent call last):
(EngineCore pid=5) ERROR 11-29 17:41:05 [core.py:1]   File "x.py", line 3, in f
(EngineCore pid=5) ERROR 11-29 17:41:05 [core.py:1] ValueError: No available memory for the cache blocks. Try increasing it.
ValueError: No available memory for the cache blocks. Try increasing it.
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""
    found = diagnose(log)
    assert found.lines == ("ValueError: No available memory for the cache blocks. Try increasing it.",)
    assert "VLLM_CPU_KVCACHE_SPACE" in found.mend
    assert diagnose("") == type(found)((), "")


def test_the_watchdog_gives_its_commands_exit_code() -> None:
    run = [sys.executable, "-I", str(SERVE / "watchdog.py"), "1", sys.executable, "-c"]
    with subprocess.Popen([*run, "raise SystemExit(7)"], stdin=subprocess.PIPE) as process:
        assert process.wait(30) == 7
    with subprocess.Popen([*run, "import os, signal; os.kill(os.getpid(), signal.SIGABRT)"], stdin=subprocess.PIPE) as process:
        assert process.wait(30) == 128 + signal.SIGABRT

"""`gemq serve` on what `gemq package` wrote starts exactly those files, and each way to fail ends in seconds. With a stand-in for vLLM."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest
import small_checkpoint as small
from fake_vllm import GemqServe, alive, wait_until

from gemq.errors import GemqError, IntegrityError, UsageError
from gemq.serve import efficient_gemma, lowbarena
from gemq.serve import server as room
from gemq.serve.package import Hub, Order, read_checkpoint
from gemq.serve.server import Server, free_port, serving
from gemq.serve.watchdog import descendants

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SECONDS = 60  # a machine that is busy with much else


class Pair:
    """A package, its checkpoint, and how gemq and an arena start it."""

    def __init__(self, arena: str, folder: Path) -> None:
        self.arena, self.package = arena, folder / "package"
        if arena == "efficient-gemma":
            made = small.e4b(folder / "made")
            efficient_gemma.make(Order(read_checkpoint(made), profile="memory"), self.package, copy=True)
            self.checkpoint, self.script = self.package / "model", self.package / "serve.py"
            self.needed = ("MODEL_ID", "SERVED_MODEL_NAME", "HOST", "PORT")
        else:
            self.checkpoint, self.script = small.qwen(folder / "made"), self.package / "engine" / "launch.sh"
            lowbarena.make(Order(read_checkpoint(self.checkpoint), Hub("someone/small", COMMIT), profile="memory"), self.package,
                           kv_cache_dtype="fp8")
            self.needed = ("ARTIFACT", "TOKENIZER", "PORT", "SERVED_NAME", "MAX_MODEL_LEN", "GPU_MEMORY_UTILIZATION", "KV_CACHE_DTYPE")

    @property
    def options(self) -> dict[str, Path]:
        return {"checkpoint": self.checkpoint} if self.arena == "lowbarena" else {}

    def serving(self, python: Path, **options: object) -> AbstractContextManager[Server]:
        environment = {"GEMQ_PYTHON": str(python), **options.pop("environment", {})}  # type: ignore[dict-item]
        return serving(self.package, python=python, environment=environment, **self.options, **options)  # type: ignore[arg-type]

    def judged(self, python: Path, port: int, without: str = "") -> subprocess.CompletedProcess[str]:
        """Start the packaged file alone, as the arena would, and wait for its end."""
        values = {"MODEL_ID": "model", "SERVED_MODEL_NAME": "m", "HOST": "127.0.0.1", "ARTIFACT": str(self.checkpoint), "SERVED_NAME": "m",
                  "TOKENIZER": str(self.checkpoint), "MAX_MODEL_LEN": "64", "GPU_MEMORY_UTILIZATION": "0.9", "KV_CACHE_DTYPE": "auto"}
        environment = {name: value for name, value in {**values, "PORT": str(port)}.items() if name in self.needed and name != without}
        command = [python, "serve.py"] if self.arena == "efficient-gemma" else ["bash", "launch.sh", "serve"]
        return subprocess.run(command, cwd=self.script.parent, capture_output=True, text=True, timeout=SECONDS,
                              env={"PATH": f"{python.parent}:{os.environ['PATH']}", "GEMQ_PYTHON": str(python), **environment})


@pytest.fixture(params=["efficient-gemma", "lowbarena"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    return Pair(request.param, tmp_path)


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "GRACE_SECONDS", 2.0)


@pytest.fixture
def no_orphan() -> Iterator[None]:
    """Whatever a test starts below this process is gone when it ends."""
    before = set(descendants(os.getpid()))
    yield
    wait_until(lambda: not [pid for pid in descendants(os.getpid()) if pid not in before and alive(pid)], 30, "no process is left")


def test_what_is_served_is_the_packaged_pair(pair: Pair, fake_python: Path, tmp_path: Path, no_orphan: None) -> None:
    log, note = tmp_path / "log", tmp_path / "note"
    with pair.serving(fake_python, log=log, environment={"FAKE_NOTE": str(note)}) as server:
        assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"] == server.model
    told = json.loads(note.read_text())
    value = dict(zip(told["arguments"], told["arguments"][1:], strict=False))
    assert value["--model"] == str(pair.checkpoint)
    assert value["--max-num-seqs"] == "64", "the package's own profile"
    assert "the seal holds" in log.read_text()
    if pair.arena == "lowbarena":
        assert value["--kv-cache-dtype"] == "fp8"
        assert server.model == "qwen3-8b"
    else:
        assert server.model == "gemma-4-E4B-it"


def test_the_engines_file_is_the_one_in_the_package(pair: Pair, fake_python: Path, tmp_path: Path) -> None:
    """A package that was edited by hand is started as it is now, not with gemq's own copy of the file."""
    launch = room.plan(pair.package, python=fake_python, host="127.0.0.1", port=1, **pair.options)
    assert launch.folder == pair.script.parent
    assert any((launch.folder / part).resolve() == pair.script for part in launch.command)


def test_a_flipped_byte_in_the_checkpoint_ends_the_start_with_4(pair: Pair, fake_python: Path, no_orphan: None) -> None:
    weights = pair.checkpoint / "model.safetensors"
    weights.chmod(0o644)
    raw = bytearray(weights.read_bytes())
    raw[len(raw) // 2] ^= 1
    weights.write_bytes(raw)
    before = time.monotonic()
    with pytest.raises(IntegrityError, match=r"model\.safetensors is not what was sealed") as caught, pair.serving(fake_python):
        pytest.fail("it must not start")
    assert caught.value.next_step
    assert time.monotonic() - before < SECONDS
    alone = pair.judged(fake_python, free_port())
    assert alone.returncode == 4
    assert "model.safetensors" in alone.stderr


def test_each_missing_variable_is_named_in_a_line(pair: Pair, fake_python: Path) -> None:
    for name in pair.needed:
        done = pair.judged(fake_python, free_port(), without=name)
        assert done.returncode == 2
        assert name in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_a_taken_port_is_said_at_once(pair: Pair, fake_python: Path, no_orphan: None) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        before = time.monotonic()
        with pytest.raises(UsageError, match=str(port)) as caught, pair.serving(fake_python, port=port):
            pytest.fail("it must not start")
        assert "--port" in caught.value.next_step
        done = pair.judged(fake_python, port)
        assert time.monotonic() - before < SECONDS
    assert done.returncode == 2
    assert str(port) in done.stderr
    assert "in use" in done.stderr


@pytest.mark.slow
def test_an_engine_that_dies_after_its_start_ends_gemq_serve_and_leaves_nothing(pair: Pair, fake_python: Path, tmp_path: Path,
                                                                                gemq_serve: Callable[..., GemqServe]) -> None:
    child = tmp_path / "child"
    given = ["--checkpoint", pair.checkpoint] if pair.arena == "lowbarena" else []
    one = gemq_serve(pair.package, *given, "--python", fake_python, "--port", free_port(),
                     environment={"FAKE_DIE_AFTER": "2", "FAKE_CHILD": str(child), "GEMQ_PYTHON": str(fake_python)})
    watchdog = int(str(one.address(SECONDS)["pid"]))
    processes = [watchdog, *descendants(watchdog)]
    assert one.process.wait(SECONDS) == 1
    said = one.err.read_text()
    assert "ended by itself" in said
    assert "the worker died of a test" in said
    wait_until(lambda: not any(alive(pid) for pid in [*processes, int(child.read_text())]), 30, "no process is left")


def test_a_start_that_fails_tells_the_engines_reason(pair: Pair, fake_python: Path, no_orphan: None) -> None:
    reason = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    with pytest.raises(GemqError, match="CUDA out of memory") as caught, pair.serving(fake_python, environment={"FAKE_FAIL": reason}):
        pytest.fail("it must not start")
    assert "--profile memory" in caught.value.next_step


# --- what only one of the two has


def test_an_engine_that_is_not_the_one_in_the_body_is_refused(tmp_path: Path, fake_python: Path) -> None:
    pair = Pair("lowbarena", tmp_path)
    pair.script.write_text(pair.script.read_text() + "# edited\n")
    with pytest.raises(IntegrityError, match="another engine"), pair.serving(fake_python):
        pytest.fail("it must not start")


def test_lowbarenas_artifact_is_fetched_at_its_commit(tmp_path: Path, fake_python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair("lowbarena", tmp_path)
    asked = []

    def fetch(model: str, revision: str | None = None) -> tuple[Path, str]:
        asked.append((model, revision))
        return pair.checkpoint, COMMIT

    monkeypatch.setattr("gemq.hub.fetch", fetch)
    with serving(pair.package, python=fake_python, environment={"GEMQ_PYTHON": str(fake_python)}) as server:
        assert server.model == "qwen3-8b"
    assert asked == [("someone/small", COMMIT)]

    def fail(model: str, revision: str | None = None) -> tuple[Path, str]:
        raise UsageError(f"{model} can't be reached", "check the network")

    monkeypatch.setattr("gemq.hub.fetch", fail)
    with pytest.raises(UsageError, match="someone/small") as caught:
        room.plan(pair.package, python=fake_python, host="127.0.0.1", port=1)
    assert "--checkpoint DIR" in caught.value.next_step


def test_launch_sh_listens_on_loopback_alone_and_says_so(tmp_path: Path, fake_python: Path) -> None:
    pair = Pair("lowbarena", tmp_path)
    with pytest.raises(UsageError, match=r"127\.0\.0\.1 alone"):
        room.plan(pair.package, python=fake_python, host="0.0.0.0", port=1, checkpoint=pair.checkpoint)


def test_a_manifest_that_breaks_the_rules_is_not_started(tmp_path: Path, fake_python: Path) -> None:
    pair = Pair("efficient-gemma", tmp_path)
    manifest = json.loads((pair.package / "manifest.json").read_text())
    (pair.package / "manifest.json").write_text(json.dumps({**manifest, "env": {"PORT": "1"}, "serve": "python serve.py"}))
    with pytest.raises(UsageError, match=r"serve is .*; env sets PORT"):
        room.plan(pair.package, python=fake_python, host="127.0.0.1", port=1)


def test_a_checkpoint_by_hub_id_is_asked_for_at_its_commit(tmp_path: Path, fake_python: Path) -> None:
    made = small.e4b(tmp_path / "made")
    efficient_gemma.make(Order(read_checkpoint(made), Hub("someone/small", COMMIT)), tmp_path / "package")
    note = tmp_path / "note"
    with serving(tmp_path / "package", python=fake_python, environment={"FAKE_NOTE": str(note)}):
        pass
    arguments = json.loads(note.read_text())["arguments"]
    value = dict(itertools.pairwise(arguments))
    assert (value["--model"], value["--revision"], value["--tokenizer-revision"]) == ("someone/small", COMMIT, COMMIT)

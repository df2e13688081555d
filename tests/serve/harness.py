"""The judges' side, written from the arenas' contracts and from nothing of gemq: starts a package, polls it, asks it, scores it.

`Judge` starts what a package says in a read-only folder, as an unprivileged user where the tests run as root, with the environment that the
contract names and nothing of the caller's; `chats`, `capture` and `perplexity` are Efficient Gemma's three measurements, cut short.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

NOBODY = 65534
POLL_SECONDS = 900
# what a machine has, not what a judge says: two cores, a small KV cache
MACHINE = {"OMP_NUM_THREADS": "2", "VLLM_CPU_KVCACHE_SPACE": "1", "LANG": "C.UTF-8"}


def demoted(python: Path) -> tuple[list[str], dict[str, Any]]:
    """What to put before a command, and Popen's options, so that it runs as nobody; both empty where the tests aren't root.

    An interpreter in root's own home is out of nobody's reach: there it is let read everything, and write nowhere that nobody may not.
    """
    if os.getuid() != 0:
        return [], {}
    options: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    try:
        subprocess.run([python, "-c", ""], check=True, capture_output=True, **options)
        return [], options
    except (PermissionError, subprocess.CalledProcessError):
        capability = "-all,+dac_read_search"
        return ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", f"--inh-caps={capability}",
                f"--ambient-caps={capability}", f"--bounding-set={capability}"], {}


def demoted_uid() -> int:
    """The user that `demoted` makes a command run as."""
    return os.getuid() or NOBODY


def sealed_off(package: Path) -> Path:
    """A copy of `package` that nobody can write to, in a folder that everybody may enter."""
    place = Path(tempfile.mkdtemp(prefix="gemq-judged-"))
    place.chmod(0o755)
    copy = shutil.copytree(package, place / package.name)
    for path in (copy, *copy.rglob("*")):
        path.chmod(0o555 if path.is_dir() or path.stat().st_mode & 0o111 else 0o444)
    return copy


class Judge:
    """A started package: `url` without a path, `model`, the engine's `process` and `log`, the `folder` that it was started in."""

    def __init__(self, folder: Path, command: Sequence[str], environment: dict[str, str], model: str, python: Path, log: Path) -> None:
        before, options = demoted(python)
        self.folder = folder
        port = environment["PORT"]
        self.url, self.model, self.log = f"http://127.0.0.1:{port}", model, log
        self.environment = {"PATH": f"{python.parent}:{os.environ['PATH']}", "HOME": "/", **MACHINE, **environment}
        self.process = subprocess.Popen([*before, *command], cwd=folder, env=self.environment, stdout=open(log, "wb"),  # noqa: SIM115
                                        stderr=subprocess.STDOUT, start_new_session=True, **options)

    def wait(self, seconds: float = POLL_SECONDS) -> None:
        """Poll /v1/models until the model is listed; fails the test with the log's end where the process ends first."""
        deadline = time.monotonic() + seconds
        while True:
            if self.process.poll() is not None:
                pytest.fail(f"ended with {self.process.returncode}: {self.log.read_text(errors='replace')[-4000:]}")
            try:
                listed = httpx.get(f"{self.url}/v1/models", timeout=5).json()["data"]
                assert [entry["id"] for entry in listed] == [self.model]
                return
            except httpx.TransportError:
                pass
            if time.monotonic() > deadline:
                pytest.fail(f"no answer in {seconds} s: {self.log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.5)

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        answer = httpx.post(f"{self.url}/v1/{path}", json={"model": self.model, "temperature": 0, **body}, timeout=600)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def uid(self) -> int:
        """The user that the engine runs as."""
        return int(next(line for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines() if line.startswith("Uid")).split()[1])

    def end(self) -> None:
        """Stop it, as a judge's job ends."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(30)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def efficient_gemma(package: Path, python: Path, log: Path) -> Judge:
    """Start a submission as Efficient Gemma does: its manifest's command and variables, and the four that the harness sets."""
    manifest = json.loads((package / "manifest.json").read_text())
    command = [str(python) if part == "python" else part for part in manifest["serve"]]
    given = {"MODEL_ID": manifest["model_id"], "SERVED_MODEL_NAME": manifest["served_model_name"], "HOST": "127.0.0.1", "PORT": str(free_port())}
    return Judge(package, command, {**manifest["env"], **given}, manifest["served_model_name"], python, log)


def lowbarena(package: Path, artifact: Path, python: Path, log: Path) -> Judge:
    """Start an engine as LowBArena does: unpacked from the submission's body, with the artifact that it fetched."""
    import base64
    import io
    import tarfile

    body = json.loads((package / "submission.json").read_text())
    place = Path(tempfile.mkdtemp(prefix="gemq-engine-"))
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(body["engine"]["inline"])), mode="r:gz") as tar:
        tar.extractall(place / "engine", filter="data")
    engine = sealed_off(place / "engine")
    shutil.rmtree(place)
    given = {"ARTIFACT": str(artifact), "TOKENIZER": str(artifact), "PORT": str(free_port()), "SERVED_NAME": "solution", "MAX_MODEL_LEN": "1024",
             "GPU_MEMORY_UTILIZATION": "0.9", "GENERATION_CONFIG": "vllm", "KV_CACHE_DTYPE": body["serving"]["kv_cache_dtype"],
             "LANGUAGE_MODEL_ONLY": ""}  # fmt: skip
    return Judge(engine, ["bash", "launch.sh", "serve"], given, "solution", python, log)


def chats(judge: Judge, prompts: Iterable[str], tokens: int) -> float:
    """Completion tokens a second over chat requests, one at a time, each of exactly `tokens` tokens."""
    made, started = 0, time.perf_counter()
    for prompt in prompts:
        answer = judge.post("chat/completions", messages=[{"role": "user", "content": prompt}], max_tokens=tokens, ignore_eos=True, seed=1)
        assert answer["usage"]["completion_tokens"] == tokens
        assert answer["choices"][0]["finish_reason"] == "length"
        made += answer["usage"]["completion_tokens"]
    return made / (time.perf_counter() - started)


def capture(judge: Judge, prompts: Iterable[Sequence[int]], tokens: int) -> list[dict[str, Any]]:
    """A decode record a prompt of token ids, in the harness's form."""
    records = []
    for number, prompt in enumerate(prompts):
        answer = judge.post("completions", prompt=list(prompt), max_tokens=tokens, ignore_eos=True, return_token_ids=True,
                            add_special_tokens=False, seed=1)
        ids = answer["choices"][0]["token_ids"]
        assert len(ids) == tokens == answer["usage"]["completion_tokens"]
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        records.append({"id": f"p{number}", "prompt_sha256": digest(prompt), "prompt_token_ids": list(prompt), "completion_token_ids": ids,
                        "completion_token_sha256": digest(ids)})
    return records


def digest(ids: Sequence[int]) -> str:
    """SHA-256 of the ids joined by commas."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()


def perplexity(judge: Judge, records: Iterable[dict[str, Any]]) -> float:
    """exp(total NLL / total targets) through prompt_logprobs; a record that isn't scored whole fails."""
    nll, targets = 0.0, 0
    for record in records:
        context, target = record["context_token_ids"], record["target_token_ids"]
        answer = judge.post("completions", prompt=[*context, *target], max_tokens=1, prompt_logprobs=1, add_special_tokens=False)
        scored = answer["choices"][0]["prompt_logprobs"]
        assert len(scored) == len(context) + len(target)
        assert scored[0] is None
        nll -= sum(entry[str(token)]["logprob"] for token, entry in zip(target, scored[len(context):], strict=True))
        targets += len(target)
    return math.exp(nll / targets)

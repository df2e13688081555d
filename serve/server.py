"""A served model: starts exactly what is packaged (serve.py or launch.sh), waits until it answers, and leaves no process behind.

    with serving(Path("checkpoint")) as server:
        httpx.post(f"{server.url}/v1/completions", json={"model": server.model, "prompt": [2, 105], "max_tokens": 8})

The engine runs under watchdog.py in a session of its own, which ends it also when this process is killed.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from gemq import output
from gemq.errors import GemqError, IntegrityError, UsageError
from gemq.http_client import key_advice, open_client
from gemq.serve import efficient_gemma, lowbarena
from gemq.serve.serve import Refused, require_free_port
from gemq.serve.symptoms import diagnose

ROOM = Path(__file__).resolve().parent
START_TIMEOUT_SECONDS = 900.0  # what Efficient Gemma's harness grants
GRACE_SECONDS = 20.0  # for the engine to end by itself
HEALTH_SECONDS = 2.0
PHASES = (
    ("reading the configuration", r"non-default args"),
    ("starting the engine", r"Resolved architecture"),
    ("starting the worker", r"Initializing a V1 LLM engine"),
    ("loading the weights", r"Starting to load model"),
    ("warming up", r"Loading weights took"),
    ("opening the endpoint", r"init engine"),
    ("ready", r"Application startup complete"),
)


@dataclass(frozen=True)
class Launch:
    """How to start a server: the command, its folder, and the environment that it is given besides the caller's."""

    command: tuple[str, ...]
    folder: Path
    environment: Mapping[str, str]
    address: str
    model: str


@dataclass
class Server:
    """A server that answers: `url` without a path, the served `model` name, the watchdog's `pid`, the engine's `log`."""

    url: str
    model: str
    pid: int
    log: Path
    process: subprocess.Popen[bytes]

    def require_alive(self) -> None:
        """Raise the engine's own reason if it has ended, or if it says of itself that its core is dead."""
        if self.process.poll() is not None:
            raise _failure(f"the server at {self.url} ended by itself", self.process.returncode, self.log)
        try:
            with open_client(self.url, timeout=30) as client:
                status = client.get("/health").status_code
        except httpx.TransportError:
            return  # busy, or about to end: the next look tells
        if status == 503:
            raise _failure(f"the engine behind {self.url} died", None, self.log)


def free_port(host: str = "127.0.0.1") -> int:
    """A port on `host` that is free now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def find_python(given: Path | None = None) -> Path:
    """The Python of an environment that has vLLM: `given`, GEMQ_VLLM_PYTHON, .venv-vllm here or in the project, or the running one."""
    named = [path for path in (given, os.environ.get("GEMQ_VLLM_PYTHON")) if path]
    if named:
        found = shutil.which(str(named[0]))
        if found is None:
            raise UsageError(f"{named[0]} is no Python that can be run", "give --python the interpreter of an environment with vLLM")
        return Path(found).absolute()  # not resolved: a virtual environment's python is a link that must keep its place
    for folder in (Path.cwd(), ROOM.parent):
        if (folder / ".venv-vllm" / "bin" / "python").exists():
            return folder / ".venv-vllm" / "bin" / "python"
    import importlib.util

    if importlib.util.find_spec("vllm") is not None:
        return Path(sys.executable)
    raise UsageError("there is no environment with vLLM: neither .venv-vllm nor this Python has it",
                     "run make serve-env in gemq's source folder, or give --python")


def plan(path: Path, *, python: Path, host: str, port: int, profile: str | None = None, name: str | None = None,
         checkpoint: Path | None = None, verify: bool = True) -> Launch:
    """How `path` is started: a checkpoint with this room's serve.py, a submission with its own files and what its manifest says.

    `checkpoint` stands in for the Hub repository that a submission names. Raises UsageError if `path` is neither.
    """
    path = path.absolute()
    extra = {} if verify else {"GEMQ_SKIP_VERIFY": "1"}
    if profile is not None:
        extra["GEMQ_PROFILE"] = profile
    address = f"http://{'[' + host + ']' if ':' in host else host}:{port}".replace("//0.0.0.0", "//127.0.0.1").replace("[::]", "[::1]")
    if (path / "manifest.json").is_file():
        manifest = efficient_gemma.read_manifest(path)
        served, own = name or manifest["served_model_name"], manifest["env"]
        model_id = str(checkpoint.absolute()) if checkpoint else manifest["model_id"]
        command = tuple(str(python) if part in ("python", "python3") else part for part in manifest["serve"])
        environment = {**own, "MODEL_ID": model_id, "SERVED_MODEL_NAME": served, "HOST": host, "PORT": str(port), **extra}
        return Launch(command, path, environment, address, served)
    script = next((file for file in (path / "engine" / "launch.sh", path / "launch.sh") if file.is_file()), None)
    if script is not None:
        if host not in ("127.0.0.1", "localhost"):
            raise UsageError(f"--host is {host}, and launch.sh listens on 127.0.0.1 alone, as LowBArena wants it", "leave --host out")
        return _plan_lowbarena(path, script, port, name, checkpoint, extra)
    if not (path / "config.json").is_file():
        raise UsageError(f"{path} is neither a checkpoint (config.json) nor a submission (manifest.json, engine/launch.sh)",
                         "give the directory that gemq quantize or gemq package wrote")
    served = name or path.name
    environment = {"MODEL_ID": str(path), "SERVED_MODEL_NAME": served, "HOST": host, "PORT": str(port), **extra}
    return Launch((str(python), str(ROOM / "serve.py")), path, environment, address, served)


def _plan_lowbarena(path: Path, script: Path, port: int, name: str | None, checkpoint: Path | None, extra: dict[str, str]) -> Launch:
    artifact, served, kv_cache = str(checkpoint.absolute()) if checkpoint else "", name or "model", "auto"
    if (path / "submission.json").is_file():
        submission = lowbarena.read_submission(path)
        served, kv_cache = name or submission.task_id, submission.serving.kv_cache_dtype
        artifact = artifact or str(_fetched(submission.artifact))
    if not artifact:
        raise UsageError(f"{path} names no checkpoint", "give --checkpoint DIR")
    environment = {"ARTIFACT": artifact, "TOKENIZER": artifact, "PORT": str(port), "SERVED_NAME": served, "MAX_MODEL_LEN": "4096",
                   "GPU_MEMORY_UTILIZATION": "0.9", "KV_CACHE_DTYPE": kv_cache, **extra}
    own = ("MAX_MODEL_LEN", "GPU_MEMORY_UTILIZATION", "KV_CACHE_DTYPE", "GENERATION_CONFIG", "LANGUAGE_MODEL_ONLY")
    environment |= {key: os.environ[key] for key in own if key in os.environ}
    return Launch(("bash", str(script), "serve"), script.parent, environment, f"http://127.0.0.1:{port}", served)


def _fetched(artifact: lowbarena.Artifact) -> Path:
    """The artifact at its very commit, fetched from the Hub as the arena does."""
    from gemq.hub import fetch

    try:
        return fetch(artifact.uri, artifact.revision)[0]
    except GemqError as error:
        raise type(error)(error.message, f"{error.next_step}; or give --checkpoint DIR") from None


def _environment(python: Path, launch: Launch) -> dict[str, str]:
    made = {key: value for key, value in os.environ.items() if key not in ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV")}
    made["PATH"] = f"{python.parent}{os.pathsep}{made.get('PATH', os.defpath)}"  # vLLM calls ninja, launch.sh looks for vllm
    return {**made, **launch.environment}


def _failure(what: str, code: int | None, log: Path) -> GemqError:
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    found = diagnose(text)
    lines = "".join(f"\n    {line}" for line in found.lines)
    ended = "" if code is None else f" (exit {code})"
    kind = {2: UsageError, 4: IntegrityError}.get(code or 0, GemqError)
    return kind(f"{what}{ended}{':' + lines if lines else ''}", found.mend or f"read the log, {log}")


def _wait(process: subprocess.Popen[bytes], launch: Launch, log: Path, timeout: float, deadline: float) -> None:
    """Return when /v1/models answers; raises with the log's reason when the server ends, or hasn't answered by `deadline` (`timeout` seconds)."""
    with output.progress("starting vLLM", len(PHASES), "steps") as advance, open(log, "rb") as reading, ExitStack() as stack:
        client = stack.enter_context(open_client(launch.address, timeout=5))
        reached, text = 0, ""
        while True:
            text = (text + reading.read().decode(errors="replace"))[-100_000:]
            while reached < len(PHASES) and re.search(PHASES[reached][1], text):
                advance(1, PHASES[reached][0])
                reached += 1
            if process.poll() is not None:
                raise _failure(f"{Path(launch.command[1]).name} did not start", process.returncode, log)
            try:
                answer = client.get("/v1/models")
                if advice := key_advice(answer.status_code):
                    raise UsageError(f"{launch.address} wants another API key (it answered {answer.status_code})", advice)
                if answer.status_code == 200 and launch.model in [model.get("id") for model in answer.json()["data"]]:
                    return
            except (httpx.TransportError, ValueError, KeyError):
                pass  # not open yet
            if time.monotonic() > deadline:
                raise _failure(f"{launch.address} does not answer after {timeout:.0f} s", None, log)
            time.sleep(0.25)


@contextmanager
def starting(path: Path, *, port: int | None = None, host: str = "127.0.0.1", profile: str | None = None, name: str | None = None,
             checkpoint: Path | None = None, python: Path | None = None, log: Path | None = None, timeout: float = START_TIMEOUT_SECONDS,
             verify: bool = True, environment: Mapping[str, str] | None = None) -> Iterator[Callable[[], Server]]:
    """Start a server, and yield what waits for it and returns it: several can be started before the first is waited for.

    It ends with the block, ready or not. `timeout` counts from here. See `serving` for the rest.
    """
    with ExitStack() as stack:
        interpreter = find_python(python)
        port = port or free_port(host)
        try:
            require_free_port(host, port)  # serve.py looks too, but what listens there might answer for it meanwhile
        except Refused as error:
            raise UsageError(str(error).partition(";")[0], "choose another --port, or stop what listens there") from None
        launch = plan(path, python=interpreter, host=host, port=port, profile=profile, name=name, checkpoint=checkpoint, verify=verify)
        if log is None:
            log = Path(tempfile.mkstemp(prefix="gemq-serve-", suffix=".log")[1])
            own_log: Path | None = log
        else:
            own_log = None
        try:
            sink = stack.enter_context(open(log, "wb"))
        except OSError as error:
            raise UsageError(f"can't write the log {log}: {error.strerror}", "choose another --log") from None
        process = _start(interpreter, launch, sink.fileno(), dict(environment or {}))
        server, deadline = Server(launch.address, launch.model, process.pid, log, process), time.monotonic() + timeout

        def ready() -> Server:
            _wait(process, launch, server.log, timeout, deadline)
            return server

        try:
            yield ready
        finally:
            stop(process)
        if own_log is not None:
            own_log.unlink(missing_ok=True)


@contextmanager
def serving(path: Path, *, port: int | None = None, host: str = "127.0.0.1", profile: str | None = None, name: str | None = None,
            checkpoint: Path | None = None, python: Path | None = None, log: Path | None = None, timeout: float = START_TIMEOUT_SECONDS,
            verify: bool = True, environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """A Server for the checkpoint or submission `path`, ended with the block, whatever ends the block.

    `environment` is added to the engine's, such as GEMQ_EXTRA_ARGS. Without `port` a free one is taken; without `log` the log goes when the
    block ends well. Raises UsageError, IntegrityError or GemqError with the log's error lines when the server doesn't start.
    """
    with starting(path, port=port, host=host, profile=profile, name=name, checkpoint=checkpoint, python=python, log=log, timeout=timeout,
                  verify=verify, environment=environment) as ready:
        yield ready()


def _start(python: Path, launch: Launch, sink: int, extra: dict[str, str]) -> subprocess.Popen[bytes]:
    command: Sequence[str] = [sys.executable, "-I", str(ROOM / "watchdog.py"), str(GRACE_SECONDS), *launch.command]
    # its standard input is a pipe whose other end only this process holds: it closes when this process is gone
    return subprocess.Popen(command, cwd=launch.folder, env=_environment(python, launch) | extra, stdin=subprocess.PIPE, stdout=sink,
                            stderr=sink, start_new_session=True)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server with everything that it started; returns when nothing of it is left, or raises KeyboardInterrupt then if that came."""
    interrupted = False
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        while process.poll() is None:
            try:
                process.wait(GRACE_SECONDS + 15)
            except subprocess.TimeoutExpired:
                process.kill()
            except KeyboardInterrupt:
                interrupted = True  # Ctrl-C doesn't hurry it: it has its own deadline
    if process.stdin is not None:
        process.stdin.close()
    if interrupted:
        raise KeyboardInterrupt

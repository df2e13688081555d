"""A stand-in for vLLM that starts in a moment, and `gemq serve` in a process of its own."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

# Answers as much of vLLM's HTTP as a start looks at; FAKE_* variables make it misbehave.
FAKE_ENGINE = '''
import http.server, json, os, signal, subprocess, sys, threading, time

arguments = sys.argv[1:]
if arguments[:1] == ["serve"]:
    arguments[:2] = ["--model", arguments[1]]
value = dict(zip(arguments, arguments[1:], strict=False))
note = os.environ.get("FAKE_NOTE")
if note:
    with open(note, "w") as file:
        json.dump({"arguments": arguments, "environment": dict(os.environ), "pid": os.getpid(), "uid": os.getuid()}, file)
print("(APIServer pid=1) INFO 11-29 17:00:00 [api_utils.py:286] non-default args: {}", flush=True)
if os.environ.get("FAKE_FAIL"):
    print("(EngineCore pid=2) ERROR 11-29 17:00:01 [core.py:1] " + os.environ["FAKE_FAIL"], flush=True)
    sys.exit(1)
if os.environ.get("FAKE_DEAF"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ.get("FAKE_CHILD"):  # a grandchild that left its group and its session, as an engine's workers may
    child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"],
                             start_new_session=True)
    with open(os.environ["FAKE_CHILD"], "w") as file:
        file.write(str(child.pid))
dead = False


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"data": [{"id": value["--served-model-name"]}]}).encode()
        key = os.environ.get("VLLM_API_KEY")  # as vLLM does, it demands this key for what is under /v1
        refused = key and self.path.startswith("/v1") and self.headers.get("Authorization") != "Bearer " + key
        self.send_response(401 if refused else 503 if dead and self.path == "/health" else 200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer((value["--host"], int(value["--port"])), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print("INFO:     Application startup complete.", flush=True)
if os.environ.get("FAKE_DIE_AFTER"):
    time.sleep(float(os.environ["FAKE_DIE_AFTER"]))
    print("(EngineCore pid=2) ERROR 11-29 17:00:09 [core.py:1] RuntimeError: the worker died of a test", flush=True)
    if os.environ.get("FAKE_HALF_DEAD"):
        dead = True
        time.sleep(600)
    sys.exit(1)
time.sleep(600)
'''


def seal(folder: Path) -> None:
    """Write the seal of `folder` in its canonical form."""
    files = [{"executable": False, "path": str(path.relative_to(folder)), "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
              "size": path.stat().st_size} for path in sorted(folder.rglob("*")) if path.is_file()]
    (folder / "gemq.seal.json").write_text(json.dumps({"files": files, "version": 1}, sort_keys=True, separators=(",", ":")))


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(true: Callable[[], object], seconds: float, what: str) -> None:
    """Wait for `true()`; fails the test after `seconds`."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.05)


class GemqServe:
    """`gemq serve` as a user runs it, in a process of its own."""

    def __init__(self, *arguments: str | Path, environment: dict[str, str] | None = None, cwd: Path) -> None:
        self.out, self.err = cwd / "gemq.out", cwd / "gemq.err"
        inherited = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}  # a user hasn't set it
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUN_SERVE, *map(str, arguments), "--json"], cwd=cwd, env={**inherited, **(environment or {})},
            stdout=open(self.out, "w"), stderr=open(self.err, "w"), start_new_session=True)  # noqa: SIM115

    def address(self, seconds: float) -> dict[str, object]:
        """What it printed when the server answered."""
        def printed() -> bool:
            if self.process.poll() is not None:
                pytest.fail(f"gemq serve ended with {self.process.returncode}: {self.err.read_text()}")
            return self.out.read_text().rstrip().endswith("}")

        wait_until(printed, seconds, f"gemq serve prints its address; so far {self.err.read_text()}")
        found: dict[str, object] = json.loads(self.out.read_text())
        return found

    def end(self, number: signal.Signals, seconds: float = 60) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(seconds)


# the command alone, so that these tests need no other room
RUN_SERVE = """
import sys
import typer
from gemq import output
from gemq.commands.serve import register
from gemq.errors import GemqError
app = typer.Typer()
app.callback()(lambda: None)
register(app)
try:
    app(["serve", *sys.argv[1:]], standalone_mode=False)
except GemqError as error:
    output.error(error.message, error.next_step)
    sys.exit(error.exit_code)
"""

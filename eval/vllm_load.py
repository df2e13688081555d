"""Loads driven by vLLM's own benchmark client (`vllm bench serve`), in a process of vLLM's environment; what it reads is checked here.

Requests, times and clocks are vLLM's: a request starts when its client says so and ends with the last chunk that carries a token. Tokens are
counted from ids in the bytes that came, as with gemq's own client. It always streams.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from gemq import output
from gemq.errors import GemqError, StoppedSafely, UsageError
from gemq.eval.endpoint import Endpoint
from gemq.eval.load import Finished, read_answer, request_body
from gemq.eval.wire import Answer
from gemq.eval.workloads import Load, Prompt
from gemq.http_client import READ_SECONDS, child_environment, is_loopback

CLIENTS = ("auto", "vllm", "gemq")
START_SECONDS = 300.0  # it imports vLLM
_SCRIPT = Path(__file__).resolve().with_name("vllm_client.py")
_OWN = ("max_tokens", "stream", "stream_options", "prompt", "messages", "model")  # what vLLM's client puts into a body itself


class _Lines:
    """The lines of a process's standard output, each with a deadline."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process, self._rest, self._read = process, b"", 0

    def next(self, seconds: float) -> dict[str, Any] | None:
        """The next line; None where the process has ended or said nothing for `seconds`."""
        assert self._process.stdout is not None
        parts = [self._rest]
        deadline = time.monotonic() + seconds
        while b"\n" not in parts[-1]:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._process.stdout.fileno(), 1 << 20) if ready else b""
            if not data:
                return None
            parts.append(data)
        line, _, self._rest = b"".join(parts).partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found


class VllmClient:
    """vLLM's client in a process of its own, ready for loads; `name` says its version. A context manager."""

    def __init__(self, python: Path) -> None:
        """Nothing is started yet."""
        self.python = python
        self.name = "vllm"
        self._jobs = 0

    def __enter__(self) -> VllmClient:
        output.note("starting vLLM's benchmark client")
        environment = {key: value for key, value in child_environment().items() if key not in ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV")}
        self._log = tempfile.TemporaryFile()
        # -I: else modules beside the script would stand in for the standard library's of the same name
        self._process = subprocess.Popen([str(self.python), "-I", str(_SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
                                         env=environment, start_new_session=True)  # fmt: skip
        self._lines = _Lines(self._process)
        first = self._lines.next(START_SECONDS)
        if first is None or first.get("kind") != "ready":
            why = self._said()
            self.__exit__()
            raise UsageError(f"vLLM's benchmark client does not start with {self.python}: {why}",
                             "choose --client gemq, or give --python the interpreter of an environment with vLLM")  # fmt: skip
        self.name = f"vllm {first['version']}"
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def _said(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1][:300] if lines else "it says nothing"

    def drive(self, endpoint: Endpoint, load: Load, prompts: Sequence[Prompt], todo: Sequence[int], done: Callable[[Finished], None], *,
              run: int = 0, segment: int = 0) -> None:  # fmt: skip
        """As load.drive: send the prompts at the indices `todo`, warm-ups first; `done` is called with each answer. Raises as that does."""
        assert self._process.stdin is not None
        beginning = time.perf_counter()
        self._process.stdin.write((json.dumps(_job(endpoint, load, prompts, todo)) + "\n").encode())
        self._process.stdin.flush()
        self._jobs += 1
        while True:
            line = self._lines.next(READ_SECONDS)
            if line is not None and line["job"] != self._jobs:
                continue  # of a load that failed before its other requests were answered
            if line is None or line["kind"] == "failed":
                why = self._said() if line is None else line["error"]
                raise StoppedSafely(f"vLLM's benchmark client stopped at {load.name}: {why}", "run the same command again, or with --client gemq")
            if line["kind"] == "end":
                return
            done(_finished(endpoint, load, prompts[line["index"]], line, beginning, run, segment))


def _job(endpoint: Endpoint, load: Load, prompts: Sequence[Prompt], todo: Sequence[int]) -> dict[str, Any]:
    path, body = request_body(endpoint, load, prompts[todo[0]])
    warmups = range(len(prompts) - 1, max(-1, len(prompts) - 1 - load.warmups), -1)

    def sent(index: int) -> dict[str, Any]:
        return {"index": index, "text": prompts[index].text, "tokens": prompts[index].tokens}

    return {"api_url": endpoint.base_url + path, "base_url": endpoint.base_url.removesuffix("/v1"), "direct": is_loopback(endpoint.base_url),
            "model": endpoint.model, "chat": load.chat,
            "output_tokens": load.output_tokens, "in_flight": load.in_flight, "warmups": [sent(index) for index in warmups],
            "prompts": [sent(index) for index in todo], "extra_body": {key: value for key, value in body.items() if key not in _OWN}}  # fmt: skip


def _finished(endpoint: Endpoint, load: Load, prompt: Prompt, line: dict[str, Any], beginning: float, run: int, segment: int) -> Finished:
    """The request of a line, checked; raises as load.read_answer does, and StoppedSafely where vLLM's client got no answer."""
    where = f"prompt {prompt.id} of {load.name}"
    started, ended = line["started"], line["started"] + line["latency"]
    if not line["success"] and line["status"] in (0, 200):
        why = (line["error"].strip().splitlines() or ["no answer"])[-1]
        raise StoppedSafely(f"{endpoint.name} stopped answering at {where}: {why}",
                            "see the server's log, start it again, and run the same command again")  # fmt: skip
    pieces = tuple((second, piece.encode()) for second, piece in line["pieces"])
    response = httpx.Response(line["status"], content=b"".join(piece for _, piece in pieces))
    ids, echoed, length, arrivals = read_answer(Answer(started, ended, response, pieces), endpoint, load, prompt, where)
    return Finished(load.name, run, segment, line["index"], prompt.id, started - beginning, ended - beginning, length,
                    tuple(echoed) if isinstance(echoed, list) else None, tuple(ids), tuple(arrivals))  # fmt: skip


def drives(kind: str, load: Load) -> bool:
    """Whether vLLM's client drives `load` under --client `kind`: it only streams, so "auto" leaves it the loads that are streamed."""
    return kind == "vllm" or (kind == "auto" and load.streamed)


@contextlib.contextmanager
def opened_client(kind: str, loads: Sequence[Load], python: Path | None) -> Iterator[VllmClient | None]:
    """vLLM's client where --client `kind` wants it for one of `loads`; None where gemq's own drives them all.

    Raises UsageError for an unknown kind, and where "vllm" is asked for and can't be had; under "auto" that is told.
    """
    if kind not in CLIENTS:
        raise UsageError(f"--client {kind!r} is unknown", f"valid are {', '.join(CLIENTS)}")
    if not any(drives(kind, load) for load in loads):
        yield None
        return
    from gemq.serve.server import find_python

    with contextlib.ExitStack() as stack:
        client: VllmClient | None = None
        try:
            client = stack.enter_context(VllmClient(find_python(python)))
        except GemqError as error:
            if kind == "vllm":
                raise
            output.note(f"gemq's own client drives the load: {error.message}")
        yield client

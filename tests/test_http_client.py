"""Every command asks a served model alike: past proxies on this machine, with the API key, which is never printed and reaches no other host."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import stamina
import typer
from typer.testing import CliRunner

from gemq.commands import serve as commands
from gemq.errors import GemqError, UsageError
from gemq.eval.endpoint import Endpoint
from gemq.eval.memory import MemoryWatch, kv_cache_tokens
from gemq.eval.wire import Wire
from gemq.http_client import child_environment, headers, is_loopback, open_client
from gemq.serve import contract
from gemq.serve.server import Server

KEY = "a-secret-key-1234"


class Recorder:
    """A server that keeps each request's line and headers, and answers as `answer` says: (status, headers)."""

    def __init__(self, status: int = 200, location: str | None = None, *, demands_key: bool = False) -> None:
        self.seen: list[tuple[str, dict[str, str]]] = []
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                recorder.seen.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
                refused = demands_key and self.headers.get("Authorization") != f"Bearer {KEY}"
                body = json.dumps({"data": [{"id": "m", "max_model_len": 64}], "choices": [{}], "usage": {"prompt_tokens": 7}}).encode()
                self.send_response(401 if refused else status)
                if location is not None:
                    self.send_header("Location", location)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = do_CONNECT = answer

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> Recorder:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """A proxy that every variable names, and that keeps what reaches it."""
    with stamina.set_testing(True, attempts=1), Recorder(502) as found:
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, found.url)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("VLLM_API_KEY", KEY)
        yield found


def gemq_check(url: str) -> Any:
    app = typer.Typer()
    app.callback()(lambda: None)
    commands.register(app)
    return CliRunner().invoke(app, ["check", url, "--modality", "text"])


def ask_everyhow(url: str) -> None:
    """One request by each of gemq's ways to ask a server."""
    Endpoint.open(url)
    contract.check(contract.Endpoint(url), ("text",))
    gemq_check(url)
    kv_cache_tokens(f"{url}/v1")
    Server(url, "m", 0, None, type("Running", (), {"poll": lambda self: None})()).require_alive()  # type: ignore[arg-type]

    async def timed() -> None:
        wire = Wire(f"{url}/v1")
        await wire.post("/completions", b"{}", streamed=False, meanwhile=lambda: None)
        await wire.close()

    asyncio.run(timed())
    import os

    with MemoryWatch(os.getpid(), f"{url}/v1"):
        pass


def test_a_server_on_this_machine_is_asked_past_the_proxy_and_with_the_key(proxy: Recorder) -> None:
    with Recorder(demands_key=True) as server:
        ask_everyhow(server.url)
        ask_everyhow(server.url.replace("127.0.0.1", "localhost"))
    assert proxy.seen == []
    assert {path for path, _ in server.seen} >= {"/v1/models", "/v1/completions", "/v1/chat/completions", "/metrics", "/health"}
    assert {headers.get("authorization") for _, headers in server.seen} == {f"Bearer {KEY}"}


def test_another_host_is_asked_through_the_proxy(proxy: Recorder) -> None:
    with pytest.raises(GemqError):
        Endpoint.open("http://gemq.invalid:8000")
    with pytest.raises(GemqError):
        contract.Endpoint("http://gemq.invalid:8000")
    assert [path for path, _ in proxy.seen] == ["http://gemq.invalid:8000/v1/models"] * 2


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_not_followed_and_the_key_stays(proxy: Recorder, status: int) -> None:
    with Recorder() as other, Recorder(status, f"{other.url}/v1/models") as server:
        for ask in (Endpoint.open, contract.Endpoint):
            with pytest.raises(UsageError):
                ask(server.url)
        assert other.seen == []


def test_a_wrong_or_missing_key_is_said_with_the_variable_and_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    with Recorder(demands_key=True) as server:
        for key in ("", "a-wrong-key-5678"):
            monkeypatch.setenv("VLLM_API_KEY", key)
            for ask in (Endpoint.open, contract.Endpoint):
                with pytest.raises(UsageError) as refused:
                    ask(server.url)
                assert "VLLM_API_KEY" in refused.value.next_step
                assert "5678" not in refused.value.message + refused.value.next_step
            found = gemq_check(server.url)
            assert isinstance(found.exception, UsageError)
            assert "5678" not in found.output


@pytest.mark.parametrize("key", ["secret\n", "sec\r\nX-Other: ret", "secrét", " secret", "\x00secret"])
def test_a_key_that_no_header_carries_is_refused_without_being_printed(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setattr("gemq.http_client.os.environ", {"VLLM_API_KEY": key})
    for ask in (headers, child_environment, lambda: Endpoint.open("http://127.0.0.1:9"), lambda: contract.Endpoint("http://127.0.0.1:9")):
        with pytest.raises(UsageError) as refused:
            ask()
        assert "ret" not in refused.value.message
        assert "sec" not in refused.value.message.replace("character", "")


def test_the_users_openai_key_is_passed_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of-openai")
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert "OPENAI_API_KEY" not in child_environment()
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    assert child_environment()["OPENAI_API_KEY"] == KEY


@pytest.mark.parametrize(("url", "expected"), [
    ("http://127.0.0.1:1", True), ("http://127.9.9.9", True), ("http://localhost:8000/v1", True), ("http://LOCALHOST.", True),
    ("http://a.localhost", True), ("http://[::1]:8000", True), ("http://[::ffff:127.0.0.1]", True), ("http://0.0.0.0:8000", True),
    ("http://10.0.0.1", False), ("http://localhost.example.org", False), ("http://127.0.0.1.example.org", False), ("https://example.org", False),
    ("http://[2001:db8::1]", False)])  # fmt: skip
def test_what_is_this_machine_itself(url: str, expected: bool) -> None:
    assert is_loopback(url) is expected
    with open_client(url) as client:
        assert client.trust_env is not expected

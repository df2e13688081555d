"""A server that speaks as much of vLLM's API as gemq's measurements ask for, at a set speed, from a made-up language: no model, no GPU.

It measures the client that measures (benchmarks/client.py), and its `Engine` is what tests change to make servers that cheat.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

VOCABULARY = 512
BOS = 2


class Engine:
    """The made-up language: what follows depends on the first and the last two ids. Subclass it to answer otherwise."""

    name = "stub"
    max_model_len = 4096
    vocabulary = VOCABULARY
    kv_cache_tokens = 1_000_000
    chat_template = True

    def __init__(self, tokens_per_second: float = 0.0) -> None:
        self.tokens_per_second = tokens_per_second

    def next_id(self, ids: list[int]) -> int:
        """The id that follows `ids` under greedy decoding."""
        return (ids[-1] * 31 + (ids[-2] if len(ids) > 1 else 0) * 7 + ids[0] * 3 + 13) % self.vocabulary

    def tokenize(self, text: str) -> list[int]:
        """BOS and the text's bytes."""
        return [BOS, *(4 + byte for byte in text.encode())]

    def decode(self, ids: list[int], count: int) -> list[int]:
        """`count` ids after `ids`."""
        made = list(ids)
        for _ in range(count):
            made.append(self.next_id(made))
        return made[len(ids) :]

    def prompt_logprobs(self, ids: list[int]) -> list[dict[str, Any] | None]:
        """vLLM's prompt_logprobs: the first null, then each token and the likeliest one."""
        entries: list[dict[str, Any] | None] = [None]
        for position in range(1, len(ids)):
            best, own = self.next_id(ids[:position]), ids[position]
            moved = (ids[0] * 5 + ids[position - 1]) % 90 / 1000
            entry = {str(best): {"logprob": -0.1 - moved, "rank": 1}}
            if own != best:
                entry[str(own)] = {"logprob": -3.0 - moved, "rank": 2}
            entries.append(entry)
        return entries

    def seconds(self, ids: list[int], count: int) -> float:
        """How long answering takes."""
        return count / self.tokens_per_second if self.tokens_per_second else 0.0

    def usage(self, prompt: list[int], made: list[int], asked: int) -> dict[str, int]:
        """What the answer says that it cost."""
        return {"prompt_tokens": len(prompt), "completion_tokens": len(made), "total_tokens": len(prompt) + len(made)}

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any], float]:
        """Status, body and seconds for a request that is not streamed (the events of a stream are made of it)."""
        if body.get("model") != self.name:
            return 404, {"error": {"message": f"The model `{body.get('model')}` does not exist.", "code": 404}}, 0.0
        asked = int(body.get("max_completion_tokens") or body.get("max_tokens", 16))
        if path.endswith("/chat/completions") and not self.chat_template:
            return 400, {"error": {"message": "you must provide a chat template if the tokenizer does not define one.", "code": 400}}, 0.0
        given = body["messages"][0]["content"] if path.endswith("/chat/completions") else body.get("prompt")
        if isinstance(given, list) and given and isinstance(given[0], dict):  # parts of a message
            if any(part["type"] != "text" for part in given):
                return 400, {"error": {"message": "only text is supported", "code": 400}}, 0.0
            given = "".join(part["text"] for part in given)
        if not isinstance(given, (str, list)) or not given or body.get("temperature", 0) < 0:
            return 400, {"error": {"message": "the prompt or the temperature is invalid", "code": 400}}, 0.0
        ids = list(given) if isinstance(given, list) else self.tokenize(given)[0 if body.get("add_special_tokens", True) else 1 :]
        if len(ids) + asked > self.max_model_len:
            return 400, {"error": {"message": f"This model's maximum context length is {self.max_model_len} tokens.", "code": 400}}, 0.0
        if max(ids) >= self.vocabulary:
            return 400, {"error": {"message": f"Token id {max(ids)} is out of vocabulary", "code": 400}}, 0.0
        made = self.decode(ids, asked)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "text": ""}
        document: dict[str, Any] = {"model": self.name, "choices": [choice], "usage": self.usage(ids, made, asked)}
        if body.get("return_token_ids"):
            choice["token_ids"] = made
            (document if path.endswith("/chat/completions") else choice)["prompt_token_ids"] = ids
        if body.get("prompt_logprobs") is not None:
            choice["prompt_logprobs"] = [entry and _filled(entry, body["prompt_logprobs"]) for entry in self.prompt_logprobs(ids)]
        return 200, document, self.seconds(ids, asked)


def _filled(entry: dict[str, Any], count: int) -> dict[str, Any]:
    """`entry` with unlikely tokens added until it has `count`: vLLM tells as many as it was asked for."""
    others = (str(token) for token in range(VOCABULARY) if str(token) not in entry)
    ranks = range(len(entry) + 1, count + 1)
    return entry | {token: {"logprob": -15.0 - 0.01 * rank, "rank": rank} for token, rank in zip(others, ranks, strict=False)}


class StubServer:
    """An Engine behind HTTP/1.1 on a free port of the loopback; a context manager that serves from a thread.

    `service_seconds` sums what requests took inside; `dies_after` completions every connection is cut, in the middle of an answer.
    """

    def __init__(self, engine: Engine, dies_after: int | None = None) -> None:
        self.engine, self.dies_after = engine, dies_after
        self.completions = 0
        self.service_seconds = 0.0
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve_in_thread, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> StubServer:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve_in_thread(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self.start())
        self._ready.set()
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def start(self, port: int = 0) -> None:
        """Listen on `port`, or on a free one."""
        server = await asyncio.start_server(self._connection, "127.0.0.1", port)
        self.port = server.sockets[0].getsockname()[1]

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                method, path, raw = await _request(reader)
                started = time.perf_counter()
                if method == "GET":
                    await self._get(writer, path)
                    continue
                self.completions += 1
                dying = self.dies_after is not None and self.completions > self.dies_after
                body = json.loads(raw)
                status, document, seconds = self.engine.answer(path, body)
                if dying:
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
                    return
                if status == 200 and body.get("stream"):
                    await _stream(writer, document, started, seconds)
                else:
                    await _sleep_until(started + seconds)
                    _write(writer, status, document)
                await writer.drain()
                self.service_seconds += time.perf_counter() - started
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _get(self, writer: asyncio.StreamWriter, path: str) -> None:
        if path == "/stats":
            _write(writer, 200, {"completions": self.completions, "service_seconds": self.service_seconds})
        elif path == "/metrics":
            text = f'vllm:kv_cache_usage_perc{{engine="0"}} {min(1.0, self.completions / 1000)}\nvllm:num_preemptions_total{{engine="0"}} 0.0\n'
            text += f'vllm:cache_config_info{{kv_cache_size_tokens="{self.engine.kv_cache_tokens}"}} 1.0\n'
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
        elif path == "/v1/models":
            _write(writer, 200, {"data": [{"id": self.engine.name, "max_model_len": self.engine.max_model_len}]})
        else:
            _write(writer, 200 if path == "/health" else 404, {})
        await writer.drain()


async def _request(reader: asyncio.StreamReader) -> tuple[str, str, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, _ = head[0].split(" ")
    length = next((int(line.partition(":")[2]) for line in head[1:] if line.lower().startswith("content-length:")), 0)
    return method, path, await reader.readexactly(length) if length else b""


def _write(writer: asyncio.StreamWriter, status: int, document: dict[str, Any]) -> None:
    raw = json.dumps(document).encode()
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw)


async def _sleep_until(second: float) -> None:
    """Return at `second` of the performance counter, to some ten microseconds: the event loop's own clock has milliseconds."""
    while (left := second - time.perf_counter()) > 0:
        await asyncio.sleep(left - 0.002 if left > 0.003 else 0)


async def _events(document: dict[str, Any], started: float, seconds: float) -> AsyncIterator[bytes]:
    choice = document["choices"][0]
    ids = choice.get("token_ids", [])
    for number, token in enumerate(ids):
        await _sleep_until(started + seconds * (number + 1) / len(ids))
        last = number + 1 == len(ids)
        event: dict[str, Any] = {"model": document["model"], "choices": [{
            "index": 0, "text": "x", "delta": {"content": "x"}, "token_ids": [token],
            "finish_reason": choice["finish_reason"] if last else None}]}  # fmt: skip
        if number == 0:
            event["prompt_token_ids"] = document.get("prompt_token_ids") or choice.get("prompt_token_ids")
        yield json.dumps(event).encode()
    yield json.dumps({"choices": [], "usage": document["usage"]}).encode()
    yield b"[DONE]"


async def _stream(writer: asyncio.StreamWriter, document: dict[str, Any], started: float, seconds: float) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    async for event in _events(document, started, seconds):
        raw = b"data: " + event + b"\n\n"
        writer.write(f"{len(raw):x}\r\n".encode() + raw + b"\r\n")
        await writer.drain()
    writer.write(b"0\r\n\r\n")


async def _main(tokens_per_second: float) -> None:
    server = StubServer(Engine(tokens_per_second))
    await server.start()
    print(server.port, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(float(sys.argv[1])))

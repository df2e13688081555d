"""A strict stand-in for vLLM's OpenAI server, backed by a small model: true log-probabilities, vLLM's refusals, and ways to cheat.

It refuses what vLLM refuses: an unknown model or path (404), max_tokens below 1, prompt_logprobs with streaming, ids beyond the
vocabulary, prompts that leave no room for a token (400). What it can't stand in for: the rounding of a served kernel.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from small import VOCABULARY, plain_log_softmax

Cheat = Callable[[dict[str, Any]], dict[str, Any]]


class StandIn:
    """A server on a free port of the loopback; use as a context manager. `cheat` changes the body of a good completion."""

    def __init__(self, model: Any, cheat: Cheat | None = None, max_model_len: int = 256) -> None:
        self.model, self.cheat, self.max_model_len = model, cheat, max_model_len
        self.name = "small-gemma"
        self.names = [self.name]
        self.requests: list[dict[str, Any]] = []
        self.cut_after: int | None = None  # completions before every connection is cut in the middle of a body
        self.fail_next = 0  # completions that will answer 500
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> StandIn:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name, "object": "model", "max_model_len": self.max_model_len} for name in self.names]}

    def complete(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """The status and body for a completion request."""
        if body.get("model") not in self.names:
            return 404, _error(f"The model `{body.get('model')}` does not exist.")
        prompt = body.get("prompt")
        if not isinstance(prompt, list) or not prompt or not all(type(token) is int for token in prompt):
            return 400, _error("prompt must be a list of token ids")
        if body.get("max_tokens", 16) < 1:
            return 400, _error(f"max_tokens must be at least 1, got {body['max_tokens']}.")
        if body.get("stream") and body.get("prompt_logprobs") is not None:
            return 400, _error("`prompt_logprobs` are not available when `stream=True`.")
        if max(prompt) >= VOCABULARY or min(prompt) < 0:
            return 400, _error(f"Token id {max(prompt)} is out of vocabulary")
        if len(prompt) + body.get("max_tokens", 16) > self.max_model_len:
            return 400, _error(f"This model's maximum context length is {self.max_model_len} tokens.")
        choice: dict[str, Any] = {"index": 0, "text": "x", "finish_reason": "length"}
        if body.get("prompt_logprobs") is not None:
            choice["prompt_logprobs"] = self._prompt_logprobs(prompt, body["prompt_logprobs"])
        return 200, {"object": "text_completion", "model": self.name, "choices": [choice], "usage": {"prompt_tokens": len(prompt)}}

    def _prompt_logprobs(self, prompt: list[int], top: int) -> list[dict[str, Any] | None]:
        entries: list[dict[str, Any] | None] = [None]
        table = plain_log_softmax(self.model, prompt)
        for row, token in zip(table, prompt[1:], strict=True):
            ids = {token, *row.topk(top).indices.tolist()}
            ranks = {i: int((row > row[i]).sum()) + 1 for i in ids}
            entries.append({str(i): {"logprob": row[i].item(), "rank": ranks[i], "decoded_token": f"t{i}"} for i in ids})
        return entries

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/v1/models":
                    self.answer(200, stand_in.models())
                else:
                    self.answer(404, {"detail": "Not Found"})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path != "/v1/completions":
                    self.answer(404, {"detail": "Not Found"})
                    return
                stand_in.requests.append(body)
                if stand_in.fail_next:
                    stand_in.fail_next -= 1
                    self.answer(500, _error("the engine is busy dying"))
                    return
                status, answer = stand_in.complete(body)
                if status == 200 and stand_in.cheat is not None:
                    answer = stand_in.cheat(answer)
                cut = stand_in.cut_after is not None and len(stand_in.requests) > stand_in.cut_after
                self.answer(status, answer, cut)

            def answer(self, status: int, body: dict[str, Any], cut: bool = False) -> None:
                raw = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw[: len(raw) // 2] if cut else raw)
                self.close_connection = True

            def log_message(self, *_: object) -> None:
                pass

        return Handler


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "BadRequestError", "code": 400}}


def _entries(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return answer["choices"][0]["prompt_logprobs"]


def truncated(answer: dict[str, Any]) -> dict[str, Any]:
    """The last prompt token is left out."""
    _entries(answer).pop()
    return answer


def shifted(answer: dict[str, Any]) -> dict[str, Any]:
    """A BOS was added in secret: one more entry in front."""
    _entries(answer).insert(1, {"2": {"logprob": -0.1, "rank": 1}})
    return answer


def shifted_in_secret(answer: dict[str, Any]) -> dict[str, Any]:
    """A BOS was added and its entry hidden; only the usage tells."""
    answer["usage"]["prompt_tokens"] += 1
    return answer


def told_too_little(answer: dict[str, Any]) -> dict[str, Any]:
    """Fewer of the likeliest tokens than were asked for, at one position: what is left out can't diverge."""
    entry = _entries(answer)[-1]
    for key in list(entry)[2:]:
        if entry[key]["rank"] > 2:
            del entry[key]
    return answer


def without_target(answer: dict[str, Any]) -> dict[str, Any]:
    """The last token's entry holds another token."""
    _entries(answer)[-1] = {"319": {"logprob": -0.5, "rank": 1}}
    return answer


def first_not_null(answer: dict[str, Any]) -> dict[str, Any]:
    """The first token, which nothing precedes, has a log-probability."""
    _entries(answer)[0] = {"2": {"logprob": -0.1, "rank": 1}}
    return answer


def _with_value(value: Any) -> Cheat:
    def change(answer: dict[str, Any]) -> dict[str, Any]:
        for content in _entries(answer)[-1].values():
            content["logprob"] = value
        return answer

    return change


positive = _with_value(0.25)
not_a_number = _with_value(math.nan)
minus_infinity = _with_value(-math.inf)
clamped_infinity = _with_value(-9999.0)
textual = _with_value("-1.0")
boolean = _with_value(False)


def too_likely(answer: dict[str, Any]) -> dict[str, Any]:
    """Every entry holds a second token and both claim most of the probability."""
    for entry in _entries(answer)[1:]:
        entry.setdefault("319", {"logprob": -0.1, "rank": 1})
        for content in entry.values():
            content["logprob"] = -0.1
    return answer


def without_prompt_logprobs(answer: dict[str, Any]) -> dict[str, Any]:
    """A server that knows no prompt_logprobs."""
    del answer["choices"][0]["prompt_logprobs"]
    return answer


def null_entry(answer: dict[str, Any]) -> dict[str, Any]:
    """A null in the middle."""
    _entries(answer)[-1] = None  # type: ignore[call-overload]
    return answer


def no_choices(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without choices."""
    return {"object": "text_completion", "choices": []}

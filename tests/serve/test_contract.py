"""`gemq check`: an endpoint that keeps the contract passes every point; each way of breaking it is found by the point that is about it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import typer
from typer.testing import CliRunner

from gemq.commands import serve as commands
from gemq.errors import IntegrityError, UsageError
from gemq.serve import contract

VOCABULARY = 512


def next_id(ids: list[int]) -> int:
    """The stand-in's language: what follows depends on the last two ids."""
    return (ids[-1] * 31 + ids[-2] * 7 + 13) % VOCABULARY


class StandIn:
    """A well-behaved endpoint, but for one named fault."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.runs = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [] if self.fault == "unlisted" else [{"id": "m"}]})
        body = json.loads(request.content)
        if request.url.path == "/v1/chat/completions":
            return self.chat(body)
        return self.completion(body)

    def error(self, code: int, message: str) -> httpx.Response:
        if self.fault == "html error":
            return httpx.Response(code, text="<h1>no</h1>")
        return httpx.Response(500 if self.fault == "server error" else code, json={"error": {"message": message}})

    def chat(self, body: dict[str, Any]) -> httpx.Response:
        kinds = [part["type"] for part in body["messages"][0]["content"]]
        if f"no {kinds[-1]}" == self.fault:
            return self.error(400, f"{kinds[-1]} is not supported")
        tokens = 9 + sum(0 if self.fault == f"blind to {kind}" else 40 for kind in kinds if kind != "text")
        return httpx.Response(200, json={"choices": [{}], "usage": {"prompt_tokens": tokens}})

    def completion(self, body: dict[str, Any]) -> httpx.Response:
        prompt = body["prompt"]
        if body["model"] != "m":
            return self.error(404, "no such model")
        if isinstance(prompt, dict) or body.get("temperature", 0) < 0 or len(prompt) > 10_000:
            return self.error(400, "bad request")
        if isinstance(prompt, str):
            special = body.get("add_special_tokens", True) or self.fault == "always BOS"
            ids = [2] * special + [ord(char) for char in prompt]
        else:
            ids = [2] * (self.fault == "BOS to ids") + list(prompt)
        made: list[int] = []
        self.runs += 1
        count = body["max_tokens"] - (self.fault == "stops early" and body["max_tokens"] > 5)
        while len(made) < count:
            made.append(next_id(ids + made))
        if self.fault == "restless" and self.runs % 2 and made:
            made[-1] = (made[-1] + 1) % VOCABULARY
        choice: dict[str, Any] = {"text": "", "finish_reason": "length"}
        if body.get("return_token_ids") and self.fault != "no ids":
            choice |= {"token_ids": made, "prompt_token_ids": ids}
        if body.get("prompt_logprobs"):
            choice["prompt_logprobs"] = self.scores(ids)
        used = {"prompt_tokens": len(ids), "completion_tokens": len(made), "total_tokens": len(ids) + len(made)}
        if self.fault == "miscounts":
            used["total_tokens"] += 1
        return httpx.Response(200, json={"choices": [choice], "usage": used})

    def scores(self, ids: list[int]) -> list[dict[str, Any] | None]:
        entries: list[dict[str, Any] | None] = [None]
        for position in range(1, len(ids)):
            best = next_id(ids[:position]) if position > 1 else 0
            best = (best + 1) % VOCABULARY if self.fault == "other weights" else best
            entries.append({str(ids[position]): {"logprob": -3.0}} | {str(best): {"logprob": -0.1}})
        if self.fault == "no null":
            entries[0] = {str(ids[0]): {"logprob": -1.0}}
        if self.fault == "target missing":
            entries[3] = {"511": {"logprob": -0.1}}
        return entries[:-1] if self.fault == "one short" else entries


def endpoint(monkeypatch: pytest.MonkeyPatch, fault: str = "") -> contract.Endpoint:
    monkeypatch.setattr(contract, "open_client", lambda url, timeout: httpx.Client(transport=httpx.MockTransport(StandIn(fault))))
    return contract.Endpoint("http://here:1/v1/", vocabulary=VOCABULARY)


def test_an_endpoint_that_keeps_the_contract_passes_every_point(monkeypatch: pytest.MonkeyPatch) -> None:
    table = contract.check(endpoint(monkeypatch))
    assert [f"{point.name}: {point.seen}" for point in table if not point.kept] == []
    assert len(table) == len(contract.points()) == 13


@pytest.mark.parametrize(("fault", "point"), [
    ("unlisted", "the model is listed"),
    ("BOS to ids", "prompts of token ids"),
    ("no ids", "return_token_ids"),
    ("no null", "prompt_logprobs are complete"),
    ("target missing", "prompt_logprobs are complete"),
    ("one short", "prompt_logprobs are complete"),
    ("always BOS", "add_special_tokens: false"),
    ("stops early", "ignore_eos"),
    ("restless", "greedy decode repeats"),
    ("miscounts", "usage counts the ids"),
    ("other weights", "scoring and decoding agree"),
    ("no text", "text is answered"),
    ("no image_url", "image is answered"),
    ("blind to image_url", "image is answered"),
    ("no input_audio", "audio is answered"),
    ("blind to input_audio", "audio is answered"),
    ("html error", "errors are 4xx with JSON"),
    ("server error", "errors are 4xx with JSON"),
])
def test_each_fault_is_found_by_the_point_that_is_about_it(fault: str, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    end = endpoint(monkeypatch, fault)
    end.model = "m"
    broken = {row.name for row in contract.check(end) if not row.kept}
    assert point in broken


def test_an_address_where_nothing_listens_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="does not answer as an OpenAI"):
        contract.Endpoint("http://127.0.0.1:9", timeout=5)


def test_the_command_exits_4_on_a_broken_point_and_prints_json(monkeypatch: pytest.MonkeyPatch) -> None:
    app = typer.Typer()
    app.callback()(lambda: None)
    commands.register(app)
    endpoint(monkeypatch)
    good = CliRunner().invoke(app, ["check", "http://here:1", "--vocabulary", "512", "--json"])
    assert good.exit_code == 0, good.output
    assert json.loads(good.stdout)["ok"] is True
    monkeypatch.undo()
    endpoint(monkeypatch, "no input_audio")
    bad = CliRunner().invoke(app, ["check", "http://here:1", "--vocabulary", "512", "--json"])
    assert isinstance(bad.exception, IntegrityError)
    assert [point["name"] for point in json.loads(bad.stdout)["points"] if not point["kept"]] == ["audio is answered"]
    text_only = CliRunner().invoke(app, ["check", "http://here:1", "--vocabulary", "512", "--modality", "text"])
    assert text_only.exit_code == 0, text_only.output
    wrong = CliRunner().invoke(app, ["check", "http://here:1", "--modality", "smell"])
    assert isinstance(wrong.exception, UsageError)

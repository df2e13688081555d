"""What an endpoint must do to be judged, asked of it point by point.

Efficient Gemma's harness and gemq's own evaluation send prompts as token ids, capture ids, and score prompts by `prompt_logprobs`. Each
point here is one function: it asks, and returns what it saw; it raises `Broken` where the contract is not kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from gemq.errors import UsageError
from gemq.http_client import key_advice, open_client
from gemq.serve.probes import picture, tone

PROMPT = (2, 105, 2364, 107, 1567, 236764, 496)  # valid in Gemma 3's and 4's vocabulary; smaller ones get it modulo their size
DECODED = 48
NEAR_TIE_NATS = 0.25  # between the two best tokens: logits of 16 to 32 in bfloat16 lie 0.125 apart, and two passes may round them either way
MODALITIES = ("text", "image", "audio")


class Broken(Exception):
    """A point of the contract that the endpoint doesn't keep, in words."""


@dataclass(frozen=True)
class Point:
    """One row of the table: the point's name, whether it is kept, what was seen, and how long it took."""

    name: str
    kept: bool
    seen: str
    seconds: float


class Endpoint:
    """An OpenAI-compatible server at `url` (with or without /v1) and the model that it is asked for."""

    def __init__(self, url: str, model: str | None = None, *, vocabulary: int | None = None, timeout: float = 300) -> None:
        base = url.rstrip("/").removesuffix("/v1")
        self.url = f"{base}/v1"
        self.prompt = [token if vocabulary is None else token % vocabulary for token in PROMPT]
        try:
            self.client = open_client(self.url, timeout)
            listed = self.client.get(f"{self.url}/models")
            if advice := key_advice(listed.status_code):
                raise UsageError(f"{self.url} wants another API key (it answered {listed.status_code})", advice)
            listed.raise_for_status()  # a redirect too: the key goes to this server alone
            self.models = [str(entry["id"]) for entry in listed.json()["data"]]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{self.url}/models does not answer as an OpenAI-compatible server ({error})",
                             "start one with gemq serve, and give the address that it prints") from None
        self.model = model or (self.models[0] if self.models else "")

    def post(self, path: str, **body: Any) -> httpx.Response:
        try:
            return self.client.post(f"{self.url}/{path}", json={"model": self.model, **body})
        except httpx.TransportError as error:
            raise Broken(f"no answer: {type(error).__name__} {error}") from None

    def complete(self, prompt: object, **body: Any) -> dict[str, Any]:
        """The answer to a completion, which must be 200; its first choice and usage are where they belong."""
        answer = self.post("completions", prompt=prompt, **{"temperature": 0, "add_special_tokens": False, **body})
        if answer.status_code != 200:
            raise Broken(f"answered {answer.status_code}: {answer.text[:200]}")
        try:
            document: dict[str, Any] = answer.json()
            document["choices"][0], document["usage"]["prompt_tokens"]
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise Broken(f"the answer has no choices or usage ({error!r})") from None
        return document

    def decode(self) -> tuple[list[int], dict[str, Any]]:
        """Greedy token ids for the probe prompt, and the whole answer."""
        answer = self.complete(self.prompt, max_tokens=DECODED, ignore_eos=True, return_token_ids=True)
        ids = answer["choices"][0].get("token_ids")
        if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
            raise Broken(f"choices[0].token_ids is {str(ids)[:60]}")
        return ids, answer

    def score(self, tokens: Sequence[int]) -> list[dict[str, Any] | None]:
        """The prompt_logprobs of `tokens`."""
        scored = self.complete(list(tokens), max_tokens=1, prompt_logprobs=1)["choices"][0].get("prompt_logprobs")
        if not isinstance(scored, list):
            raise Broken(f"choices[0].prompt_logprobs is {str(scored)[:60]}")
        return scored


def _models(end: Endpoint) -> str:
    if not end.models or end.model not in end.models:
        raise Broken(f"lists {end.models}, not {end.model!r}")
    return ", ".join(end.models)


def _integer_prompts(end: Endpoint) -> str:
    counted = end.complete(end.prompt, max_tokens=1)["usage"]["prompt_tokens"]
    if counted != len(end.prompt):
        raise Broken(f"{len(end.prompt)} ids were sent, {counted} were counted")
    return f"{counted} ids sent and counted"


def _token_ids(end: Endpoint) -> str:
    return f"{len(end.decode()[0])} ids"


def _prompt_logprobs(end: Endpoint) -> str:
    scored = end.score(end.prompt)
    if len(scored) != len(end.prompt):
        raise Broken(f"{len(scored)} entries for {len(end.prompt)} tokens")
    if scored[0] is not None:
        raise Broken("the first entry is not null")
    for position, (token, entry) in enumerate(zip(end.prompt[1:], scored[1:], strict=True), 1):
        if not isinstance(entry, dict) or str(token) not in entry:
            raise Broken(f"token {token} at position {position} is not in its entry")
        if not entry[str(token)]["logprob"] <= 0:
            raise Broken(f"token {token} at position {position} has the log-probability {entry[str(token)]['logprob']}")
    return f"{len(scored)} entries, the first null, each with its target"


def _special_tokens(end: Endpoint) -> str:
    def ids(text: str, special: bool) -> list[int]:
        answer = end.complete(text, max_tokens=1, add_special_tokens=special, return_token_ids=True)
        found = answer["choices"][0].get("prompt_token_ids") or answer.get("prompt_token_ids")
        if not isinstance(found, list):
            raise Broken("prompt_token_ids are not returned, so it can't be seen")
        return found

    plain, other, special = ids("one", False), ids("two", False), ids("one", True)
    if special == plain and plain[0] == other[0]:
        raise Broken(f"token {plain[0]} is put first though add_special_tokens is false")
    if special[len(special) - len(plain):] != plain:
        raise Broken(f"with and without: {special} and {plain}")
    return f"{len(special)} ids with, {len(plain)} without"


def _ignore_eos(end: Endpoint) -> str:
    for asked in (1, 7, DECODED):
        answer = end.complete(end.prompt, max_tokens=asked, ignore_eos=True)
        if answer["usage"]["completion_tokens"] != asked or answer["choices"][0].get("finish_reason") != "length":
            raise Broken(f"{asked} tokens asked, {answer['usage']['completion_tokens']} made, {answer['choices'][0].get('finish_reason')}")
    return f"exactly 1, 7 and {DECODED} tokens"


def _greedy_repeats(end: Endpoint) -> str:
    first, second = end.decode()[0], end.decode()[0]
    if first != second:
        position = next(index for index, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1])
        raise Broken(f"the second run differs from token {position}")
    return f"{len(first)} ids, twice the same"


def _usage(end: Endpoint) -> str:
    ids, answer = end.decode()
    usage = answer["usage"]
    expected = {"prompt_tokens": len(end.prompt), "completion_tokens": len(ids), "total_tokens": len(end.prompt) + len(ids)}
    wrong = {key: usage.get(key) for key, count in expected.items() if usage.get(key) != count}
    if wrong:
        raise Broken(f"{wrong} where the ids give {expected}")
    return f"{len(end.prompt)} + {len(ids)}"


def _same_weights(end: Endpoint) -> str:
    ids, _ = end.decode()
    scored = end.score([*end.prompt, *ids])[len(end.prompt):]
    if len(scored) != len(ids):
        raise Broken(f"{len(scored)} scores for {len(ids)} decoded tokens")
    ties = 0
    for position, (token, entry) in enumerate(zip(ids, scored, strict=True)):
        if not isinstance(entry, dict) or str(token) not in entry:
            raise Broken(f"decoded token {position} is not scored")
        gap = max(value["logprob"] for value in entry.values()) - entry[str(token)]["logprob"]
        if gap > NEAR_TIE_NATS:
            raise Broken(f"decoded token {position} is {gap:.2f} nats behind the one that scoring prefers")
        ties += gap > 0
    return f"{len(ids)} tokens agree" + (f", {ties} of them near-ties" if ties else "")


def _modality(kind: str) -> Callable[[Endpoint], str]:
    part: dict[str, Any] = {"image": {"type": "image_url", "image_url": {"url": picture()}},
                            "audio": {"type": "input_audio", "input_audio": {"data": tone(), "format": "wav"}}}.get(kind, {})

    def ask(end: Endpoint) -> str:
        def tokens(content: object) -> int:
            answer = end.post("chat/completions", messages=[{"role": "user", "content": content}], max_tokens=4, temperature=0)
            if answer.status_code != 200:
                raise Broken(f"answered {answer.status_code}: {answer.text[:160]}")
            return int(answer.json()["usage"]["prompt_tokens"])

        text = {"type": "text", "text": "What is this?"}
        plain = tokens([text])
        if not part:
            return f"a prompt of {plain} tokens"
        more = tokens([text, part]) - plain
        if more <= 0:
            raise Broken(f"the {kind} adds no token to the prompt: it isn't looked at")
        return f"{more} tokens for the {kind}"

    return ask


def _errors(end: Endpoint) -> str:
    codes = []
    cases: list[tuple[str, dict[str, Any]]] = [
        ("an unknown model", {"model": "gemq-no-such-model", "prompt": end.prompt, "max_tokens": 1}),
        ("a prompt of a million tokens", {"prompt": [end.prompt[1]] * 1_000_000, "max_tokens": 1}),
        ("a temperature of -1", {"prompt": end.prompt, "temperature": -1, "max_tokens": 1}),
        ("no prompt's type", {"prompt": {"a": 1}, "max_tokens": 1}),
    ]
    for what, body in cases:
        answer = end.post("completions", **body)
        try:
            sound = 400 <= answer.status_code < 500 and isinstance(answer.json(), dict)
        except ValueError:
            sound = False
        if not sound:
            raise Broken(f"{what} is answered {answer.status_code}: {answer.text[:100]}")
        codes.append(str(answer.status_code))
    return ", ".join(codes)


def points(modalities: Sequence[str] = MODALITIES) -> dict[str, Callable[[Endpoint], str]]:
    """The points of the contract by name, in the order in which they are asked."""
    return {
        "the model is listed": _models,
        "prompts of token ids": _integer_prompts,
        "return_token_ids": _token_ids,
        "prompt_logprobs are complete": _prompt_logprobs,
        "add_special_tokens: false": _special_tokens,
        "ignore_eos": _ignore_eos,
        "greedy decode repeats": _greedy_repeats,
        "usage counts the ids": _usage,
        "scoring and decoding agree": _same_weights,
        **{f"{kind} is answered": _modality(kind) for kind in modalities},
        "errors are 4xx with JSON": _errors,
    }


def check(end: Endpoint, modalities: Sequence[str] = MODALITIES, done: Callable[[Point], None] = lambda point: None) -> list[Point]:
    """Every point with what was seen; a point that isn't kept doesn't stop the others. `done` is called after each."""
    table = []
    for name, ask in points(modalities).items():
        started = time.monotonic()
        try:
            kept, seen = True, ask(end)
        except Broken as error:
            kept, seen = False, str(error)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            kept, seen = False, f"the answer has another form than it must have ({error!r})"
        table.append(Point(name, kept, seen, time.monotonic() - started))
        done(table[-1])
    return table

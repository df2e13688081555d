"""Log-probabilities of a served model, asked for as the arenas ask: /v1/completions, token-id prompt, `prompt_logprobs: 1`.

Every answer is checked against the contract of vLLM's server: one entry a prompt token, the first null, each entry holds its token
with a finite log-probability of at most 0, the probabilities of an entry sum to at most 1. What breaks it is an IntegrityError that
names the record.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
import stamina

from gemq.errors import IntegrityError, StoppedSafely, UsageError
from gemq.eval.records import Record
from gemq.http_client import key_advice, open_client

ATTEMPTS = 5
_LOWEST = -9999.0  # what vLLM's server writes for a log-probability of minus infinity
_SUM_TOLERANCE = 1e-3


class _ServerError(Exception):
    """The endpoint answered 5xx or 429: worth another attempt."""


def is_url(target: str) -> bool:
    """Whether a TARGET names an endpoint and not a directory."""
    return target.startswith(("http://", "https://"))


@dataclass(frozen=True)
class Endpoint:
    """A served model that answered /v1/models; `name` is the URL as given, `max_length` the server's own limit, if it says one."""

    name: str
    base_url: str
    model: str
    max_length: int | None
    vocab_size: None = None  # the API doesn't tell; the server itself refuses ids beyond it

    @classmethod
    def open(cls, url: str) -> Endpoint:
        """Ask `url` for its model: the only one it serves, or the one named behind a # (http://host:8000#name). Raises UsageError."""
        parts = urlsplit(url)
        try:
            parts.port  # noqa: B018  (raises on a port that is no number)
        except ValueError as error:
            raise UsageError(f"{url} is no URL: {error}", "give http://HOST:PORT") from None
        if not parts.hostname:
            raise UsageError(f"{url} names no host", "give http://HOST:PORT")
        path = parts.path.rstrip("/").removesuffix("/v1")
        base = f"{parts.scheme}://{parts.netloc}{path}/v1"
        with open_client(base) as client:
            try:
                answer = _send(client, "GET", "/models")
            except (httpx.HTTPError, _ServerError) as error:
                raise UsageError(
                    f"{url} can't be reached: {error or type(error).__name__}",
                    "start the server, wait until it is ready, and check the URL",
                ) from error
        model, max_length = _choose_model(url, answer, parts.fragment)
        return cls(url, base, model, max_length)

    @contextlib.contextmanager
    def connected(self) -> Iterator[Connection]:
        """Yield a connection that scores records."""
        with open_client(self.base_url) as client:
            yield Connection(self, client)


def _send(client: httpx.Client, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
    """The answer, after up to five attempts on lost connections and 5xx; a read that timed out is not tried again."""
    again = (httpx.ConnectError, httpx.ConnectTimeout, httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError, _ServerError)
    for attempt in stamina.retry_context(on=again, attempts=ATTEMPTS, wait_initial=0.2, wait_max=5.0, timeout=60.0):
        with attempt:
            response = client.request(method, path, json=body)
            if response.status_code >= 500 or response.status_code == 429:
                raise _ServerError(f"it answered {response.status_code}: {reason_of(response)}")
    return response


def reason_of(response: httpx.Response) -> str:
    """The server's own message, in one line."""
    try:
        body = response.json()
        error = body.get("error", body) if isinstance(body, dict) else body
        text = str(error.get("message") or error.get("detail") or error) if isinstance(error, dict) else str(error)
    except ValueError:
        text = response.text
    return " ".join(text.split())[:300] or "no reason given"


def _choose_model(url: str, answer: httpx.Response, wanted: str) -> tuple[str, int | None]:
    if advice := key_advice(answer.status_code):
        raise UsageError(f"{url} wants another API key (it answered {answer.status_code})", advice)
    try:
        models = {str(entry["id"]): entry for entry in answer.json()["data"]} if answer.status_code == 200 else None
    except (ValueError, KeyError, TypeError):
        models = None
    if not models:
        raise UsageError(f"{url} is no OpenAI-compatible endpoint: /v1/models answered {answer.status_code}: {reason_of(answer)}",
                         "give the URL of a vLLM server, without a path or with /v1")  # fmt: skip
    if wanted and wanted not in models:
        raise UsageError(f"{url} does not serve {wanted!r}; it serves {', '.join(sorted(models))}", "put one of these behind the #")
    if not wanted and len(models) > 1:
        raise UsageError(f"{url} serves {len(models)} models: {', '.join(sorted(models))}", f"name one behind a #: {url}#{min(models)}")
    name = wanted or next(iter(models))
    limit = models[name].get("max_model_len")
    return name, limit if isinstance(limit, int) and not isinstance(limit, bool) else None


class Connection:
    """An open connection to an endpoint; `score` answers for one record."""

    def __init__(self, endpoint: Endpoint, client: httpx.Client) -> None:
        self.endpoint = endpoint
        self.name = endpoint.name
        self._client = client

    def score(self, record: Record) -> list[float]:
        """The log-probabilities, in nats, of the record's targets as the endpoint gives them.

        Raises StoppedSafely when the endpoint is gone, UsageError when it refuses the record, IntegrityError when its answer breaks
        the contract.
        """
        return [entry[token] for entry, token in zip(self.distributions(record), record.targets, strict=True)]

    def gaps(self, record: Record) -> list[float]:
        """How far each target lies behind the most likely token, in nats; 0 where it is that token. Raises as `score` does."""
        return [max(entry.values()) - entry[token] for entry, token in zip(self.distributions(record), record.targets, strict=True)]

    def distributions(self, record: Record, top: int = 1) -> list[dict[int, float]]:
        """The log-probabilities, in nats, of the `top` likeliest tokens at each target, and of the target itself. Raises as `score` does."""
        body = {
            "model": self.endpoint.model, "prompt": list(record.tokens), "max_tokens": 1, "temperature": 0, "prompt_logprobs": top,
            "add_special_tokens": False,
        }  # fmt: skip
        response = self._complete(body, record.where, "mend the record, or serve with prompt_logprobs and a window that is long enough" if top == 1
                                  else "choose a smaller --top, or serve with a larger --max-logprobs and a window that is long enough")  # fmt: skip
        return _target_distributions(response, self.name, record, top)

    def decode(self, prompt: Sequence[int], count: int, where: str) -> list[int]:
        """The `count` token ids that the endpoint decodes greedily after the ids of `prompt`, past an end-of-turn token too.

        Raises StoppedSafely when the endpoint is gone, UsageError when it refuses, IntegrityError when ids, their number or `usage` are
        not what was asked for.
        """
        body = {
            "model": self.endpoint.model, "prompt": list(prompt), "max_tokens": count, "temperature": 0, "ignore_eos": True,
            "add_special_tokens": False, "return_token_ids": True,
        }  # fmt: skip
        response = self._complete(body, where, "shorten the prompt or --tokens, or serve with a longer window")
        return decoded_ids(response, self.name, prompt, count, where)

    def _complete(self, body: dict[str, Any], where: str, if_refused: str) -> httpx.Response:
        """The answer to a completion request; `if_refused` is the next step where the endpoint doesn't take it."""
        try:
            response = _send(self._client, "POST", "/completions", body)
        except (httpx.HTTPError, _ServerError) as error:
            raise StoppedSafely(f"{self.name} stopped answering at {where}: {error or type(error).__name__}",
                                "see the server's log, start it again, and run the same command again") from error  # fmt: skip
        if response.status_code != 200:
            raise UsageError(f"{self.name} refused {where} ({response.status_code}): {reason_of(response)}", if_refused)
        return response


def decoded_ids(response: httpx.Response, name: str, prompt: Sequence[int] | None, count: int, where: str) -> list[int]:
    """The token ids of an answer to a request for `count` tokens, checked by `require_counts`."""
    try:
        answer = response.json()
        choice = answer["choices"][0]
        ids, echoed = choice.get("token_ids"), choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
        usage, finish = answer.get("usage") or {}, choice.get("finish_reason")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise IntegrityError(f"{where}: {name} answered 200 without choices", "the endpoint does not keep vLLM's contract") from None
    return require_counts(ids, echoed, usage, finish, name=name, prompt=prompt, count=count, where=where)


def require_counts(
    ids: object, echoed: object, usage: object, finish: object, *, name: str, prompt: Sequence[int] | None, count: int, where: str
) -> list[int]:
    """`ids`, if they are `count` token ids and everything else that the answer says agrees with them and with the prompt that was sent.

    Tokens are counted from ids, never from `usage`; a `usage` that says otherwise is an IntegrityError, as is a prompt that came back
    changed. `prompt` is None where the server tokenized it.
    """
    def broken(why: str) -> IntegrityError:
        return IntegrityError(f"{where}: {name} {why}", "what was asked for was not done: nothing measured there can be used")

    if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
        raise broken(f"returned no token ids to count ({str(ids)[:40]}); return_token_ids was asked for")
    counted = usage if isinstance(usage, dict) else {}
    said = counted.get("completion_tokens")
    if len(ids) != count:
        raise broken(f"made {len(ids)} tokens, {count} were asked for; its usage says {said}")
    if said is not None and said != len(ids):
        raise broken(f"made {len(ids)} tokens, and its usage says {said}")
    if finish not in (None, "length"):
        raise broken(f"ended by {finish!r} though ignore_eos was asked for")
    if prompt is not None:
        if echoed is not None and echoed != list(prompt):
            raise broken(f"changed the prompt: {len(prompt)} ids were sent, it worked on {len(echoed) if isinstance(echoed, list) else echoed}")
        if counted.get("prompt_tokens") not in (None, len(prompt)):
            raise broken(f"counted {counted['prompt_tokens']} prompt tokens, {len(prompt)} were sent")
    return ids


def _target_distributions(response: httpx.Response, name: str, record: Record, top: int) -> list[dict[int, float]]:
    def broken(why: str) -> IntegrityError:
        return IntegrityError(
            f"{record.where}: {name} {why}", "the endpoint does not keep vLLM's contract for prompt_logprobs: its numbers can't be used"
        )

    try:
        answer = response.json()
        choice = answer["choices"][0]
    except (ValueError, KeyError, IndexError, TypeError):
        raise broken("answered 200 without choices") from None
    entries = choice.get("prompt_logprobs") if isinstance(choice, dict) else None
    if entries is None:
        raise broken("gave no prompt_logprobs")
    if not isinstance(entries, list) or len(entries) != len(record.tokens):
        count = len(entries) if isinstance(entries, list) else type(entries).__name__
        raise broken(f"gave prompt_logprobs of {count} entries for {len(record.tokens)} prompt tokens")
    usage = answer.get("usage")
    counted = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    if counted is not None and counted != len(record.tokens):
        raise broken(f"counted {counted!r} prompt tokens, {len(record.tokens)} were sent")
    if entries[0] is not None:
        raise broken("gave the first prompt token a log-probability; it must be null")
    found = [_distribution(entry, token, position, broken) for position, (entry, token) in
             enumerate(zip(entries[1:], record.tokens[1:], strict=True), 1)]  # fmt: skip
    few = next((position for position, told in enumerate(found, 1) if len(told) < top), None)
    if few is not None:  # fewer tokens make a divergence look smaller
        raise broken(f"told {len(found[few - 1])} tokens at position {few}; prompt_logprobs {top} was asked for")
    return found[record.first_target - 1 :]


def _distribution(entry: object, token: int, position: int, broken: Any) -> dict[int, float]:
    if not isinstance(entry, dict):
        raise broken(f"gave position {position} {entry!r} instead of log-probabilities")
    values: dict[str, float] = {}
    for key, content in entry.items():
        if not key.isascii() or not key.isdigit():
            raise broken(f"gave {key[:20]!r} at position {position} in place of a token id")
        value = content.get("logprob") if isinstance(content, dict) else None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value > 0:
            raise broken(f"gave token {key} at position {position} the log-probability {value!r}; it must be finite and at most 0")
        values[key] = float(value)
    mine = values.get(str(token))
    if mine is None:
        raise broken(f"left the prompt's own token {token} out at position {position}")
    if mine <= _LOWEST:
        raise broken(f"gave token {token} at position {position} the probability 0 ({mine})")
    total = math.fsum(map(math.exp, values.values()))
    if total > 1 + _SUM_TOLERANCE:
        raise broken(f"gave probabilities at position {position} that sum to {total:.4f}, more than 1")
    return {int(key): value for key, value in values.items()}

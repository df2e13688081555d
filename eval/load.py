"""Sends a load to an endpoint and times it: one task a request in flight, clocks around the wire only. Requests are written out before the
clock starts, and an answer is read while the next one is waited for.

Tokens are counted from the ids that the endpoint returns. A request that is not answered as asked ends the load.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gemq.errors import GemqError, IntegrityError, StoppedSafely, UsageError
from gemq.eval.endpoint import Endpoint, reason_of, require_counts
from gemq.eval.wire import Answer, Wire, WireError
from gemq.eval.workloads import Load, Prompt


@dataclass(frozen=True)
class Finished:
    """One answered request. Seconds count from the start of its segment (a stretch of a run without interruption).

    `arrivals` holds, for a streamed answer, [seconds after the request, tokens] for each chunk with tokens; else it is empty.
    """

    load: str
    run: int
    segment: int
    index: int
    id: str
    started_s: float
    ended_s: float
    prompt_tokens: int
    prompt_token_ids: tuple[int, ...] | None
    token_ids: tuple[int, ...]
    arrivals: tuple[tuple[float, int], ...] = ()

    @property
    def seconds(self) -> float:
        return self.ended_s - self.started_s

    def to_json(self) -> dict[str, Any]:
        """The request as a line of benchmark.jsonl."""
        return {"kind": "request", **asdict(self)}

    @classmethod
    def from_json(cls, line: dict[str, Any]) -> Finished:
        """The request that `to_json` wrote; raises KeyError or TypeError on anything else."""
        prompt = line["prompt_token_ids"]
        return cls(
            str(line["load"]), int(line["run"]), int(line["segment"]), int(line["index"]), str(line["id"]), float(line["started_s"]),
            float(line["ended_s"]), int(line["prompt_tokens"]), None if prompt is None else tuple(prompt), tuple(line["token_ids"]),
            tuple((float(seconds), int(tokens)) for seconds, tokens in line["arrivals"]),
        )  # fmt: skip


def request_body(endpoint: Endpoint, load: Load, prompt: Prompt) -> tuple[str, dict[str, Any]]:
    """The path and the body of a load's request: greedy, `ignore_eos`, token ids returned."""
    body: dict[str, Any] = {"model": endpoint.model, "max_tokens": load.output_tokens, "temperature": 0, "ignore_eos": True,
                            "seed": load.seed, "return_token_ids": True}  # fmt: skip
    if load.streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if load.chat:
        return "/chat/completions", {**body, "messages": [{"role": "user", "content": prompt.text}]}
    return "/completions", {**body, "prompt": list(prompt.tokens or ()), "add_special_tokens": False}


def _stream_lines(pieces: Iterable[tuple[float, bytes]]) -> Iterable[tuple[float, bytes]]:
    """The data of server-sent events, each with the second at which its last byte arrived."""
    rest = b""
    for second, chunk in pieces:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield second, line[5:].strip()


def _read_stream(raw: Answer, where: str, name: str) -> tuple[list[int], object, object, object, list[tuple[float, int]]]:
    ids: list[int] = []
    arrivals: list[tuple[float, int]] = []
    echoed = usage = finish = None
    ended = False
    try:
        for second, data in _stream_lines(raw.pieces):
            if data == b"[DONE]":
                ended = True
                break
            event = json.loads(data)
            if "error" in event:
                raise StoppedSafely(f"{name} failed at {where}: {str(event['error'])[:200]}", "see the server's log, and run the same command again")
            usage = event.get("usage") or usage
            echoed = echoed or event.get("prompt_token_ids")
            for choice in event.get("choices", ())[:1]:
                echoed = echoed or choice.get("prompt_token_ids")
                finish = choice.get("finish_reason") or finish
                new = choice.get("token_ids") or []
                if new:
                    ids += new
                    arrivals.append((second - raw.started, len(new)))
    except (ValueError, TypeError, AttributeError) as error:
        raise IntegrityError(f"{where}: {name} sent a stream that is no vLLM stream ({error!r})", "serve it with gemq serve") from None
    if not ended:
        raise StoppedSafely(f"{name} broke off its answer to {where}", "see the server's log, start it again, and run the same command again")
    return ids, echoed, usage, finish, arrivals


def read_answer(raw: Answer, endpoint: Endpoint, load: Load, prompt: Prompt, where: str) -> tuple[list[int], object, int, list[tuple[float, int]]]:
    """Token ids, the prompt's ids as echoed, the prompt's length, arrivals; raises where the answer is not what was asked for."""
    name, response = endpoint.name, raw.response
    if response.status_code >= 500 or response.status_code == 429:
        raise StoppedSafely(f"{name} failed at {where} ({response.status_code}): {reason_of(response)}",
                            "see the server's log, start it again, and run the same command again")  # fmt: skip
    if response.status_code != 200:
        reason, advice = reason_of(response), "choose shorter prompts, a smaller --scale or --vocabulary, or serve with a longer window"
        if "chat template" in reason:
            advice = "this load asks for chat: put the instruction-tuned model's chat_template.jinja into the source, and quantize and package again"
        raise UsageError(f"{name} refused {where} ({response.status_code}): {reason}", advice)
    arrivals: list[tuple[float, int]] = []
    ids: object
    if load.streamed:
        ids, echoed, usage, finish, arrivals = _read_stream(raw, where, name)
    else:
        try:
            answer = response.json()
            choice = answer["choices"][0]
            ids, finish, usage = choice.get("token_ids"), choice.get("finish_reason"), answer.get("usage")
            echoed = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            raise IntegrityError(f"{where}: {name} answered 200 without choices", "serve it with gemq serve") from None
    found = require_counts(ids, echoed, usage, finish, name=name, prompt=prompt.tokens if not load.chat else None,
                           count=load.output_tokens, where=where)  # fmt: skip
    if not load.chat:
        return found, list(prompt.tokens or ()), len(prompt.tokens or ()), arrivals
    counted = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    if isinstance(echoed, list):
        if counted is not None and counted != len(echoed):
            raise IntegrityError(f"{where}: {name} counts {counted} prompt tokens and returns {len(echoed)}", "serve it with gemq serve")
        return found, echoed, len(echoed), arrivals
    return found, None, int(counted or 0), arrivals


class _Worker:
    """One request in flight at a time; an answer is read while the next one is waited for, so that reading takes nobody's time."""

    def __init__(self, endpoint: Endpoint, load: Load, prompts: Sequence[Prompt], take: Callable[[int, Answer], object]) -> None:
        self._wire = Wire(endpoint.base_url)
        self._name, self._load, self._prompts, self._take = endpoint.name, load, prompts, take
        self._unread: tuple[int, Answer] | None = None

    async def work(self, requests: Iterator[tuple[int, str, bytes]]) -> None:
        """Send `requests` (a prompt's index, path, body), which workers share; raises at the first that isn't answered as asked."""
        try:
            for index, path, raw in requests:
                try:
                    answer = await self._wire.post(path, raw, streamed=self._load.streamed, meanwhile=self._read)
                except WireError as error:
                    where = f"prompt {self._prompts[index].id} of {self._load.name}"
                    raise StoppedSafely(f"{self._name} stopped answering at {where}: {error}",
                                        "see the server's log, start it again, and run the same command again") from error  # fmt: skip
                self._unread = index, answer
        finally:
            await self._wire.close()
            self._read()

    def _read(self) -> None:
        unread, self._unread = self._unread, None
        if unread is not None:
            self._take(*unread)


async def _drive(
    endpoint: Endpoint, load: Load, prompts: Sequence[Prompt], todo: Sequence[int], done: Callable[[Finished], None], run: int, segment: int
) -> None:
    def read(index: int, raw: Answer) -> tuple[list[int], object, int, list[tuple[float, int]]]:
        return read_answer(raw, endpoint, load, prompts[index], f"prompt {prompts[index].id} of {load.name}")

    def request(index: int) -> tuple[int, str, bytes]:
        path, body = request_body(endpoint, load, prompts[index])
        return index, path, json.dumps(body).encode()

    warmups = range(len(prompts) - 1, max(-1, len(prompts) - 1 - load.warmups), -1)
    await _Worker(endpoint, load, prompts, read).work(map(request, warmups))
    requests = iter([request(index) for index in todo])
    beginning = time.perf_counter()

    def take(index: int, raw: Answer) -> None:
        ids, echoed, length, arrivals = read(index, raw)
        done(Finished(load.name, run, segment, index, prompts[index].id, raw.started - beginning, raw.ended - beginning, length,
                      tuple(echoed) if isinstance(echoed, list) else None, tuple(ids), tuple(arrivals)))  # fmt: skip

    tasks = [asyncio.create_task(_Worker(endpoint, load, prompts, take).work(requests)) for _ in range(min(load.in_flight, len(todo)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def drive(
    endpoint: Endpoint, load: Load, prompts: Sequence[Prompt], todo: Sequence[int], done: Callable[[Finished], None], *, run: int = 0,
    segment: int = 0,
) -> None:  # fmt: skip
    """Send the prompts at the indices `todo`, `load.in_flight` at a time, warm-ups first; `done` is called with each answer.

    Raises StoppedSafely when the endpoint fails or is gone (answers so far were handed to `done`), UsageError when it refuses a request,
    IntegrityError when an answer is not what was asked for.
    """
    try:
        asyncio.run(_drive(endpoint, load, prompts, todo, done, run, segment))
    except (GemqError, KeyboardInterrupt):
        raise
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None

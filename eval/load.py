"""Sends a load to an endpoint and times it: one task a request in flight, clocks around the wire only, answers parsed after the clock stops.

Tokens are counted from the ids that the endpoint returns. A request that is not answered as asked ends the load.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from gemq.errors import GemqError, IntegrityError, StoppedSafely, UsageError
from gemq.eval.endpoint import Endpoint, client_options, reason_of, require_counts
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


@dataclass(frozen=True)
class _Raw:
    """What came over the wire: an answer, or the events of a stream with the second each arrived at."""

    started: float
    ended: float
    response: httpx.Response
    events: tuple[tuple[float, bytes], ...] = ()


def request_body(endpoint: Endpoint, load: Load, prompt: Prompt) -> tuple[str, dict[str, Any]]:
    """The path and the body of a load's request: greedy, `ignore_eos`, token ids returned."""
    body: dict[str, Any] = {"model": endpoint.model, "max_tokens": load.output_tokens, "temperature": 0, "ignore_eos": True,
                            "seed": load.seed, "return_token_ids": True}  # fmt: skip
    if load.streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if load.chat:
        return "/chat/completions", {**body, "messages": [{"role": "user", "content": prompt.text}]}
    return "/completions", {**body, "prompt": list(prompt.tokens or ()), "add_special_tokens": False}


async def _ask(client: httpx.AsyncClient, path: str, raw_body: bytes, streamed: bool) -> _Raw:
    headers = {"Content-Type": "application/json"}
    started = time.perf_counter()
    if not streamed:
        response = await client.post(path, content=raw_body, headers=headers)
        return _Raw(started, time.perf_counter(), response)
    events: list[tuple[float, bytes]] = []
    async with client.stream("POST", path, content=raw_body, headers=headers) as response:
        if response.status_code != 200:
            await response.aread()
            return _Raw(started, time.perf_counter(), response)
        async for chunk in response.aiter_raw():
            events.append((time.perf_counter(), chunk))
    return _Raw(started, time.perf_counter(), response, tuple(events))


def _stream_lines(events: Iterable[tuple[float, bytes]]) -> Iterable[tuple[float, bytes]]:
    """The data of server-sent events, each with the second at which its last byte arrived."""
    rest = b""
    for second, chunk in events:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield second, line[5:].strip()


def _read_stream(raw: _Raw, where: str, name: str) -> tuple[list[int], object, object, object, list[tuple[float, int]]]:
    ids: list[int] = []
    arrivals: list[tuple[float, int]] = []
    echoed = usage = finish = None
    ended = False
    try:
        for second, data in _stream_lines(raw.events):
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


def _read(raw: _Raw, endpoint: Endpoint, load: Load, prompt: Prompt, where: str) -> tuple[list[int], object, int, list[tuple[float, int]]]:
    """Token ids, the prompt's ids as echoed, the prompt's length, arrivals; raises where the answer is not what was asked for."""
    name, response = endpoint.name, raw.response
    if response.status_code >= 500 or response.status_code == 429:
        raise StoppedSafely(f"{name} failed at {where} ({response.status_code}): {reason_of(response)}",
                            "see the server's log, start it again, and run the same command again")  # fmt: skip
    if response.status_code != 200:
        raise UsageError(f"{name} refused {where} ({response.status_code}): {reason_of(response)}",
                         "choose shorter prompts, a smaller --scale or --vocabulary, or serve with a longer window")  # fmt: skip
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


async def _drive(
    endpoint: Endpoint, load: Load, prompts: Sequence[Prompt], todo: Sequence[int], done: Callable[[Finished], None], run: int, segment: int
) -> None:
    limits = httpx.Limits(max_connections=load.in_flight, max_keepalive_connections=load.in_flight)
    async with httpx.AsyncClient(limits=limits, **client_options(endpoint.base_url)) as client:
        async def once(prompt: Prompt) -> tuple[_Raw, str]:
            where = f"prompt {prompt.id} of {load.name}"
            path, body = request_body(endpoint, load, prompt)
            raw_body = json.dumps(body).encode()
            try:
                return await _ask(client, path, raw_body, load.streamed), where
            except httpx.HTTPError as error:
                raise StoppedSafely(f"{endpoint.name} stopped answering at {where}: {str(error) or type(error).__name__}",
                                    "see the server's log, start it again, and run the same command again") from error  # fmt: skip

        for number in range(min(load.warmups, len(prompts))):
            raw, where = await once(prompts[-1 - number])
            _read(raw, endpoint, load, prompts[-1 - number], where)
        waiting = iter(todo)
        beginning = time.perf_counter()

        async def work() -> None:
            for index in waiting:
                raw, where = await once(prompts[index])
                ids, echoed, length, arrivals = _read(raw, endpoint, load, prompts[index], where)
                done(Finished(load.name, run, segment, index, prompts[index].id, raw.started - beginning, raw.ended - beginning, length,
                              tuple(echoed) if isinstance(echoed, list) else None, tuple(ids), tuple(arrivals)))  # fmt: skip

        tasks = [asyncio.create_task(work()) for _ in range(min(load.in_flight, len(todo)))]
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

"""A benchmark: a workload's loads, run one after another and several times, with what was measured, and a journal to go on from.

`DIR.partial/benchmark.jsonl` holds the job's key and one line a finished request; what stops half-way goes on there. A run's time is the
sum of its stretches without interruption, each from the first request sent to the last one answered.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gemq import atomic, output
from gemq.errors import GemqError, IntegrityError, Interrupted, StoppedSafely, UsageError
from gemq.eval.endpoint import Endpoint
from gemq.eval.honesty import Finding, audit, repeats
from gemq.eval.load import Finished, drive
from gemq.eval.memory import MemoryWatch, kv_cache_tokens
from gemq.eval.scores import Spread, spread
from gemq.eval.vllm_load import VllmClient, drives
from gemq.eval.workloads import Load, Prompt, Workload

JOURNAL = "benchmark.jsonl"
_STREAMED = "-streamed"  # ends the name of a load's streamed probe
PROBES = 8  # streamed requests after a load that is not streamed, for the first token's time


@dataclass(frozen=True)
class Times:
    """Milliseconds over requests (or over tokens, between tokens)."""

    mean: float
    median: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times | None:
        """The statistics of `seconds` in milliseconds; None for none. p99 interpolates linearly between order statistics."""
        if not seconds:
            return None
        values = 1000 * np.asarray(seconds, dtype=np.float64)
        return cls(float(values.mean()), float(np.median(values)), float(np.percentile(values, 99)))


@dataclass(frozen=True)
class RunMeasure:
    """One run of one load. Rates are a second; times between tokens are a token's, per chunk of a stream."""

    run: int
    requests: int
    output_tokens: int
    prompt_tokens: int
    duration_s: float
    tps: float
    total_tps: float
    requests_per_s: float
    latency_ms: Times
    first_token_ms: Times | None
    between_tokens_ms: Times | None
    interruptions: int


def measure(run: int, answers: Sequence[Finished]) -> RunMeasure:
    """What a run's answers say; raises UsageError on none."""
    if not answers:
        raise UsageError("a run without answers has no measure", "run at least one request")
    segments = {answer.segment for answer in answers}
    duration = math.fsum(
        max(answer.ended_s for answer in part) - min(answer.started_s for answer in part)
        for part in ([answer for answer in answers if answer.segment == segment] for segment in segments)
    )
    made, sent = sum(len(answer.token_ids) for answer in answers), sum(answer.prompt_tokens for answer in answers)
    first = [answer.arrivals[0][0] for answer in answers if answer.arrivals]
    gaps = [(later[0] - earlier[0]) / later[1] for answer in answers
            for earlier, later in zip(answer.arrivals, answer.arrivals[1:], strict=False) for _ in range(later[1])]  # fmt: skip
    latency = Times.of([answer.seconds for answer in answers])
    assert latency is not None
    return RunMeasure(run, len(answers), made, sent, duration, made / duration, (made + sent) / duration, len(answers) / duration, latency,
                      Times.of(first), Times.of(gaps), len(segments) - 1)  # fmt: skip


@dataclass(frozen=True)
class LoadResult:
    """A load, its runs, the spread of their TPS, the streamed probe where the load itself is not streamed, and who sent it."""

    load: Load
    runs: tuple[RunMeasure, ...]
    tps: Spread
    probe: RunMeasure | None
    audit: tuple[Finding, ...]
    client: str = "gemq"

    @property
    def first_token_ms(self) -> Times | None:
        return (self.probe or self.runs[0]).first_token_ms

    @property
    def between_tokens_ms(self) -> Times | None:
        return (self.probe or self.runs[0]).between_tokens_ms


@dataclass
class BenchResult:
    """Everything that a benchmark measured, by load."""

    target: str
    model: str
    base_url: str
    workload: Workload
    loads: list[LoadResult]
    server_dependencies: list[str] = field(default_factory=list)
    memory_kind: str | None = None
    peak_memory_bytes: int | None = None
    memory_samples: list[tuple[float, int]] = field(default_factory=list)
    memory_held: dict[str, Any] | None = None
    ppl: dict[str, Any] | None = None
    target_digest: str | None = None  # the content digest of the checkpoint that gemq served; None for a server at a URL
    data_sha256: str | None = None  # of the prompts

    def take_memory(self, watch: MemoryWatch) -> None:
        """Keep what was seen of the server's memory."""
        self.memory_kind, self.peak_memory_bytes, self.memory_samples = watch.kind, watch.peak_bytes, watch.samples
        self.memory_held = None if watch.holdings is None else watch.holdings.to_json()

    @property
    def broken(self) -> list[tuple[str, Finding]]:
        """The findings that an honest endpoint doesn't give, with their load's name."""
        return [(result.load.name, finding) for result in self.loads for finding in result.audit if not finding.kept]

    def to_json(self) -> dict[str, Any]:
        """The result as JSON types."""
        loads = [{**result.load.model_dump(), "runs": [asdict(run) for run in result.runs], "tps": asdict(result.tps),
                  "streamed_probe": None if result.probe is None else asdict(result.probe),
                  "audit": [asdict(finding) for finding in result.audit], "client": result.client} for result in self.loads]  # fmt: skip
        return {"kind": "bench", "target": self.target, "model": self.model, "base_url": self.base_url, "workload": self.workload.name,
                "loads": loads, "memory": {"kind": self.memory_kind, "peak_bytes": self.peak_memory_bytes, "samples": self.memory_samples,
                                            "held": self.memory_held},
                "ppl": self.ppl, "target_digest": self.target_digest, "data_sha256": self.data_sha256,
                "server_dependencies": self.server_dependencies}  # fmt: skip


def arena_summary(result: BenchResult, one: LoadResult, job_id: str) -> dict[str, Any]:
    """Efficient Gemma's summary.json of a load: exactly its keys; numbers are means over runs, the PPL's keys are there where it was scored."""
    def mean(values: Sequence[float]) -> float:
        return math.fsum(values) / len(values)

    runs = one.runs
    summary: dict[str, Any] = {"tps": one.tps.mean, "output_tps": one.tps.mean, "total_tps": mean([run.total_tps for run in runs])}
    if result.ppl is not None:
        summary["ppl"] = result.ppl["ppl"]["value"]
    summary |= {
        "completed": min(run.requests for run in runs),
        "duration_s": mean([run.duration_s for run in runs]),
        "request_throughput_req_s": mean([run.requests_per_s for run in runs]),
        "mean_e2e_latency_ms": mean([run.latency_ms.mean for run in runs]),
        "p99_e2e_latency_ms": mean([run.latency_ms.p99 for run in runs]),
        "max_concurrency": one.load.in_flight,
        "num_prompts": one.load.requests,
        "output_len": one.load.output_tokens,
        "model": result.model,
        "base_url": result.base_url,
        "benchmark_jsonl": JOURNAL,
        "benchmark_dependencies": [*(f"{name}=={importlib.metadata.version(name)}" for name in ("gemq", "httpx")),
                                   *([one.client.replace(" ", "==")] if one.client != "gemq" else [])],
        "server_dependencies": result.server_dependencies,
        "job_id": job_id,
    }
    if result.ppl is not None:
        summary |= {"ppl_num_tokens": result.ppl["tokens"], "ppl_summary_file": "ppl_summary.json", "ppl_results_file": "ppl_results.jsonl"}
    return summary


class Journal:
    """The finished requests of a benchmark, in memory and, given a directory, on disk as they come."""

    def __init__(self, directory: Path | None, key: dict[str, Any]) -> None:
        self.path = None if directory is None else directory / JOURNAL
        self.answers: list[Finished] = []
        self._key = json.loads(json.dumps(key))
        self._file: Any = None
        if self.path is not None:
            self._open(self.path)

    def _open(self, path: Path) -> None:
        kept = b""
        if path.exists():
            raw = path.read_bytes()
            kept = raw[: raw.rfind(b"\n") + 1]  # a kill may leave half a line
            try:
                lines = [json.loads(line) for line in kept.splitlines()]
                key = lines[0]["key"] if lines else self._key
                self.answers = [Finished.from_json(line) for line in lines[1:]]
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise IntegrityError(f"{path} can't be read as a benchmark's journal ({error!r})", "delete that directory and start again") from None
            if key != self._key:
                raise UsageError(f"{path.parent} holds partial results of another benchmark", "choose another --output, or delete that directory")
            if self.answers:
                output.note(f"{len(self.answers)} finished requests are kept in {path}; going on from there")
        with atomic.disk_errors(path):
            atomic.write_file(path, kept or json.dumps({"kind": "key", "key": self._key}) + "\n")
            self._file = open(path, "ab")  # noqa: SIM115  (closed by `close`)

    def add(self, answer: Finished) -> None:
        """Keep an answer."""
        self.answers.append(answer)
        if self._file is not None:
            assert self.path is not None
            with atomic.disk_errors(self.path):
                self._file.write((json.dumps(answer.to_json()) + "\n").encode())
                self._file.flush()

    def of(self, load: str, run: int) -> list[Finished]:
        """The answers of a load's run, by index."""
        return sorted((answer for answer in self.answers if (answer.load, answer.run) == (load, run)), key=lambda answer: answer.index)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def kept(self) -> str:
        """A sentence on what survives a stop."""
        return f"{len(self.answers)} finished requests are kept in {self.path}" if self.path else "nothing is kept without --output"


@contextlib.contextmanager
def _journal(partial: Path | None, key: dict[str, Any]) -> Iterator[Journal]:
    """The journal in the directory `partial`, which the caller holds; a stop says what it kept."""
    with contextlib.ExitStack() as stack:
        journal = Journal(partial, key)
        stack.callback(journal.close)
        try:
            yield journal
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted; {journal.kept()}", "run the same command again to go on") from None
        except StoppedSafely as error:
            raise type(error)(f"{error.message}; {journal.kept()}", error.next_step) from error


def require_fit(endpoint: Endpoint, load: Load, prompts: Sequence[Prompt]) -> None:
    """Refuse prompts that leave no room for the answer in the endpoint's window."""
    if endpoint.max_length is None:
        return
    for prompt in prompts:
        if prompt.tokens is not None and len(prompt.tokens) + load.output_tokens > endpoint.max_length:
            raise UsageError(
                f"{load.name} sends prompt {prompt.id} of {len(prompt.tokens)} tokens and asks for {load.output_tokens} more; "
                f"{endpoint.name} takes {endpoint.max_length} in all",
                "choose a smaller --scale, or serve with a longer window (MAX_MODEL_LEN)")  # fmt: skip


def require_memory(endpoint: Endpoint, load: Load, prompts: Sequence[Prompt], held_tokens: int | None) -> None:
    """Refuse a load of which not one request fits into the endpoint's KV cache of `held_tokens`; say where its requests don't fit together."""
    sizes = sorted((len(prompt.tokens or ()) + load.output_tokens for prompt in prompts), reverse=True)
    if held_tokens is None or not sizes:
        return
    if sizes[0] > held_tokens:
        raise UsageError(f"{load.name} has a request of {sizes[0]} tokens, and the KV cache of {endpoint.name} holds {held_tokens}",
                         "choose a smaller --scale, or serve with more memory for the KV cache")  # fmt: skip
    together = sum(sizes[: load.in_flight])
    if together > held_tokens:
        output.warn(f"{load.name} has {load.in_flight} requests of {together} tokens in flight, and the KV cache of {endpoint.name} holds "
                    f"{held_tokens}: some of them wait")  # fmt: skip


def _run(endpoint: Endpoint, load: Load, prompts: Sequence[Prompt], journal: Journal, run: int, client: VllmClient | None = None) -> RunMeasure:
    done = journal.of(load.name, run)
    have = {answer.index for answer in done}
    todo = [index for index in range(len(prompts)) if index not in have]
    if todo:
        segment = 1 + max((answer.segment for answer in done), default=-1)
        with output.progress(f"{load.name}, run {run + 1}" if run else load.name, len(todo), "requests") as advance:
            def keep(answer: Finished) -> None:
                journal.add(answer)
                advance()

            (drive if client is None else client.drive)(endpoint, load, prompts, todo, keep, run=run, segment=segment)
    return measure(run, journal.of(load.name, run))


def require_same_model(endpoint: Endpoint, loads: Sequence[Load], prompts: dict[str, list[Prompt]], journal: Journal) -> None:
    """Send one request again whose answer is kept, outside every measured run; raises IntegrityError where another model answers now."""
    if not journal.answers:
        return
    kept = journal.answers[-1]
    (load,) = (load for load in loads if kept.load in (load.name, f"{load.name}{_STREAMED}"))
    if not repeats(endpoint, load, prompts[load.name][kept.index], kept):
        raise IntegrityError(f"{load.name}: prompt {kept.id} is answered with other tokens than those kept in {journal.path}: {endpoint.name} serves "
                             "another model now",
                             "choose another --output, or delete that directory, and measure one model from start to end")  # fmt: skip


def run_load(
    endpoint: Endpoint, load: Load, prompts: Sequence[Prompt], journal: Journal, *, runs: int, audited: bool, client: VllmClient | None = None
) -> LoadResult:
    """Measure a load `runs` times, by gemq's client or by vLLM's, which streams it; probe it streamed if it isn't, and audit its answers."""
    load = load.model_copy(update={"requests": len(prompts), "streamed": load.streamed or client is not None})
    measured = tuple(_run(endpoint, load, prompts, journal, run, client) for run in range(runs))
    probe = None
    if not load.streamed:
        streamed = load.model_copy(update={"name": f"{load.name}{_STREAMED}", "streamed": True, "requests": min(PROBES, len(prompts)), "warmups": 0})
        probe = _run(endpoint, streamed, prompts[:PROBES], journal, 0)
    findings = audit(endpoint, load, prompts, journal.of(load.name, 0)) if audited else []
    return LoadResult(load, measured, spread([run.tps for run in measured]), probe, tuple(findings), client.name if client else "gemq")


def run_bench(
    endpoint: Endpoint, workload: Workload, prompts: dict[str, list[Prompt]], *, target: str, runs: int = 1, audited: bool = True,
    partial: Path | None = None, server_dependencies: Sequence[str] = (), client: VllmClient | None = None, client_kind: str = "gemq",
    target_digest: str | None = None,
) -> tuple[BenchResult, Path | None]:  # fmt: skip
    """Measure every load of `workload` at `endpoint`, `prompts` by load's name; returns the result and `partial`.

    vLLM's `client`, where there is one, drives the loads that --client `client_kind` leaves it. `target_digest` is the served checkpoint's: what an
    earlier run kept of another one is refused. Without it, one request whose answer is kept is sent again first (`require_same_model`).

    The directory `partial` keeps what is finished; the caller holds it (`atomic.resumable_directory`, with JOURNAL) and publishes it, so that
    it can add files. Raises StoppedSafely (75) with what was kept when the endpoint dies, UsageError, and IntegrityError when an answer is not
    what was asked for.
    """
    held_tokens = kv_cache_tokens(endpoint.base_url)
    for load in workload.loads:
        require_fit(endpoint, load, prompts[load.name])
        require_memory(endpoint, load, prompts[load.name], held_tokens)
    clients = {load.name: client if drives(client_kind, load) else None for load in workload.loads}
    asked = {name: [prompt.sha256 for prompt in some] for name, some in prompts.items()}
    key = {"target": target_digest or target, "model": endpoint.model, "workload": workload.model_dump(mode="json"), "runs": runs,
           "clients": {name: one.name if one else "gemq" for name, one in clients.items()},
           "prompts": asked}  # fmt: skip
    with _journal(partial, key) as journal:
        if target_digest is None:
            require_same_model(endpoint, workload.loads, prompts, journal)
        loads = [run_load(endpoint, load, prompts[load.name], journal, runs=runs, audited=audited, client=clients[load.name])
                 for load in workload.loads]  # fmt: skip
    result = BenchResult(target, endpoint.model, endpoint.base_url, workload, loads, list(server_dependencies), target_digest=target_digest,
                         data_sha256=hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest())  # fmt: skip
    return result, partial


def write_result(result: BenchResult, directory: Path, final: Path, job_id: str) -> None:
    """Write bench.json and a summary a load beside the journal, and give the directory its final name."""
    try:
        with atomic.disk_errors(directory):
            atomic.write_file(directory / "bench.json", json.dumps(result.to_json(), indent=2, allow_nan=False) + "\n")
            for one in result.loads:
                name = "summary.json" if len(result.loads) == 1 else f"summary-{one.load.name}.json"
                atomic.write_file(directory / name, json.dumps(arena_summary(result, one, job_id), indent=2, allow_nan=False) + "\n")
            if result.ppl is not None:
                records = result.ppl["per_record"]
                atomic.write_file(directory / "ppl_summary.json",
                                  json.dumps({k: v for k, v in result.ppl.items() if k != "per_record"}, indent=2) + "\n")  # fmt: skip
                atomic.write_file(directory / "ppl_results.jsonl", "".join(json.dumps(record) + "\n" for record in records))
            atomic.publish(directory, final)
    except GemqError as error:
        raise type(error)(f"{error.message}; what was measured is in {directory}", error.next_step) from error

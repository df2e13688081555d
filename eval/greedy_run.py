"""Runs a greedy comparison: decides what TARGET and --reference are, captures what has to be captured, keeps it, and judges it."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gemq import atomic, output
from gemq.errors import IntegrityError, Interrupted, StoppedSafely, UsageError
from gemq.eval import greedy
from gemq.eval.decoded import DecodeRecord, ids_sha256, read_decoded, write_decoded
from gemq.eval.endpoint import Endpoint, is_url
from gemq.eval.greedy import Comparison, GreedyResult
from gemq.eval.target import Target
from gemq.eval.workloads import Prompt, ids_text, make_text_prompts, make_token_prompts, read_prompts, tokenized
from gemq.output_paths import require_separate
from gemq.quantize.content import directory_digest
from gemq.serve.contract import NEAR_TIE_NATS

TOKENS, MADE_PROMPTS, MADE_LENGTH = 512, 16, 32
ENGINES = ("transformers", "vllm")
# plain decoding: one sequence at a time, no graphs, no speculation (vLLM's default), no caching of prefixes (serve.py's)
PLAIN_VLLM = {"GEMQ_EXTRA_ARGS": "--max-num-seqs 1 --enforce-eager"}


@dataclass(frozen=True)
class Job:
    """What is compared with what, as the command line says it."""

    target: str
    reference: str
    prompts: Path | None = None
    limit: int | None = None
    tokens: int | None = None
    tolerance: float | None = None
    engine: str = "transformers"
    device: str = "auto"
    dtype: str = "auto"
    checkpoint: Path | None = None
    tokenizer: Path | None = None
    python: Path | None = None
    output_dir: Path | None = None


def _is_records(name: str) -> bool:
    return name.endswith(".jsonl") and not is_url(name)


def _cut(records: Sequence[DecodeRecord], job: Job) -> list[DecodeRecord]:
    """The first --limit records, cut to --tokens."""
    chosen = list(records if job.limit is None else records[: job.limit])
    if job.tokens is None:
        return chosen
    return [DecodeRecord(r.id, r.prompt_sha256, r.prompt_token_ids, r.completion_token_ids[: job.tokens],
                         ids_sha256(r.completion_token_ids[: job.tokens])) for r in chosen]  # fmt: skip


def _prompts(job: Job, target: Target, theirs: Sequence[DecodeRecord] | None) -> list[Prompt]:
    """The prompts as token ids: of --prompts, of the reference's records, or made from a seed."""
    checkpoint = job.tokenizer or target.checkpoint or (None if is_url(job.reference) or theirs is not None else Path(job.reference))
    if job.prompts is not None:
        found = tokenized(read_prompts(job.prompts)[: job.limit], checkpoint)
    elif theirs is not None:
        found = [Prompt(record.id, tokens=record.prompt_token_ids) for record in theirs]
    elif checkpoint is not None and (checkpoint / "tokenizer.json").is_file():
        found = tokenized(make_text_prompts(job.limit or MADE_PROMPTS, 1), checkpoint)
    else:
        source = target if target.checkpoint is not None or checkpoint is None else Target(target.name, None, checkpoint)
        found = make_token_prompts(job.limit or MADE_PROMPTS, MADE_LENGTH, 1, vocabulary=source.vocabulary, bos=source.bos)
    return found


class _Capture:
    """What was decoded, on disk in OUTPUT.partial as it comes, so that a stopped capture goes on."""

    def __init__(self, output_dir: Path | None, key: object) -> None:
        self.records: list[DecodeRecord] = []
        self.file = None if output_dir is None else atomic.partial_of(output_dir) / "decode.jsonl"
        if self.file is None:
            return
        key_file, text = self.file.with_name("key.json"), json.dumps(key)
        if key_file.exists() and key_file.read_bytes() != text.encode():
            raise UsageError(f"{self.file.parent} holds partial results of another comparison", "choose another --output, or delete that directory")
        atomic.write_file(key_file, text)
        if self.file.exists() and self.file.stat().st_size:
            raw = self.file.read_bytes()
            atomic.write_file(self.file, raw[: raw.rfind(b"\n") + 1])  # a kill may leave half a line
            self.records = read_decoded(self.file) if self.file.stat().st_size else []
            output.note(f"{len(self.records)} captured records are kept in {self.file}; going on from there")

    def add(self, record: DecodeRecord) -> None:
        self.records.append(record)
        if self.file is not None:
            with atomic.disk_errors(self.file), open(self.file, "a", encoding="utf-8") as file:
                file.write(record.line())

    def kept(self) -> str:
        return f"{len(self.records)} captured records are kept in {self.file}" if self.file else "nothing is kept without --output"


@contextlib.contextmanager
def _kept(job: Job, key: object) -> Iterator[_Capture]:
    with contextlib.ExitStack() as stack:
        if job.output_dir is not None:
            stack.enter_context(atomic.resumable_directory(job.output_dir, "eval-greedy"))
        captured = _Capture(job.output_dir, key)
        try:
            yield captured
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted; {captured.kept()}", "run the same command again to go on") from None
        except StoppedSafely as error:
            raise type(error)(f"{error.message}; {captured.kept()}", error.next_step) from error


def _capture_into(captured: _Capture, endpoint: Endpoint, prompts: Sequence[Prompt], counts: Sequence[int], *, check_kept: bool) -> None:
    """Capture what is missing; with `check_kept` the last kept record is decoded again first: a server at a URL may serve another model now."""
    have = {record.id for record in captured.records}
    todo = [(prompt, count) for prompt, count in zip(prompts, counts, strict=True) if prompt.id not in have]
    for prompt, count in todo:
        greedy.require_window([prompt], count, endpoint.max_length, endpoint.name)
    with endpoint.connected() as connection:
        if check_kept and captured.records:
            last = captured.records[-1]
            if tuple(connection.decode(last.prompt_token_ids, len(last.completion_token_ids), f"prompt {last.id}")) != last.completion_token_ids:
                raise IntegrityError(f"prompt {last.id} is decoded to other ids than those that {captured.file} kept: the model has changed",
                                     "choose another --output, or delete that directory")  # fmt: skip
        greedy.capture(connection, [prompt for prompt, _ in todo], [count for _, count in todo], captured.add)


def evaluate_greedy(job: Job) -> GreedyResult:
    """The comparison that `job` describes; with `output_dir`, decode.jsonl and greedy.json are written there.

    Raises UsageError where the two can't be compared (other prompts, lengths, vocabularies, a changed record), StoppedSafely where an
    endpoint dies (captured records are kept), IntegrityError where an endpoint doesn't answer as asked. A divergence is no exception.
    """
    if job.engine not in ENGINES:
        raise UsageError(f"--engine {job.engine!r} is unknown", f"valid are {', '.join(ENGINES)}")
    if job.tolerance is not None and not 0 <= job.tolerance < float("inf"):
        raise UsageError(f"--tolerance {job.tolerance} is no number from 0 on", "give nats; 0 takes no near-ties")
    theirs = _cut(read_decoded(Path(job.reference)), job) if _is_records(job.reference) else None
    by_transformers = theirs is None and not is_url(job.reference) and job.engine == "transformers"
    tolerance = job.tolerance if job.tolerance is not None else NEAR_TIE_NATS if by_transformers else 0.0
    if by_transformers:
        from gemq.eval.local import LocalCheckpoint

        LocalCheckpoint.open(job.reference)  # what is wrong with it is said before anything is decoded
    if _is_records(job.target):
        if job.prompts is not None:
            raise UsageError("--prompts are for an endpoint; captured records hold their own", "leave --prompts out")
        ours = _cut(read_decoded(Path(job.target)), job)
        _require_place(job, None)
        result = _judged(job, ours, theirs, tolerance, None)
        if job.output_dir is not None:
            with atomic.staged_directory(job.output_dir) as folder:
                _write(folder, result, ours)
        return result
    target = Target.parse(job.target, job.checkpoint)
    _require_place(job, target)
    prompts = _prompts(job, target, theirs)
    lengths = {record.id: len(record.completion_token_ids) for record in theirs or ()}
    counts = [lengths.get(prompt.id, job.tokens or TOKENS) for prompt in prompts]
    digest = target.digest
    told = None if target.checkpoint is None else directory_digest(target.checkpoint)
    key = {"target": digest or job.target, "checkpoint": told, "prompts": [prompt.sha256 for prompt in prompts], "counts": counts}
    with _kept(job, key) as captured:
        with target.opened(python=job.python) as (endpoint, _):
            _capture_into(captured, endpoint, prompts, counts, check_kept=digest is None)
            early = _judged(job, captured.records, theirs, tolerance, endpoint) if theirs is not None else None
        result = replace(early or _judged(job, captured.records, None, tolerance, None), target_digest=digest)
        if job.output_dir is not None:
            partial = atomic.partial_of(job.output_dir)
            _write(partial, result, captured.records)
            atomic.publish_resumable(partial, job.output_dir, "key.json")
    return result


def _require_place(job: Job, target: Target | None) -> None:
    """Refuse an --output that exists, or is among the files of a model that is read."""
    if job.output_dir is not None:
        reference = None if _is_records(job.reference) else Target.parse(job.reference)
        read = [directory for side in (target, reference) if side is not None for directory in side.directories]
        require_separate(job.output_dir, job.checkpoint, job.tokenizer, *read)
        atomic.require_absent(job.output_dir)


def _write(folder: Path, result: GreedyResult, ours: Sequence[DecodeRecord]) -> None:
    write_decoded(folder / "decode.jsonl", ours)
    with atomic.disk_errors(folder):
        atomic.write_file(folder / "greedy.json", json.dumps(result.to_json(), indent=2, allow_nan=False) + "\n")


def _judged(
    job: Job, ours: Sequence[DecodeRecord], theirs: Sequence[DecodeRecord] | None, tolerance: float, endpoint: Endpoint | None
) -> GreedyResult:
    origin: dict[str, str | None] = {}
    with contextlib.ExitStack() as stack:
        if theirs is not None:
            missing = {record.id for record in theirs} ^ {record.id for record in ours}
            if missing:
                raise UsageError(f"{len(missing)} records are on one side only, first {min(missing)!r}", "compare captures of the same prompts")
            connection = None if endpoint is None else stack.enter_context(endpoint.connected())
            judge = greedy.judge_by_records(theirs, greedy.margin_by_target(connection), tolerance)
        elif is_url(job.reference) or job.engine == "vllm":
            origin = {"reference_digest": Target.parse(job.reference).digest}
            judge = stack.enter_context(_judge_by_server(job, ours, tolerance))
        else:
            judge, origin = stack.enter_context(greedy.judge_by_checkpoint(job.reference, job.device, job.dtype, tolerance))
        compared: list[Comparison] = []
        with output.progress("comparing", len(ours), "prompts") as advance:
            for record in ours:
                compared.append(judge(record))
                advance()
    asked = hashlib.sha256("\n".join(ids_text(record.prompt_token_ids) for record in ours).encode()).hexdigest()
    return GreedyResult(job.target, job.reference, tolerance, tuple(compared), data_sha256=asked, **origin)


@contextlib.contextmanager
def _judge_by_server(job: Job, ours: Sequence[DecodeRecord], tolerance: float) -> Iterator[greedy.Judge]:
    """A judge that lets another server decode the same prompts: one at a URL, or vLLM started plainly on the reference checkpoint."""
    with Target.parse(job.reference).opened(python=job.python, environment=PLAIN_VLLM) as (endpoint, _), endpoint.connected() as connection:
        theirs: list[DecodeRecord] = []
        prompts = [Prompt(record.id, tokens=record.prompt_token_ids) for record in ours]
        counts = [len(record.completion_token_ids) for record in ours]
        for prompt, count in zip(prompts, counts, strict=True):
            greedy.require_window([prompt], count, endpoint.max_length, endpoint.name)
        greedy.capture(connection, prompts, counts, theirs.append)
        yield greedy.judge_by_records(theirs, greedy.margin_by_reference(connection), tolerance)

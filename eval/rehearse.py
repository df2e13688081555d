"""A rehearsal: what an arena does with a submission, stage by stage in its order, on this machine, down to the verdict.

Each stage leaves one JSON file in OUTPUT.partial; the same command goes on at the first that is missing. A server is started when a stage
needs it and serves all stages in a row that want the same one. What this machine can't enforce is told, never passed over.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gemq import atomic, output
from gemq.errors import IntegrityError, Interrupted, StoppedSafely, UsageError
from gemq.eval import bench, isolation
from gemq.eval.decoded import DecodeRecord
from gemq.eval.endpoint import Endpoint
from gemq.eval.greedy_run import TOKENS, Job, evaluate_greedy
from gemq.eval.memory import MemoryWatch, cap_of, gpu_total_bytes
from gemq.eval.records import file_sha256, read_records
from gemq.eval.scores import Verdict, judge_efficient_gemma, judge_lowbarena
from gemq.eval.target import Target
from gemq.eval.workloads import Load, Prompt, Workload, find_workload, prompts_for, read_prompts, tokenized
from gemq.output_paths import require_separate

ARENAS = ("efficient-gemma", "lowbarena")
REFERENCE_PPL = 2.302  # Efficient Gemma's published reference on its own records
GREEDY_PROMPTS, KL_RECORDS = 8, 64
Stage = tuple[str, str, Callable[["Rehearsal", Endpoint | None, int | None], dict[str, Any]]]


@dataclass
class Rehearsal:
    """What is rehearsed, with what data, and what the stages so far have found (`found`, by stage)."""

    submission: str
    arena: str
    folder: Path
    reference: str | None = None
    checkpoint: Path | None = None
    scale: float = 1.0
    runs: int = 1
    prompts: Path | None = None
    ppl: Path | None = None
    kl: Path | None = None
    gsm8k: Path | None = None
    records: int | None = None
    limit: int | None = None
    reference_ppl: float | None = None
    reported_tps: float | None = None
    engine: str = "vllm"
    modalities: tuple[str, ...] = ("text", "image", "audio")
    python: Path | None = None
    found: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def target(self) -> Target:
        return Target.parse(self.submission, self.checkpoint)

    @property
    def workload(self) -> Workload:
        return find_workload(self.arena, self.scale)

    def sent(self, load: Load) -> list[Prompt]:
        """The prompts of a load; the same for submission and reference."""
        given = read_prompts(self.prompts) if self.prompts is not None and load.chat else None
        return prompts_for(load, given, vocabulary=self.target.vocabulary, bos=self.target.bos, tokenizer=self.target.checkpoint)

    def digests(self) -> dict[str, str | None]:
        """The content digests of what is rehearsed and of its reference; None for a URL or a checkpoint that is not here."""
        return {"target_digest": self.target.digest, "reference_digest": None if self.reference is None else Target.parse(self.reference).digest}

    def key(self) -> dict[str, Any]:
        """What makes kept stages those of this rehearsal. Of a submission the checkpoint counts; a server's flag may be mended meanwhile."""
        data = {name: None if path is None else file_sha256(path) for name, path in
                (("prompts", self.prompts), ("ppl", self.ppl), ("kl", self.kl), ("gsm8k", self.gsm8k))}  # fmt: skip
        digests = self.digests()
        return {"submission": digests["target_digest"] or self.submission, "arena": self.arena,
                "reference": digests["reference_digest"] or self.reference, "modalities": list(self.modalities),
                "scale": self.scale, "runs": self.runs, "records": self.records, "limit": self.limit, "engine": self.engine, **data}  # fmt: skip


def _seal(job: Rehearsal, endpoint: Endpoint | None, pid: int | None) -> dict[str, Any]:
    from gemq.quantize.seal import SEAL_FILE, check_seal, only_regular

    checkpoint = job.target.checkpoint
    assert checkpoint is not None
    regular = only_regular(checkpoint)
    if not (checkpoint / SEAL_FILE).exists():
        return {"sealed": None, "regular": regular, "seen": "the checkpoint has no seal"}
    differences = check_seal(checkpoint)
    if differences:
        raise IntegrityError(f"{checkpoint} is not what was sealed: {differences[0]}", "fetch or quantize it again")
    return {"sealed": True, "regular": regular, "seen": "every file agrees with the seal"}


def _contract(job: Rehearsal, endpoint: Endpoint | None, pid: int | None) -> dict[str, Any]:
    from gemq.serve import contract

    assert endpoint is not None
    end = contract.Endpoint(endpoint.base_url, endpoint.model, vocabulary=job.target.vocabulary)
    with output.progress("asking", len(contract.points(job.modalities)), "points") as advance:
        table = contract.check(end, job.modalities, lambda point: advance(1, point.name))
    return {"kept": all(point.kept for point in table), "points": [asdict(point) for point in table]}


def _speed(load: Load) -> Callable[[Rehearsal, Endpoint | None, int | None], dict[str, Any]]:
    def measure(job: Rehearsal, endpoint: Endpoint | None, pid: int | None) -> dict[str, Any]:
        assert endpoint is not None
        with contextlib.ExitStack() as stack:
            watch = stack.enter_context(MemoryWatch(pid, endpoint.base_url)) if pid is not None else None
            one = Workload(name=job.arena, loads=(load,))
            result, _ = bench.run_bench(endpoint, one, {load.name: job.sent(load)}, target=endpoint.name, runs=job.runs)
        if watch is not None:
            result.take_memory(watch)
        if result.broken:
            name, finding = result.broken[0]
            raise IntegrityError(f"{name}: not so that {finding.name}: {finding.seen}", "find what answers in the model's place")
        return result.to_json()

    return measure


def _cap(job: Rehearsal, name: str) -> int:
    """The hard cap in bytes for a load that was measured without one."""
    return cap_of(job.found[f"speed-{name}"]["memory"]["peak_bytes"])


def _capped(load: Load) -> Callable[[Rehearsal, Endpoint | None, int | None], dict[str, Any]]:
    """The load once more, on a server that is killed where it holds more than the cap."""

    def measure(job: Rehearsal, endpoint: Endpoint | None, pid: int | None) -> dict[str, Any]:
        assert endpoint is not None
        assert pid is not None
        cap, tps, why = _cap(job, load.name), 0.0, None
        with MemoryWatch(pid, endpoint.base_url, limit_bytes=cap) as watch:
            try:
                result, _ = bench.run_bench(endpoint, Workload(name=job.arena, loads=(load,)), {load.name: job.sent(load)}, target=endpoint.name,
                                            audited=False)  # fmt: skip
                tps = result.loads[0].tps.mean
            except StoppedSafely as error:
                if watch.exceeded is None:
                    raise
                why = f"killed at {watch.exceeded[1]} bytes: {error.message}"
        held = None if watch.holdings is None else watch.holdings.to_json()
        whole = job.found[f"speed-{load.name}"]["loads"][0]["tps"]["mean"]
        return {"cap_bytes": cap, "held": held, "tps": tps, "share_of_speed": tps / whole, "why": why,
                "kept_requests": why is None and held is not None and held["preemptions"] == 0}  # fmt: skip

    return measure


def _ppl(job: Rehearsal, endpoint: Endpoint | None, pid: int | None) -> dict[str, Any]:
    from gemq.eval.ppl import evaluate_ppl

    assert endpoint is not None
    assert job.ppl is not None
    url = f"{endpoint.base_url.removesuffix('/v1')}#{endpoint.model}"
    result = evaluate_ppl(url, job.ppl, records=job.records, tokenizer=job.target.checkpoint).to_json()
    return {"ppl": result["ppl"], "tokens": result["tokens"], "records": result["records"], "per_record": result["per_record"]}


def _decode(job: Rehearsal, endpoint: Endpoint | None, pid: int | None) -> dict[str, Any]:
    """Greedy ids of the first prompts, captured while the submission is up, to be audited when it is gone."""
    assert endpoint is not None
    load = job.workload.loads[0]
    prompts = tokenized(job.sent(load)[:GREEDY_PROMPTS], job.target.checkpoint)
    records: list[DecodeRecord] = []
    with endpoint.connected() as connection, output.progress("decoding", len(prompts), "prompts") as advance:
        for prompt in prompts:
            ids = connection.decode(prompt.tokens or (), min(load.output_tokens, TOKENS), f"prompt {prompt.id}")
            records.append(DecodeRecord.of(prompt, ids))
            advance()
    return {"decode": [json.loads(record.line()) for record in records]}


def _audit(job: Rehearsal, endpoint: Endpoint | None, pid: int | None) -> dict[str, Any]:
    file = job.folder / "decode.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in job.found["decode"]["decode"]), encoding="utf-8")
    result = evaluate_greedy(Job(str(file), str(job.target.checkpoint), engine=job.engine, python=job.python)).to_json()
    return {"identical": result["divergent"] == 0, **result}


def _distributions(job: Rehearsal, endpoint: Endpoint | None, pid: int | None) -> dict[str, Any]:
    from gemq.eval.served_kl import top_distributions

    assert endpoint is not None
    assert job.kl is not None
    records = read_records(job.kl, tokenizer=job.target.checkpoint, vocab_size=None, records=job.records or KL_RECORDS)
    return {"records": top_distributions(endpoint, records, "scoring")}


def _kl(job: Rehearsal, endpoint: Endpoint | None, pid: int | None) -> dict[str, Any]:
    from gemq.eval.served_kl import served_kl

    sides = [[[{int(token): value for token, value in position.items()} for position in record] for record in job.found[name]["records"]]
             for name in ("reference-scores", "scores")]  # fmt: skip
    return {"kl_nats": asdict(served_kl(*sides)), "reference_digest": job.digests()["reference_digest"]}


def _accuracy(label: str) -> Callable[[Rehearsal, Endpoint | None, int | None], dict[str, Any]]:
    def measure(job: Rehearsal, endpoint: Endpoint | None, pid: int | None) -> dict[str, Any]:
        from gemq.eval.accuracy import AccuracyResult
        from gemq.eval.lm_eval_run import Questions, ask

        assert endpoint is not None
        questions = Questions(job.gsm8k, limit=job.limit)
        answers = job.folder / "answers"
        answers.mkdir(exist_ok=True)
        digest = job.digests()["reference_digest" if label == "reference" else "target_digest"]
        domains = ask(endpoint, questions, answers, label=label, tokenizer=job.target.checkpoint, check_kept=digest is None)
        return AccuracyResult(label, None, questions.key(), tuple(domains)).to_json()

    return measure


def stages(job: Rehearsal) -> list[Stage]:
    """The arena's stages in its order: name, whose server it needs ("submission", the same under a cap, "reference" or none), what it does."""
    own, other = "submission", "reference"
    found: list[Stage] = [("seal", "", _seal), ("contract", own, _contract)]
    loads = job.workload.loads
    if job.arena == "efficient-gemma":
        found += [(f"speed-{load.name}", own, _speed(load)) for load in loads] + [("decode", own, _decode)]
        if job.ppl is not None:
            found.append(("ppl", own, _ppl))
            if job.reference is not None:
                found.append(("reference-ppl", other, _ppl))
        return [*found, ("greedy", "", _audit)]
    found += [(f"speed-{load.name}", own, _speed(load)) for load in loads] + [("decode", own, _decode)]
    found += [("accuracy", own, _accuracy("submission")), ("scores", own, _distributions)]
    found += [(f"capped-{load.name}", f"capped-{load.name}", _capped(load)) for load in loads]
    found += [(f"reference-speed-{load.name}", other, _speed(load)) for load in loads]
    found += [("reference-accuracy", other, _accuracy("reference")), ("reference-scores", other, _distributions), ("kl", "", _kl)]
    return [*found, ("greedy", "", _audit)]


def require(job: Rehearsal) -> None:
    """Refuse a rehearsal that lacks something, before any server is started; raises UsageError."""
    if job.arena not in ARENAS:
        raise UsageError(f"--arena {job.arena!r} is unknown", f"valid are {', '.join(ARENAS)}")
    for option, path in (("--prompts", job.prompts), ("--ppl", job.ppl), ("--kl", job.kl), ("--gsm8k", job.gsm8k)):
        if path is not None and not path.is_file():
            raise UsageError(f"{option} {path} does not exist", "give a file")
    if job.arena == "lowbarena":
        missing = [name for name, value in (("--reference", job.reference), ("--gsm8k", job.gsm8k), ("--kl", job.kl)) if value is None]
        if missing:
            raise UsageError(f"lowbarena's score needs {', '.join(missing)}", "it is measured beside BF16: accuracy, KL, speed and memory")
        from gemq.eval.lm_eval_run import require_lm_eval

        require_lm_eval()
    if job.target.directory is None:
        raise UsageError(f"{job.submission} is a URL; an arena starts a submission itself", "give the directory that gemq package wrote")
    checkpoint = job.target.checkpoint
    if checkpoint is None:
        raise UsageError(f"the checkpoint that {job.submission} names is not on this machine", "fetch it, and give --checkpoint DIR")
    if any(load.chat for load in job.workload.loads):
        tokenized([Prompt("probe", text="x")], checkpoint)  # a missing tokenizer is said now, not after the workloads


def run(job: Rehearsal, output_dir: Path) -> tuple[Verdict, list[str]]:
    """Every stage that isn't kept yet, then the verdict and what was not enforced; all of it is published as `output_dir`.

    Raises StoppedSafely or Interrupted with what is kept, IntegrityError where a seal or an answer isn't what it must be.
    """
    require(job)
    atomic.require_absent(output_dir)
    require_separate(output_dir, *job.target.directories, *(Target.parse(job.reference).directories if job.reference is not None else ()))
    with atomic.resumable_directory(output_dir, "rehearse") as job.folder:
        key = _require_same(job)
        try:
            _run_stages(job)
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted; finished stages are kept in {job.folder}", "run the same command again to go on") from None
        except StoppedSafely as error:
            raise type(error)(f"{error.message}; finished stages are kept in {job.folder}", error.next_step) from error
        if job.key() != key:
            raise IntegrityError(f"{job.submission}, its reference or the data changed while it was rehearsed",
                                 f"delete {job.folder}, run the same command again, and leave them alone meanwhile")  # fmt: skip
        verdict, open_points = judge(job), not_enforced(job)
        document = {"kind": "rehearsal", **verdict.to_json(), **job.digests(), "not_enforced": open_points, "stages": list(job.found), "key": key}
        with atomic.disk_errors(job.folder):
            atomic.write_file(job.folder / "verdict.json", json.dumps(document, indent=2, allow_nan=False) + "\n")
        atomic.publish_resumable(job.folder, output_dir, "key.json")
    return verdict, open_points


def _require_same(job: Rehearsal) -> dict[str, Any]:
    """The key of this rehearsal; raises UsageError where the folder holds stages of another one."""
    key = job.key()
    file, text = job.folder / "key.json", json.dumps(key, sort_keys=True)
    if file.exists() and file.read_bytes() != text.encode():
        raise UsageError(f"{job.folder} holds stages of another rehearsal", "choose another --output, or delete that directory")
    atomic.write_file(file, text)
    return key


def _run_stages(job: Rehearsal) -> None:
    digests = job.digests()
    todo: list[tuple[int, Stage]] = []
    for number, stage in enumerate(stages(job), 1):
        file = job.folder / f"{number:02d}-{stage[0]}.json"
        if file.exists():
            job.found[stage[0]] = json.loads(file.read_text(encoding="utf-8"))
            output.note(f"{stage[0]}: kept from an earlier run")
        else:
            todo.append((number, stage))
    while todo:
        whose = todo[0][1][1]
        row = []
        while todo and todo[0][1][1] == whose:
            row.append(todo.pop(0))
        with _server(job, whose) as (endpoint, pid):
            for number, (name, _, do) in row:
                output.note(f"stage {number}: {name}")
                job.found[name] = do(job, endpoint, pid) | {"target_digest": digests["reference_digest" if whose == "reference" else "target_digest"]}
                with atomic.disk_errors(job.folder):
                    atomic.write_file(job.folder / f"{number:02d}-{name}.json", json.dumps(job.found[name], allow_nan=False))


@contextlib.contextmanager
def _server(job: Rehearsal, whose: str) -> Iterator[tuple[Endpoint | None, int | None]]:
    if not whose:
        yield None, None
        return
    side = Target.parse(str(job.reference)) if whose == "reference" else job.target
    log, environment, total = job.folder / f"{whose}.log", {}, gpu_total_bytes()
    if whose.startswith("capped-") and total is not None:
        environment["GPU_MEMORY_UTILIZATION"] = f"{min(0.95, _cap(job, whose.removeprefix('capped-')) / total):.4f}"
    with side.opened(python=job.python, log=log, environment=environment) as opened:
        yield opened


def not_enforced(job: Rehearsal) -> list[str]:
    """What the arena enforces and this rehearsal did not, a sentence each."""
    found = []
    if os.environ.get(isolation.INSIDE) != "1":
        found.append(f"loopback-only network and user namespace: {isolation.problem() or 'not asked for'}")
    elif os.stat(job.folder).st_uid == 0:
        found.append("an unprivileged user: the namespace's root is this machine's root user, without its rights over the machine")
    found.append("the arena's own hardware: speeds and memory are this machine's")
    if job.arena == "lowbarena":
        found.append("the hard cap of memory: looked at twice a second, and a server above it is killed; accuracy and KL were measured without it")
        found.append("ten hidden benchmarks: GSM8K alone stands for them")
        if job.scale < 1:
            found.append(f"the workloads' size: --scale {job.scale:g}")
    if job.found["seal"].get("sealed") is None:
        found.append(f"the seal: {job.found['seal']['seen']}")
    return found


def judge(job: Rehearsal) -> Verdict:
    """The arena's verdict on what the stages found."""
    found = job.found
    contract_kept = bool(found["contract"]["kept"])
    if job.arena == "efficient-gemma":
        (load,) = found[f"speed-{job.workload.loads[0].name}"]["loads"]
        reference_ppl = found["reference-ppl"]["ppl"]["value"] if "reference-ppl" in found else job.reference_ppl or REFERENCE_PPL
        return judge_efficient_gemma(
            tps=load["tps"]["mean"], ppl=found["ppl"]["ppl"]["value"] if "ppl" in found else None, reference_ppl=reference_ppl,
            completed=min(run["requests"] for run in load["runs"]), requests=load["requests"], greedy_identical=found["greedy"]["identical"],
            reported_tps=job.reported_tps, contract_kept=contract_kept,
        )  # fmt: skip
    names = [load.name for load in job.workload.loads]

    def tps(prefix: str) -> list[float]:
        return [found[f"{prefix}{name}"]["loads"][0]["tps"]["mean"] for name in names]

    def peaks(prefix: str) -> list[float]:
        return [float(found[f"{prefix}{name}"]["memory"]["peak_bytes"]) for name in names]

    compared = _compared(job)
    return judge_lowbarena(
        memory_gains=_ratios(peaks("reference-speed-"), peaks("speed-")), speed_gains=_ratios(tps("speed-"), tps("reference-speed-")),
        length_drift=compared.length_drift or 0.0, mean_drop_points=compared.mean_drop_points or 0.0,
        drop_bounds_points={domain.name: domain.drop.upper_95_points if domain.drop else None for domain in compared.domains},
        kl_nats=found["kl"]["kl_nats"]["value"], contract_kept=contract_kept,
        capped={name: 1.0 if found[f"capped-{name}"]["kept_requests"] else found[f"capped-{name}"]["share_of_speed"] for name in names},
    )  # fmt: skip


def _ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]


def _compared(job: Rehearsal) -> Any:
    from gemq.eval.accuracy import compared, read_result

    sides = []
    for name in ("accuracy", "reference-accuracy"):
        file = job.folder / f"{name}.json"
        file.write_text(json.dumps(job.found[name]), encoding="utf-8")
        sides.append(read_result(file))
    return compared(job.submission, str(job.reference), sides[0][0], sides[0][1], sides[1][1])

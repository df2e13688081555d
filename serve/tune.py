"""The search over vLLM's switches for one checkpoint on one machine: what beats the incumbent beyond the noise and leaves greedy ids as they
were becomes the incumbent, switch by switch. What was measured is kept as it comes, so that a stopped search goes on.

`DIR.partial/tried.jsonl` holds the job's key, the engine's facts, the baseline's ids and one line a trial. A trial that was stopped half-way
is measured again; decisions are taken anew from what was measured, so that --tolerance can be changed without measuring again.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from gemq import atomic, output
from gemq.errors import GemqError, IntegrityError, Interrupted, StoppedSafely, UsageError
from gemq.eval.decoded import DecodeRecord
from gemq.serve.engine import EngineFacts
from gemq.serve.profile import Gain, MadeFor, Profile, Speculation
from gemq.serve.switches import ALONE, LeftOut, Task, Value, behind
from gemq.serve.trials import Question, Servers, reference_ids, run_trial
from gemq.serve.verdict import FAMILY_ERROR, UNQUIET, Criterion, LookAtAll, Ratio, Trial

JOURNAL = "tried.jsonl"
AGAIN = ("baseline", "again")
TOGETHER = ("all", "together")
_TELLS_BY_WHAT_IS_TAKEN = ("kernel", "attention")


@dataclass(frozen=True)
class Search:
    """What is searched: the offered values, what they are measured on, the profile that they build on, and the limits."""

    engine: EngineFacts
    task: Task
    offered: tuple[tuple[Value, ...], ...]
    question: Question
    base: str
    made_for: MadeFor
    drafter: Path | None
    budget_seconds: float
    tolerance: float
    confirm: bool = True

    @property
    def confidence(self) -> float:
        """Of each bound, so that noise wins among all candidates in FAMILY_ERROR of the searches at most."""
        return 1 - FAMILY_ERROR / max(1, sum(map(len, self.offered)))

    def alone(self, *many: dict[str, str]) -> bool:
        """Whether a server of one of these settings would disturb another that is up beside it."""
        return any(switch in ALONE for settings in many for switch in settings)

    def profile(self, settings: dict[str, str], measured: Gain | None = None) -> Profile:
        """The profile that sets `settings` (switch -> label)."""
        chosen = [value for values in self.offered for value in values if settings.get(value.switch) == value.label]
        tokens = max((value.draft_tokens for value in chosen), default=0)
        return Profile(base=self.base, arguments=[part for value in chosen for part in value.arguments],
                       environment=dict(pair for value in chosen for pair in value.environment), made_for=self.made_for, measured=measured,
                       speculation=Speculation(drafter=str(self.drafter), tokens=tokens) if tokens else None)  # fmt: skip


@dataclass
class Tuned:
    """The outcome: every trial with its verdict, what was kept, and what was not tried and why."""

    settings: dict[str, str]
    profile: Profile | None
    trials: list[tuple[Trial, bool, str]]
    left_out: list[LeftOut]
    floor: float
    confidence: float
    planned: int
    seconds: float
    unsteady: list[str] = field(default_factory=list)

    def ratio(self, trial: Trial) -> Ratio | None:
        """The paired ratio of `trial` with the bounds that candidates are judged by; None where nothing was measured."""
        return Criterion(self.confidence, planned=self.planned).ratio(trial.pairs) if trial.pairs else None

    def to_json(self) -> dict[str, Any]:
        """The outcome as JSON types."""
        rows = []
        for trial, kept, why in self.trials:
            ratio = self.ratio(trial)
            rows.append({**trial.to_json(), "kept": kept, "verdict": why, "ratio": ratio and ratio.ratio, "lower": ratio and ratio.lower,
                         "upper": ratio and ratio.upper})  # fmt: skip
        return {"kind": "tune", "settings": self.settings, "profile": self.profile and self.profile.model_dump(mode="json"), "trials": rows,
                "left_out": [{"switch": each.switch, "value": each.value, "why": each.why} for each in self.left_out], "floor": self.floor,
                "confidence": self.confidence, "planned_pairs": self.planned, "seconds": self.seconds, "unsteady_prompts": self.unsteady}  # fmt: skip


class Journal:
    """What was measured so far, on disk as it comes, and the seconds that it took over all sessions."""

    def __init__(self, directory: Path, key: dict[str, Any]) -> None:
        self.path = directory / JOURNAL
        self.trials: list[Trial] = []
        self.reference: list[DecodeRecord] = []
        self._spent = 0.0
        self._open(json.loads(json.dumps(key)))
        self._last = time.monotonic()

    @property
    def spent(self) -> float:
        """The seconds so far."""
        return self._spent + time.monotonic() - self._last

    def _open(self, key: dict[str, Any]) -> None:
        kept = b""
        if self.path.exists():
            raw = self.path.read_bytes()
            kept = raw[: raw.rfind(b"\n") + 1]  # a kill may leave half a line
            try:
                lines = [json.loads(line) for line in kept.splitlines()]
                found = lines[0]["key"] if lines else key
                for line in lines[1:]:
                    self._take(line)
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise IntegrityError(f"{self.path} can't be read as a search's journal ({error!r})",
                                     "delete that directory and start again") from None  # fmt: skip
            if found != key:
                other = sorted(name for name in {*found, *key} if found.get(name) != key.get(name))
                raise UsageError(f"{self.path.parent} holds the results of another search (it differs in {', '.join(other)})",
                                 "choose another --output, or delete that directory")
            if self.trials:
                output.note(f"{len(self.trials)} trials are kept in {self.path}; going on from there")
        with atomic.disk_errors(self.path):
            atomic.write_file(self.path, kept or json.dumps({"key": key}) + "\n")

    def _take(self, line: dict[str, Any]) -> None:
        if "trial" in line:
            self.trials.append(Trial.from_json(line["trial"]))
        elif "ids" in line:
            self.reference = [DecodeRecord(each["id"], each["prompt_sha256"], tuple(each["prompt_token_ids"]),
                                           tuple(each["completion_token_ids"]), each["completion_token_sha256"]) for each in line["ids"]]  # fmt: skip
        self._spent += float(line["seconds"])

    def add(self, line: dict[str, Any]) -> None:
        """Keep a line (a trial, ids, or nothing but time that went by) with the seconds since the last one."""
        now = time.monotonic()
        line, self._last = {**line, "seconds": now - self._last}, now
        self._take(line)
        with atomic.disk_errors(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def find(self, settings: dict[str, str], against: dict[str, str], switch: str) -> Trial | None:
        """The trial of `settings` against `against`, if it was made."""
        return next((trial for trial in self.trials if (trial.settings, trial.against, trial.switch) == (settings, against, switch)), None)


@contextlib.contextmanager
def kept_in(output_dir: Path, key: dict[str, Any]) -> Iterator[Journal]:
    """The journal in OUTPUT.partial, held against another process; a stop says what it kept."""
    with atomic.resumable_directory(output_dir, "tune") as partial:
        journal = Journal(partial, key)

        def stopped() -> str:
            with contextlib.suppress(GemqError, OSError):
                journal.add({})  # what the broken trial took counts too
            return f"{len(journal.trials)} trials are kept in {journal.path}"

        try:
            yield journal
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted; {stopped()}", "run the same command again to go on") from None
        except StoppedSafely as error:
            raise type(error)(f"{error.message}; {stopped()}", error.next_step) from error


def search(job: Search, journal: Journal, servers: Servers, told: Callable[[Trial, bool, str], None]) -> Tuned:
    """The outcome of `job`; `told` is called with each trial and its verdict, also with those that the journal holds already."""
    outcome = Tuned({}, None, [], [], 1.0, job.confidence, job.question.pairs, 0.0)

    def tried(switch: str, label: str, words: str, settings: dict[str, str], against: dict[str, str], test: Criterion,
              same: Sequence[str] = ()) -> Trial:  # fmt: skip
        found = journal.find(settings, against, switch)
        if found is None:
            found = Trial(switch, label, settings, against, words)
            began = journal.spent
            run_trial(found, servers, job.question, test, _steady(journal, outcome), same, alone=job.alone(settings, against),
                      in_time=lambda: switch == TOGETHER[0] or journal.spent < job.budget_seconds)  # fmt: skip
            found.seconds = journal.spent - began
            journal.add({"trial": found.to_json()})
        kept, why = test.verdict(found)
        outcome.trials.append((found, kept, why))
        told(found, kept, why)
        return found

    again = _baseline(job, journal, servers, outcome, told)
    outcome.floor = _itself(job).apart(again.pairs)
    if outcome.floor > UNQUIET:
        output.warn(f"two servers of the same configuration lie {outcome.floor - 1:.1%} apart: only what gains more can win; is the machine quiet?")
    test = Criterion(job.confidence, outcome.floor, job.tolerance, job.question.pairs)
    incumbent: dict[str, str] = {}
    taken = again.taken
    for values in job.offered:
        reachable, refused = behind(values, job.engine, job.task, taken) if values[0].switch == "kernel" else (list(values), [])
        outcome.left_out += refused
        for each in refused:  # it may have been started ahead
            servers.drop({each.switch: each.value})
        fresh = [{**incumbent, value.switch: value.label} for value in reachable]
        if journal.spent < job.budget_seconds:
            servers.ahead([incumbent, *[each for each in fresh if journal.find(each, incumbent, values[0].switch) is None]])
        for value in reachable:
            settings = {**incumbent, value.switch: value.label}
            if journal.find(settings, incumbent, value.switch) is None and journal.spent >= job.budget_seconds:
                outcome.left_out.append(LeftOut(value.switch, value.label, "no time was left: give more --minutes"))
                continue
            same = taken if value.switch in _TELLS_BY_WHAT_IS_TAKEN else ()
            trial = tried(value.switch, value.label, value.words, settings, incumbent, test, same)
            if outcome.trials[-1][1]:
                servers.drop(incumbent)
                incumbent, taken = settings, trial.taken
            else:
                servers.drop(settings)
    outcome.settings = incumbent
    if incumbent:
        outcome.profile = _confirmed(job, outcome, test, servers, tried)
    outcome.seconds = journal.spent
    return outcome


def _itself(job: Search) -> LookAtAll:
    return LookAtAll(job.confidence, planned=job.question.pairs)


def _steady(journal: Journal, outcome: Tuned) -> list[DecodeRecord]:
    """The baseline's ids that a second start gave again."""
    return [record for record in journal.reference if record.id not in outcome.unsteady]


def _baseline(job: Search, journal: Journal, servers: Servers, outcome: Tuned, told: Callable[[Trial, bool, str], None]) -> Trial:
    """The baseline against itself in a second start: how far two equal servers lie apart, and whether greedy ids come again."""
    again = journal.find({AGAIN[0]: AGAIN[1]}, {}, AGAIN[0])
    if again is None:
        began = journal.spent
        second = {AGAIN[0]: AGAIN[1]}
        again = Trial(AGAIN[0], AGAIN[1], second, {}, "the same again, in another start")
        servers.ahead([{}, second, *[{value.switch: value.label} for value in next(iter(job.offered), ())]])
        if not journal.reference:
            records = reference_ids(servers.get({}, keep=[second]), job.question)
            journal.add({"ids": [asdict(record) for record in records]})
        # a test that nothing passes as slower, and everything as worth a look at its ids
        run_trial(again, servers, job.question, _itself(job), journal.reference, in_time=lambda: journal.spent < job.budget_seconds)
        if again.failure:
            raise GemqError(f"the baseline doesn't hold: {again.failure}", "serve it with gemq serve, and mend that first")
        servers.drop(second)
        again.seconds = journal.spent - began
        journal.add({"trial": again.to_json()})
    outcome.unsteady = [each.id for each in Criterion(0.5, tolerance=job.tolerance).divergent(again)]
    if len(outcome.unsteady) == len(journal.reference):
        raise IntegrityError("two starts of the baseline decode every prompt to other ids, so no candidate can be held to them",
                             "compare near-ties with --tolerance 0.25, or find out what is random there: gemq check asks")  # fmt: skip
    if outcome.unsteady:
        output.warn(f"two starts of the baseline decode {len(outcome.unsteady)} of {len(journal.reference)} prompts to other ids; "
                    "candidates are held to the others")
    outcome.trials.append((again, False, "how far two equal servers lie apart"))
    told(*outcome.trials[-1])
    return again


def _confirmed(job: Search, outcome: Tuned, test: Criterion, servers: Servers, tried: Callable[..., Trial]) -> Profile | None:
    """The profile with what it gains: over the untuned baseline, both started afresh; None where that doesn't hold up."""
    gained = [trial for trial, kept, _ in outcome.trials if kept]
    words = " ".join(filter(None, (trial.words for trial in gained)))
    if job.confirm:
        servers.drop(outcome.settings)
        servers.ahead([{}, outcome.settings])
        fresh = replace(test, confidence=1 - FAMILY_ERROR)
        final = tried(TOGETHER[0], TOGETHER[1], words, outcome.settings, {}, fresh)
        if not outcome.trials[-1][1]:
            output.warn(f"in fresh starts of both, what was kept switch by switch doesn't hold: {outcome.trials[-1][2]}")
            outcome.settings = {}
            return None
        ratio, speeds, confidence = fresh.ratio(final.pairs), final.pairs, fresh.confidence
        whole, lower = ratio.ratio, ratio.lower or 0.0
    else:
        whole = lower = 1.0
        for each in (test.ratio(trial.pairs) for trial in gained):
            whole, lower = whole * each.ratio, lower * (each.lower or 0.0)
        confidence, speeds = job.confidence, [(gained[0].pairs[0][0], gained[-1].pairs[-1][1])]
    load = job.question.loads[0]
    gain = Gain(workload="+".join(each.name for each in job.question.loads), requests=load.requests, output_tokens=load.output_tokens,
                in_flight=load.in_flight, baseline_tps=median(a for a, _ in speeds), tuned_tps=median(b for _, b in speeds),
                ratio=whole, lower_bound=lower, confidence=confidence, pairs=len(speeds), confirmed=job.confirm,
                date=time.strftime("%Y-%m-%d", time.gmtime()))  # fmt: skip
    return job.profile(outcome.settings, gain)

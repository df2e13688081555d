"""A search from its command's options: records prepared once, sensitivities, builds judged against a source that is scored once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from gemq import atomic, output
from gemq.calibration.sets import CalibrationSet, load_calibration
from gemq.errors import OverBudgetError, UsageError
from gemq.eval.ppl import PplResult, evaluate_ppl
from gemq.eval.records import file_sha256, read_records
from gemq.eval.windows import write_records
from gemq.quantize.budget import HELD_OUT_ONE_IN, Budget, Objective
from gemq.quantize.card import summary
from gemq.quantize.companions import source_hashes
from gemq.quantize.decisions import decisions_of, require_useful, search_plan
from gemq.quantize.job import Job, versions
from gemq.quantize.job import identity_of as job_identity
from gemq.quantize.journal import Resume, canonical
from gemq.quantize.measurements import Measurements
from gemq.quantize.overlap import require_disjoint
from gemq.quantize.plan import Plan
from gemq.quantize.search import Found, Search
from gemq.quantize.search_state import SearchState, require_state_apart, short_digest
from gemq.quantize.sensitivity import Sensitivities, Split, identity_of, measure, measured_candidates, method_of, worked_out
from gemq.quantize.skeleton import load_skeleton
from gemq.quantize.trials import Trials
from gemq.recipes.model import Recipe
from gemq.shards import ShardReader
from gemq.source import Source

_SENSITIVITIES, _RECORDS, _REFERENCE, _SEARCH = "sensitivities-", "records-", "reference-", "search-"


@dataclass(frozen=True)
class BudgetData:
    """What a budget is measured on: `data` is "self" (fresh samples of the source) or a file, `count` how many records, `length` tokens a sample."""

    data: str
    count: int
    length: int
    seed: int

    @property
    def told(self) -> str | None:
        """How the card names samples of the source; None for a file, which has a name."""
        return f"self, seed {self.seed}" if self.data == "self" else None

    def prepare(self, source: Source, state: SearchState, device: str) -> Path:
        """The file to judge on: the user's, or samples of the source, written into `state`."""
        if self.data != "self":
            return Path(self.data)
        fresh = load_calibration("self", model_dir=source.directory, samples=self.count, length=self.length, seed=self.seed, device=device)
        path = state.claim(f"{_RECORDS}{fresh.sha256[:12]}.jsonl", fresh.sha256[:12])
        write_records(path, fresh.windows)
        return path


@dataclass(frozen=True)
class Order:
    """What is searched for: the budget, the candidates, what is made small, and how many builds are allowed.

    head: whether the search decides on the head. resume: "auto" goes on with an unfinished search of the same options, "required" refuses where
    there is none, "never" discards what is kept of exactly this search and starts over.
    """

    budget: Budget
    candidates: tuple[str, ...]
    objective: Objective
    builds: int
    head: bool
    resume: Resume = "auto"


@dataclass(frozen=True)
class Prepared:
    """What sensitivities are measured of, known before any is: the search's plan, the calibration set's identity, and the file in the state."""

    units: Plan
    reader: ShardReader
    more: dict[str, Any]  # source, calibration, versions, device
    identity: dict[str, Any]
    file: str

    @classmethod
    def of(cls, source: Source, recipe: Recipe, calibration: CalibrationSet, candidates: Sequence[str], device: str, *, head: bool) -> Prepared:
        """Raises UsageError for candidates that no unit can take, and for too few calibration windows."""
        skeleton, reader = load_skeleton(source.directory)
        assert reader is not None
        units = search_plan(skeleton, recipe, head=head)
        require_useful(units, candidates)
        split, kind = Split.of(calibration.windows), torch.device(device).type
        more = {"source": source_hashes(source.directory, reader), "calibration": calibration.sha256, "versions": versions(), "device": kind,
                "threads": torch.get_num_threads() if kind == "cpu" else None}  # fmt: skip
        identity = identity_of(units, split, more)
        return cls(units, reader, more, identity, f"{_SENSITIVITIES}{short_digest(identity)}.json")

    def sensitivities(
        self, source: Source, calibration: CalibrationSet, candidates: Sequence[str], state: SearchState, device: str
    ) -> Sensitivities:  # fmt: skip
        """From `state`, measured where they are not there."""
        path = state.claim(self.file, short_digest(self.identity))
        found = measure(source, self.reader, self.units, calibration.windows, candidates, path=path, device=device, identity=self.more)
        tokens = sum(map(len, calibration.windows))
        output.note(f"sensitivities of {len(found.harm)} units took {found.tokens:,.0f} tokens through the model, "
                    f"{found.tokens / tokens:.2f} times the calibration set")  # fmt: skip
        return found


def trials_identity(job: Job, prepared: Prepared, judged_on: dict[str, Any]) -> dict[str, Any]:
    """All that determines what is measured of a mix: the quantization of `job` (source, complete recipe, seed, device, versions), the decisions,
    the sensitivities (calibration, windows, schemes) and the records."""
    return {"job": job_identity(job, prepared.more["source"]), "decisions": [decision.name for decision in decisions_of(prepared.units)],
            "sensitivities": short_digest(prepared.identity), "judged on": {**judged_on, "held out one in": HELD_OUT_ONE_IN}}  # fmt: skip


def stored_sensitivities(
    source: Source, recipe: Recipe, state: SearchState, candidates: Sequence[str] | None, *, head: bool
) -> tuple[Plan, Sensitivities, tuple[str, ...]] | None:
    """Plan, sensitivities and candidates that `state` holds of this source, whatever they were calibrated on; None where it holds none.

    `candidates`: those that must be there; without them, all that every unit was measured under. Of several files the newest that fits is taken.
    """
    files = sorted(state.directory.glob(f"{_SENSITIVITIES}*.json"), key=lambda path: (-path.stat().st_mtime_ns, path.name))
    if not files:
        return None
    skeleton, reader = load_skeleton(source.directory)
    if reader is None:
        return None
    units = search_plan(skeleton, recipe, head=head)
    expected = json.loads(canonical({"source": source_hashes(source.directory, reader), **method_of(units)}))
    for path in files:
        measured = Measurements.read(path)
        if measured is None:
            output.warn(f"{path} can't be read: it is not used")
            continue
        named = tuple(candidates or measured_candidates(units, measured))
        if not named or any(measured.identity.get(key) != value for key, value in expected.items()):
            continue
        try:
            found = worked_out(units, named, measured)
        except KeyError:
            continue
        output.note(f"the sensitivities of {len(found.harm)} units are those in {path}")
        return units, found, named
    return None


class _Unfinished(BaseModel):
    """A search that has begun and not ended: the digests of the trials that were known when it began."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    version: Literal[1] = 1
    known: tuple[str, ...]


def begin(order: Order, state: SearchState, log: Trials, prepared: Prepared) -> tuple[str, tuple[str, ...]]:
    """(the name of this search's file in `state`, the digests of the trials that were known when it began).

    The file is there from a search's begin to its end. Raises UsageError where `order.resume` is "required" and there is none.
    """
    identity = {"trials": log.digest, "budget": [order.budget.kind, order.budget.limit], "candidates": list(order.candidates),
                "objective": order.objective, "builds": order.builds}  # fmt: skip
    name = f"{_SEARCH}{short_digest(identity)}.json"
    path = state.directory / name
    if order.resume == "never":
        for kept in (*state.names(log.digest, "build-"), prepared.file, name):
            state.remove(kept)
        log.discard()
    if path.is_file():
        try:
            unfinished = _Unfinished.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            output.warn(f"{path} can't be read: the search begins again, with what is measured")
        else:
            output.note(f"going on with an unfinished search in {state.directory}")
            return name, unfinished.known
    if order.resume == "required":
        raise UsageError(f"{state.directory} holds no unfinished search with these options",
                         "leave out --resume required, or give the options of the search that was stopped")  # fmt: skip
    known = tuple(trial.digest for trial in log.all())
    state.claim(name, log.digest)
    atomic.write_file(path, _Unfinished(known=known).model_dump_json())
    return name, known


def run_search(job: Job, order: Order, directory: Path, data: BudgetData) -> Found:
    """The fastest mix within the budget, published at the job's output, with what is measured kept in `directory`.

    Raises as `Search.run` does, and UsageError for data that was fitted to, and for a directory that can't hold the search.
    """
    assert job.calibration is not None
    require_state_apart(directory, job.source.directory, job.output)
    if order.resume == "required" and not directory.is_dir():
        raise UsageError(f"--resume required: there is no search to go on with in {directory}", "leave out --resume required")
    atomic.make_parent(job.output)
    state = SearchState.open(directory)
    state.make()
    with atomic.locked(directory), atomic.disk_errors(directory):
        state = SearchState.open(directory)  # as it is now that nobody else writes to it
        path = data.prepare(job.source, state, job.device)
        limit = None if data.data == "self" else data.count
        records = read_records(path, tokenizer=job.source.directory, vocab_size=None, records=limit)
        require_bound(len(records))
        share = require_disjoint(job.calibration.windows, [record.tokens for record in records])
        prepared = Prepared.of(job.source, job.plan.recipe, job.calibration, order.candidates, job.device, head=order.head)
        judged_on = {"sha256": file_sha256(path), "records": len(records)}
        log = Trials.open(state, trials_identity(job, prepared, judged_on))
        search, known = begin(order, state, log, prepared)
        found = prepared.sensitivities(job.source, job.calibration, order.candidates, state, job.device)
        split = Split.of(job.calibration.windows)
        kept = state.claim(f"{_REFERENCE}{log.digest}.safetensors", log.digest)

        def judge(checkpoint: Path) -> tuple[PplResult, list[dict[str, Any]]]:
            result = evaluate_ppl(str(checkpoint), path, reference=str(job.source.directory), records=limit, device=job.device, with_kl=True,
                                  kept=kept)  # fmt: skip
            return result, [summary(result.to_json(), data.told)]

        told = {
            "judged_on": data.told or path.name, "sha256": judged_on["sha256"], "records": len(records),
            "largest_share_seen_in_calibration": round(share, 4),
            "sensitivities": {"solved_on_windows": len(split.solved_on), "measured_on_windows": len(split.scored_on),
                              "tokens_a_measurement": sum(map(len, split.scored_on))},
        }  # fmt: skip
        try:
            won = Search(job, prepared.units, found, order.budget, order.candidates, order.objective, state, log, known, judge,
                         prepared.more["source"], told, order.builds).run()  # fmt: skip
        except OverBudgetError:
            state.remove(search)  # it came to its end
            raise
        state.remove(kept.name)  # large, and cheap to make again
        state.remove(search)
    return won


def require_bound(records: int) -> None:
    """Raise UsageError where so few records have no upper bound."""
    if records < 2:
        raise UsageError(f"the budget is measured on {records} record, which has no upper bound", "give at least 2: --eval-records")

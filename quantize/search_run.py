"""A search from its command's options: records prepared once, sensitivities, builds judged beside a source that is scored once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemq import atomic, output
from gemq.calibration.sets import CalibrationSet, load_calibration
from gemq.eval.ppl import PplResult, evaluate_ppl
from gemq.eval.records import file_sha256, read_records
from gemq.eval.windows import write_records
from gemq.output_paths import require_separate
from gemq.quantize.budget import Budget, Objective
from gemq.quantize.card import summary
from gemq.quantize.decisions import decisions_of, require_useful, search_plan
from gemq.quantize.job import Job, versions
from gemq.quantize.overlap import require_disjoint
from gemq.quantize.plan import Plan
from gemq.quantize.search import Found, Search
from gemq.quantize.sensitivity import VERSION, Sensitivities, Split, measure
from gemq.quantize.skeleton import Skeleton, load_skeleton
from gemq.recipes.model import Recipe
from gemq.source import Source, file_hashes

SENSITIVITIES_FILE = "sensitivities.json"
_RECORDS, _REFERENCE = "records.jsonl", "reference.safetensors"


@dataclass(frozen=True)
class BudgetData:
    """What a budget is held to: `data` is "self" (fresh samples of the source) or a file, `count` how many records, `length` tokens a sample."""

    data: str
    count: int
    length: int
    seed: int

    @property
    def told(self) -> str | None:
        """How the card names samples of the source; None for a file, which has a name."""
        return f"self, seed {self.seed}" if self.data == "self" else None

    def prepare(self, source: Source, state: Path, device: str) -> Path:
        """The file to judge on: the user's, or samples of the source written into `state` once a search."""
        if self.data != "self":
            return Path(self.data)
        fresh = load_calibration("self", model_dir=source.directory, samples=self.count, length=self.length, seed=self.seed, device=device)
        path = state / _RECORDS
        write_records(path, fresh.windows)
        return path


def load_sensitivities(
    source: Source, recipe: Recipe, calibration: CalibrationSet, candidates: Sequence[str], state: Path, device: str, *, head: bool
) -> tuple[Plan, Sensitivities]:
    """The search's plan, and sensitivities from `state`, measured where they are not there."""
    skeleton, reader = load_skeleton(source.directory)
    assert reader is not None
    units = search_plan(skeleton, recipe, head=head)
    require_useful(units, candidates)
    identity = {"source": file_hashes(source.directory), "calibration": calibration.sha256, "versions": versions(), "device": device}
    found = measure(source, reader, units, calibration.windows, candidates, path=state / SENSITIVITIES_FILE, device=device, identity=identity)
    tokens = sum(map(len, calibration.windows))
    output.note(f"sensitivities of {len(found.harm)} units took {found.tokens:,.0f} tokens through the model, "
                f"{found.tokens / tokens:.2f} times the calibration set")  # fmt: skip
    return units, found


def stored_sensitivities(source: Source, recipe: Recipe, state: Path, *, head: bool) -> tuple[Plan, Sensitivities, tuple[str, ...]] | None:
    """Plan, sensitivities and candidates that `state` holds of all of this source, whatever they were calibrated on; None where it doesn't."""
    skeleton, _ = load_skeleton(source.directory)
    try:
        held = json.loads((state / SENSITIVITIES_FILE).read_bytes())
        identity, candidates = held["identity"], tuple(map(str, held["identity"]["candidates"]))
        units = _plan_as_stored(skeleton, recipe, identity["decisions"], head)
        complete = units is not None and all(decision.name in held["harm"] for decision in decisions_of(units))
        if units is None or not complete or identity["method"] != VERSION or identity["source"] != file_hashes(source.directory):
            return None
        return units, Sensitivities(state / SENSITIVITIES_FILE, identity, held["harm"], held["error"], float(held["tokens"])), candidates
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        output.warn(f"the sensitivities in {state} can't be read ({error!r}): measuring again")
        return None


def _plan_as_stored(skeleton: Skeleton, recipe: Recipe, names: Sequence[str], head: bool) -> Plan | None:
    units = search_plan(skeleton, recipe, head=head)
    return units if [decision.name for decision in decisions_of(units)] == list(names) else None


def run_search(
    job: Job, budget: Budget, candidates: tuple[str, ...], objective: Objective, state: Path, builds: int, data: BudgetData, *, head: bool
) -> Found:
    """The fastest mix within `budget`, published at the job's output; raises as `Search.run` does, and UsageError for data that was fitted to."""
    assert job.calibration is not None
    require_separate(state, job.source.directory, option="--search-state")
    atomic.make_parent(state)
    state.mkdir(exist_ok=True)
    with atomic.locked(state), atomic.disk_errors(state):
        path = data.prepare(job.source, state, job.device)
        limit = None if data.data == "self" else data.count
        records = read_records(path, tokenizer=job.source.directory, vocab_size=None, records=limit)
        share = require_disjoint(job.calibration.windows, [record.tokens for record in records])
        units, found = load_sensitivities(job.source, job.plan.recipe, job.calibration, candidates, state, job.device, head=head)
        split = Split.of(job.calibration.windows)

        def judge(directory: Path) -> tuple[PplResult, list[dict[str, Any]]]:
            result = evaluate_ppl(str(directory), path, reference=str(job.source.directory), records=limit, device=job.device, with_kl=True,
                                  kept=state / _REFERENCE)  # fmt: skip
            return result, [summary(result.to_json(), data.told)]

        told = {
            "judged_on": data.told or path.name, "sha256": file_sha256(path), "records": len(records),
            "largest_share_seen_in_calibration": round(share, 4),
            "sensitivities": {"solved_on_windows": len(split.solved_on), "measured_on_windows": len(split.scored_on),
                              "tokens_a_measurement": sum(map(len, split.scored_on))},
        }  # fmt: skip
        won = Search(job, units, found, budget, candidates, objective, state, judge, f"{told['sha256']}, {len(records)} records", told, builds).run()
        (state / _REFERENCE).unlink(missing_ok=True)  # large, and cheap to make again
    return won


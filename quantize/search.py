"""The fastest checkpoint within a budget of perplexity or KL: choose mixes, build them, measure them on disk, publish the best.

Predicted harms decide what is tried (`explore`). What is published is measured in the same run, and its upper bound, which accounts for every
mix that was measured on the same records (`looks`), must be within the budget. What was measured is kept and decides where the next search begins.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from gemq import output
from gemq.errors import GemqError, IntegrityError, UsageError
from gemq.eval.ppl import PplResult
from gemq.quantize.account import account
from gemq.quantize.allocation import Choice
from gemq.quantize.budget import Budget, Objective, Trial, mix_digest
from gemq.quantize.card import inherited_fields
from gemq.quantize.checkpoint import accounts, manifest_bytes, sealed_as
from gemq.quantize.decisions import HEAD, HEAD_SCHEMES, KEEP, SCHEMES, Option, decisions_of, fixed_rules, options_of
from gemq.quantize.explore import (
    BOUND_OVER_PREDICTED_ON_ITS_OWN,
    BOUND_OVER_PREDICTED_ON_TEXT,
    FIRST_AIM,
    Space,
    explore,
    winner,
)
from gemq.quantize.job import Job, identity_of
from gemq.quantize.looks import MOST_LOOKS
from gemq.quantize.plan import Plan, make_plan
from gemq.quantize.provenance import MANIFEST_FILE, PROVENANCE_FILE
from gemq.quantize.reseal import reseal
from gemq.quantize.run import quantize
from gemq.quantize.seal import CARD_FILE, REPORTS, check_seal, content_digest, read_seal, seal_digest
from gemq.quantize.search_state import SearchState, short_digest
from gemq.quantize.sensitivity import Sensitivities
from gemq.quantize.skeleton import load_skeleton
from gemq.quantize.trials import Trials, possible
from gemq.recipes.model import TABLE_PARTS, Recipe, Rule

Measure = Callable[[Path], tuple[PplResult, list[dict[str, Any]]]]
_BUILD = "build-"


@dataclass(frozen=True)
class Found:
    """The checkpoint that won, its seal, what was tried, and the manifest with the search's section."""

    directory: Path
    seal: str
    trial: Trial
    trials: list[Trial]
    manifest: dict[str, Any]


def choices_of(plan: Plan, found: Sensitivities, candidates: Sequence[str], objective: Objective) -> dict[str, list[Choice]]:
    """Decision -> what it may take, at which cost and harm: bytes for decode and size; for throughput the multiply-adds that batches wait for."""
    return {
        decision.name: [
            Choice(option.label, _cost(objective, option, decision.numel), found.harm[decision.name][option.label])
            for option in options_of(plan, decision, candidates).values()
        ]
        for decision in decisions_of(plan)
    }


def _cost(objective: Objective, option: Option, numel: int) -> float:
    if objective == "throughput":
        # eight-bit products run at twice the rate of bfloat16's; weights alone in few bits save bytes and no products
        scheme = SCHEMES.get(option.label)
        quantized_inputs = scheme is not None and scheme.input_activations is not None
        return numel * (0.5 if quantized_inputs else 1.0) + option.token_bytes * 1e-6
    return float(option.token_bytes if objective == "decode" else option.disk_bytes)


def recipe_of(base: Recipe, plan: Plan, mix: dict[str, str], name: str, summary: str) -> Recipe:
    """`base` with its decoder's rules replaced by one a scheme, each naming its modules, and the head's where the mix has one."""
    patterns: dict[str, list[str]] = {}
    for decision in decisions_of(plan):
        if not decision.is_head:
            patterns.setdefault(mix[decision.name], []).extend(
                f"re:{re.escape(matrix.tensor.removesuffix('.weight'))}$" for matrix in decision.matrices
            )
    rest = fixed_rules(base, plan)
    if mix.get(HEAD, KEEP) != KEEP:
        rest.insert(0, Rule(match=(HEAD,), scheme=HEAD_SCHEMES[mix[HEAD]], method="rtn"))
    rest += [rule for rule in base.rules if rule.scheme == KEEP and not set(rule.match) <= {HEAD, *TABLE_PARTS}]
    made = [Rule(match=tuple(patterns[label]), scheme=scheme, method="gptq") for label, scheme in SCHEMES.items() if label in patterns]
    if KEEP in patterns:
        made.append(Rule(match=tuple(patterns[KEEP]), scheme="keep"))
    return base.model_copy(update={"name": name, "summary": summary, "rules": (*rest, *made)})


@dataclass
class Search:
    """A search and what it knows: the quantization to vary, the plan of `decisions.search_plan`, the sensitivities, and how to measure.

    `measure` scores a checkpoint against its source and gives the card's summaries too. `log` holds the trials of exactly this base recipe, data and
    device, `known` are the digests of those that were known when the search began; `hashes` are the source's. `data` is what `account` says of
    the data.
    """

    job: Job
    units: Plan
    sensitivities: Sensitivities
    budget: Budget
    candidates: tuple[str, ...]
    objective: Objective
    state: SearchState
    log: Trials
    known: tuple[str, ...]
    measure: Measure
    hashes: dict[str, str]
    data: dict[str, Any]
    builds: int = 3
    _measured: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by mix: the card's summaries, of this run
    _new: int = 0  # mixes that this run measured for the first time
    _used_up: bool = False  # whether a build was left out since no further look at the records is allowed

    def run(self) -> Found:
        """Search, and publish the winner at the job's output.

        Raises OverBudgetError, with the nearest that came out, if no mix of at most `builds` new builds meets the budget, and UsageError where
        the records were used too often for another build.
        """
        choices = choices_of(self.units, self.sensitivities, self.candidates, self.objective)
        space = Space(choices, any(rule.scheme != KEEP for rule in fixed_rules(self.job.plan.recipe, self.units)))
        if self.known:
            output.note(f"{len(self.known)} builds of earlier searches are known from {self.state.directory}")
        while True:
            # what is measured already is gone through again, not built again: an interrupted search goes on where it was
            known = [trial for trial in possible(self.log.all(), choices) if trial.digest in self.known]
            tried = explore(space, self.budget, known, self.builds, self._first_reach(), self._trial)
            everything = [*tried, *(one for one in known if one not in tried)]
            if self._used_up and not any(trial.meets(self.budget) for trial in everything):
                raise UsageError(f"{self.log.looks} checkpoints were measured on these records in {self.state.directory}, none that this search "
                                 f"knows meets the budget, and at most {MOST_LOOKS} may be measured on the same records",
                                 "measure on other records: another file (--eval-data), or another --seed for samples of the source")  # fmt: skip
            best = winner(everything, self.budget)
            now = best if best.digest in self._measured else self._measure(best.mix, best.predicted, best.cost)
            everything = [now if trial == best else trial for trial in everything]
            if now.meets(self.budget):
                return self._publish(now, everything)
            output.warn(f"a known mix was measured again: its bound is {self.budget.show(now.upper(self.budget))} now, over the budget")

    def _first_reach(self) -> float:
        calibration = self.job.calibration
        its_own = calibration is not None and calibration.description.get("kind") == "self"
        return FIRST_AIM * self.budget.nats / (BOUND_OVER_PREDICTED_ON_ITS_OWN if its_own else BOUND_OVER_PREDICTED_ON_TEXT)

    def _trial(self, mix: dict[str, str], predicted: float, cost: float) -> Trial | None:
        """What is known of `mix`, or what comes out when it is built; None where as many were built as this search may."""
        known = self.log.of(mix)
        if known is not None:
            output.note("it was measured in an earlier run already")
            return replace(known, predicted=predicted, cost=cost)
        if self._new == self.builds:
            return None
        if not self.log.may_look(mix):
            output.warn(f"{self.log.looks} checkpoints were measured on these records, and no more may be: nothing further is built")
            self._used_up = True
            return None
        self._new += 1
        return self._measure(mix, predicted, cost)

    def _plan(self, mix: dict[str, str]) -> tuple[Job, str]:
        """The job that builds `mix`, and the name of its checkpoint in the state: by all that determines its bytes."""
        base, budget = self.job.plan.recipe, self.budget
        recipe = recipe_of(
            base, self.units, mix, f"{base.name}-{budget.label}",
            f"Schemes chosen unit by unit for a budget of {budget.show(budget.nats)}; the rest as in {base.name}.",
        )  # fmt: skip
        skeleton, reader = load_skeleton(self.job.source.directory)  # a walk leaves its skeleton behind as it was in the last layer
        assert reader is not None
        job = replace(self.job, plan=make_plan(skeleton, recipe), reader=reader)
        name = _BUILD + short_digest(identity_of(job, self.hashes))
        return replace(job, output=self.state.directory / name), name

    def _measure(self, mix: dict[str, str], predicted: float, cost: float) -> Trial:
        """`mix` as measured in this run, on the checkpoint that an earlier run sealed, or on one that is built now."""
        job, name = self._plan(mix)
        seal = self.state.seal_of(name)
        if seal is not None and _is_sealed_as(job.output, seal):
            output.note(f"{job.output} is a checkpoint of an earlier run: it is measured again")
            trial, _ = self._judged(job.output, job.plan, mix, predicted, cost)
        else:
            if job.output.exists():  # of a run that ended between its seal and its record
                self.state.remove(name)
            trial = self._built(job, name, mix, predicted, cost)
        self.log.add(trial)
        return trial

    def _built(self, job: Job, name: str, mix: dict[str, str], predicted: float, cost: float) -> Trial:
        self.state.claim(name, self.log.digest)
        made: list[Trial] = []

        def measured(unsealed: Path) -> list[dict[str, Any]]:
            trial, summaries = self._judged(unsealed, job.plan, mix, predicted, cost)
            made.append(trial)
            return summaries

        outcome = quantize(job, measured)
        if outcome.manifest["source"]["files"] != self.hashes:
            raise IntegrityError(f"the files of {self.job.source.directory.name} changed during the search", "leave them alone and run it again")
        self.state.finished(name, outcome.seal)
        return made[0]

    def _judged(self, checkpoint: Path, plan: Plan, mix: dict[str, str], predicted: float, cost: float) -> tuple[Trial, list[dict[str, Any]]]:
        result, summaries = self.measure(checkpoint)
        self._measured[mix_digest(mix)] = summaries
        size = (int(plan.bytes_per_token()[1]), round(plan.bits_per_weight(), 4))
        return Trial.of(mix, predicted, cost, size, result, self.log.look(mix)), summaries

    def _publish(self, best: Trial, tried: list[Trial]) -> Found:
        """The winning build, with the search in its manifest, under a seal of its own at the job's output."""
        job, _ = self._plan(best.mix)
        built = job.output
        files = read_seal(built)
        manifest = json.loads((built / MANIFEST_FILE).read_bytes())
        manifest["search"] = account(self.units, self.sensitivities, self.budget, self.objective, self.candidates, tried, best, self.data,
                                     self.log.looks)  # fmt: skip
        recipe = yaml.safe_load((built / "recipe.yaml").read_bytes())
        raw = manifest_bytes(manifest)
        kept = [file for file in files if file.path not in (*REPORTS, MANIFEST_FILE, PROVENANCE_FILE)]
        made = accounts([*kept, sealed_as(MANIFEST_FILE, raw)], manifest, recipe, self._measured[best.digest], inherited_fields(built / CARD_FILE),
                        measured_as=content_digest(files))  # fmt: skip
        digest = reseal(built, self.job.output, kept, {MANIFEST_FILE: raw, **made})
        for name in self.state.names(self.log.digest, _BUILD):
            if (self.state.directory / name).exists():
                self.state.remove(name)
        return Found(self.job.output, digest, best, tried, manifest)


def _is_sealed_as(checkpoint: Path, seal: str | None) -> bool:
    """Whether every byte of `checkpoint` is what was sealed under this digest."""
    try:
        return seal_digest(checkpoint) == seal and not check_seal(checkpoint)
    except GemqError:
        return False

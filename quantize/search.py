"""The fastest checkpoint within a budget of perplexity or KL: allocate, build, measure on disk, move the limit, until the budget binds.

Predicted harms decide what is tried; only what was measured on a finished checkpoint decides what is good enough, and there the upper 95%
bound counts. Nothing relaxes the budget. What was measured is kept, and tells the next search where to begin.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from gemq import output
from gemq.atomic import write_file
from gemq.calibration.sets import CalibrationSet
from gemq.errors import OverBudgetError
from gemq.eval.ppl import PplResult
from gemq.quantize.account import account
from gemq.quantize.allocation import Choice, allocate
from gemq.quantize.budget import Budget, Objective, Spent, Trial, judged_and_held_out, mix_digest
from gemq.quantize.card import inherited_fields, read_measured
from gemq.quantize.checkpoint import accounts, manifest_bytes, sealed_as
from gemq.quantize.decisions import HEAD, HEAD_SCHEMES, KEEP, SCHEMES, Option, decisions_of, options_of
from gemq.quantize.job import Job
from gemq.quantize.journal import canonical
from gemq.quantize.plan import Plan, make_plan
from gemq.quantize.provenance import MANIFEST_FILE, PROVENANCE_FILE
from gemq.quantize.reseal import reseal
from gemq.quantize.run import quantize
from gemq.quantize.seal import CARD_FILE, REPORTS, content_digest, read_seal
from gemq.quantize.sensitivity import Sensitivities
from gemq.quantize.skeleton import load_skeleton
from gemq.recipes.model import Recipe, Rule

Measure = Callable[[Path], tuple[PplResult, list[dict[str, Any]]]]
TRIALS_FILE = "trials.json"
_BINDS = 0.9  # a bound this near the budget, from below, is near enough
_FIRST_AIM = 0.93  # where in the budget the first build's bound is aimed at, on a guess of what bounds are over predictions
_AIM = 0.97  # and the next one's, on what came out: that share falls with the harm, so a mix of less harm lands a little lower
_LAST_AIM = 0.8  # and that of the last one, as long as none has met it
_WORTH_A_BUILD = 0.01  # of the cost: where something meets the budget, less to win is no reason for another build
# What bounds on ground truth have been over predictions, where no build has said it yet. Predictions are of windows like the calibration's, and on
# what the model writes itself the same harm shows as more nats (0.63 there; on text 1.53 to 1.60 with w4a16-best, 2.0 with w4a16).
_BOUND_OVER_PREDICTED_ON_ITS_OWN = 0.65
_BOUND_OVER_PREDICTED_ON_TEXT = 1.6


@dataclass(frozen=True)
class Found:
    """The checkpoint that won, its seal, what was tried, and the manifest, which tells of the search."""

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
    fixed = {"lm_head", "embedding", "ple_embedding"}
    rest = [rule for rule in base.rules if rule.scheme == KEEP or set(rule.match) <= fixed]
    if mix.get(HEAD, KEEP) != KEEP:
        rest.insert(0, Rule(match=(HEAD,), scheme=HEAD_SCHEMES[mix[HEAD]], method="rtn"))
    made = [Rule(match=tuple(patterns[label]), scheme=scheme, method="gptq") for label, scheme in SCHEMES.items() if label in patterns]
    if KEEP in patterns:
        made.append(Rule(match=tuple(patterns[KEEP]), scheme="keep"))
    return base.model_copy(update={"name": name, "summary": summary, "rules": (*rest, *made)})


@dataclass(frozen=True)
class Search:
    """A search and what it knows: the quantization to vary, the plan of `decisions.search_plan`, the sensitivities, and how to measure.

    `measure` scores an unsealed checkpoint beside its source and gives the card's summaries too. Trials are kept in `state` under
    `data_identity`; `data` says what `account` tells of the data.
    """

    job: Job
    units: Plan
    sensitivities: Sensitivities
    budget: Budget
    candidates: tuple[str, ...]
    objective: Objective
    state: Path
    measure: Measure
    data_identity: str
    data: dict[str, Any]
    builds: int = 3

    def run(self) -> Found:
        """Search, and publish the winner at the job's output.

        Raises OverBudgetError, with the nearest that came out, if no mix of at most `builds` new builds meets the budget.
        """
        budget = self.budget
        choices = choices_of(self.units, self.sensitivities, self.candidates, self.objective)
        log = Trials.open(self.state, self.sensitivities, self.data_identity, self.objective)
        known = log.all()
        if known:
            output.note(f"{len(known)} builds of earlier searches are known from {self.state}")
        reach, tried, built = _first_reach(known, budget, self.job.calibration), list[Trial](), 0
        while not _settled([*known, *tried], budget):
            mix = allocate(choices, reach)
            if mix is None:
                output.note(f"no mix is predicted to stay within {reach:.4f} nats a token")
                break
            labels = {name: choice.label for name, choice in mix.items()}
            trial = log.of(labels)
            if trial in tried or (trial is None and built == self.builds):
                break
            if trial is None:
                cost, predicted = (sum(getattr(choice, what) for choice in mix.values()) for what in ("cost", "harm"))
                best = min((one.cost for one in [*known, *tried] if one.meets(budget)), default=None)
                if best is not None and cost > (1 - _WORTH_A_BUILD) * best:
                    output.note(f"what meets the budget costs {100 * (best / cost - 1):.1f}% more than another build is likely to: not worth one")
                    break
                built += 1
                output.note(f"build {built} of at most {self.builds}: a KL of {predicted:.4f} nats is predicted")
                trial = self._build(labels, predicted, cost)
                log.add(trial)
            tried.append(trial)
            value, upper = trial.judged.of_budget(budget)
            output.note(f"measured {budget.show(value)}, bound {budget.show(upper)}, budget {budget.show(budget.nats)}: "
                        f"{'met' if trial.meets(budget) else 'not met'} at {trial.bits_per_decoder_weight:.2f} bits")  # fmt: skip
            # what was predicted against what came out tells how far the next prediction may go
            last_hope = built + 1 == self.builds and not any(one.meets(budget) for one in [*known, *tried])
            reach = _reach(trial, budget, _LAST_AIM if last_hope else _AIM) if upper > 0 else 2 * reach
        everything = [*tried, *(one for one in known if one not in tried)]
        return self._publish(_winner(everything, budget), everything)

    def _build(self, mix: dict[str, str], predicted: float, cost: float) -> Trial:
        base, budget = self.job.plan.recipe, self.budget
        recipe = recipe_of(
            base, self.units, mix, f"{base.name}-{budget.label}",
            f"Schemes chosen unit by unit for a budget of {budget.show(budget.nats)}; the rest as in {base.name}.",
        )  # fmt: skip
        skeleton, reader = load_skeleton(self.job.source.directory)  # a walk leaves its skeleton behind as it was in the last layer
        assert reader is not None
        plan = make_plan(skeleton, recipe)
        directory = self.state / f"build-{mix_digest(mix)}"
        if directory.exists():  # built and sealed, its measurement lost: quantize would refuse it
            shutil.rmtree(directory)
        results: list[PplResult] = []

        def measured(unsealed: Path) -> list[dict[str, Any]]:
            result, summaries = self.measure(unsealed)
            results.append(result)
            return summaries

        quantize(replace(self.job, plan=plan, reader=reader, output=directory), measured)
        judged, held_out = (Spent.of(records) for records in judged_and_held_out(results[0]))
        assert judged is not None
        assert results[0].reference_ppl is not None
        return Trial(mix, predicted, cost, int(plan.bytes_per_token()[1]), round(plan.bits_per_weight(), 4), results[0].reference_ppl.value,
                     judged, held_out)  # fmt: skip

    def _publish(self, best: Trial, tried: list[Trial]) -> Found:
        """The winning build, its manifest told of the search, under a seal of its own at the job's output."""
        built = self.state / f"build-{best.digest}"
        if not built.exists():
            output.note("the best mix is known from an earlier search, and is built again")
            again = self._build(best.mix, best.predicted, best.cost)
            tried = [again if trial == best else trial for trial in tried]
            best = again
        files = read_seal(built)
        manifest = json.loads((built / MANIFEST_FILE).read_bytes())
        manifest["search"] = account(self.units, self.sensitivities, self.budget, self.objective, self.candidates, tried, best, self.data)
        recipe = yaml.safe_load((built / "recipe.yaml").read_bytes())
        raw = manifest_bytes(manifest)
        kept = [file for file in files if file.path not in (*REPORTS, MANIFEST_FILE, PROVENANCE_FILE)]
        made = accounts([*kept, sealed_as(MANIFEST_FILE, raw)], manifest, recipe, read_measured(built), inherited_fields(built / CARD_FILE),
                        measured_as=content_digest(files))  # fmt: skip
        digest = reseal(built, self.job.output, kept, {MANIFEST_FILE: raw, **made})
        for other in self.state.glob("build-*"):
            shutil.rmtree(other)
        return Found(self.job.output, digest, best, tried, manifest)


def _first_reach(known: Sequence[Trial], budget: Budget, calibration: CalibrationSet | None) -> float:
    """The harm to allow at first: the budget's, by what the build nearest to it had over its prediction."""
    seen = [trial for trial in known if trial.predicted > 0 and trial.upper(budget) > 0]
    nearest = min(seen, key=lambda trial: abs(trial.upper(budget) - budget.nats), default=None)
    if nearest is None:
        its_own = calibration is not None and calibration.description.get("kind") == "self"
        return _FIRST_AIM * budget.nats / (_BOUND_OVER_PREDICTED_ON_ITS_OWN if its_own else _BOUND_OVER_PREDICTED_ON_TEXT)
    return _reach(nearest, budget, _AIM)


def _reach(trial: Trial, budget: Budget, aim: float) -> float:
    """The harm to allow so that a bound lands at the share `aim` of the budget, if it is as far over its prediction as `trial`'s was."""
    return trial.predicted * aim * budget.nats / trial.upper(budget)


def _settled(trials: Sequence[Trial], budget: Budget) -> bool:
    """Whether a trial meets the budget and leaves little of it."""
    return any(_BINDS * budget.nats <= trial.upper(budget) <= budget.nats for trial in trials)


def _winner(trials: Sequence[Trial], budget: Budget) -> Trial:
    good = [trial for trial in trials if trial.meets(budget)]
    if good:
        return min(good, key=lambda trial: (trial.cost, trial.upper(budget)))
    nearest = min(trials, key=lambda trial: trial.upper(budget), default=None)
    came = "nothing could be built" if nearest is None else (
        f"the nearest of {len(trials)} builds has the bound {budget.show(nearest.upper(budget))} "
        f"at {nearest.bits_per_decoder_weight:.2f} bits a weight"
    )  # fmt: skip
    raise OverBudgetError(f"no mix meets the budget of {budget.show(budget.nats)}: {came}",
                          "measure on more records (--eval-records) for a tighter bound, or allow a larger budget")  # fmt: skip


class Trials:
    """What was built and measured, kept in a file, by the identity of sensitivities, data and objective."""

    def __init__(self, path: Path, key: str, held: dict[str, dict[str, Trial]], sensitivities: str) -> None:
        self._path, self._key, self._held, self._sensitivities = path, key, held, sensitivities

    @classmethod
    def open(cls, state: Path, sensitivities: Sensitivities, data_identity: str, objective: str) -> Trials:
        """The trials in `state`; those of other sensitivities are forgotten, those on other data or for another objective are kept apart."""
        path, key, made_by = state / TRIALS_FILE, f"{data_identity}; {objective}", sensitivities.digest
        held: dict[str, dict[str, Trial]] = {}
        try:
            document = json.loads(path.read_bytes())
            if document["sensitivities"] == made_by:
                held = {other: {digest: _trial(trial) for digest, trial in trials.items()} for other, trials in document["trials"].items()}
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError, AttributeError):
            output.warn(f"{path} can't be read: what was tried is measured again")
        return cls(path, key, held, made_by)

    def all(self) -> list[Trial]:
        """The trials on this data for this objective."""
        return list(self._held.get(self._key, {}).values())

    @property
    def everywhere(self) -> dict[str, list[Trial]]:
        """The trials by data and objective."""
        return {key: list(trials.values()) for key, trials in self._held.items()}

    def of(self, mix: dict[str, str]) -> Trial | None:
        """The trial of `mix`, if there was one."""
        return self._held.get(self._key, {}).get(mix_digest(mix))

    def add(self, trial: Trial) -> None:
        """Keep a trial, on disk too."""
        self._held.setdefault(self._key, {})[trial.digest] = trial
        trials = {key: {digest: asdict(kept) for digest, kept in held.items()} for key, held in self._held.items()}
        write_file(self._path, canonical({"sensitivities": self._sensitivities, "trials": trials}))


def _trial(entry: dict[str, Any]) -> Trial:
    held_out = entry["held_out"]
    return Trial(**{**entry, "judged": Spent(**entry["judged"]), "held_out": None if held_out is None else Spent(**held_out)})

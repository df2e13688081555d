"""The fastest checkpoint within a budget of perplexity or KL: allocate, build, measure on disk, move the limit, until the budget binds.

Predicted harms decide what is tried; only what was measured on a finished checkpoint decides what is good enough, and there the upper 95%
bound counts. Nothing relaxes the budget.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from gemq import output
from gemq.atomic import write_file
from gemq.errors import OverBudgetError, UsageError
from gemq.eval.ppl import PplResult
from gemq.quantize.allocation import Choice, allocate
from gemq.quantize.card import inherited_fields, read_measured
from gemq.quantize.checkpoint import accounts, manifest_bytes, sealed_as
from gemq.quantize.journal import canonical
from gemq.quantize.plan import Plan, make_plan
from gemq.quantize.provenance import MANIFEST_FILE, PROVENANCE_FILE
from gemq.quantize.reseal import reseal
from gemq.quantize.run import Job, quantize
from gemq.quantize.seal import CARD_FILE, REPORTS, read_seal
from gemq.quantize.sensitivity import KEEP, SCHEMES, Sensitivities, options_of
from gemq.quantize.skeleton import load_skeleton
from gemq.recipes.model import Recipe, Rule

Objective = Literal["decode", "size", "throughput"]
OBJECTIVES: tuple[str, ...] = get_args(Objective)
_BINDS = 0.85  # a bound this near the budget, from below, is near enough
_AIM = 0.92  # where in the budget the next build's bound is aimed at
_LAST_AIM = 0.8  # and that of the last one, as long as none has met it


@dataclass(frozen=True)
class Budget:
    """How much worse a checkpoint may be: PPL(checkpoint) / PPL(source) - 1, or KL(source || checkpoint) in nats a token."""

    kind: Literal["ppl", "kl"]
    limit: float

    @classmethod
    def parse(cls, ppl: str | None, kl: float | None) -> Budget | None:
        """From --ppl-budget (such as 5%) and --kl-budget (nats); None for neither. Raises UsageError for both, or one that is no budget."""
        if ppl is not None and kl is not None:
            raise UsageError("--ppl-budget and --kl-budget are both given", "give one of them")
        if ppl is None and kl is None:
            return None
        name, value, kind = "--kl-budget", kl, "kl"
        if ppl is not None:
            name, kind = "--ppl-budget", "ppl"
            try:
                value = float(ppl.removesuffix("%")) / 100 if ppl.endswith("%") else float(ppl)
            except ValueError:
                raise UsageError(f"--ppl-budget is {ppl!r}", "give a percentage such as 5%") from None
        assert value is not None
        if not (math.isfinite(value) and 0 < value <= 1):
            raise UsageError(f"{name} is {ppl if ppl is not None else kl}", "give more than nothing and at most 100% (or 1 nat)")
        return cls(kind, value)  # type: ignore[arg-type]

    @property
    def nats(self) -> float:
        """The budget as a mean difference of log-probabilities."""
        return math.log1p(self.limit) if self.kind == "ppl" else self.limit

    @property
    def label(self) -> str:
        return f"ppl-{self.limit * 100:g}pct" if self.kind == "ppl" else f"kl-{self.limit:g}"

    def spent(self, result: PplResult) -> tuple[float, float]:
        """(value, upper 95% bound) of what the budget limits, in nats; raises UsageError where the data is too little for a bound."""
        estimate = result.ratio if self.kind == "ppl" else result.kl_nats
        if estimate is None or estimate.upper_95 is None:
            raise UsageError("one record gives no bound to hold a budget to", "give at least two: --eval-records")
        return (math.log(estimate.value), math.log(estimate.upper_95)) if self.kind == "ppl" else (estimate.value, estimate.upper_95)

    def show(self, nats: float) -> str:
        """`nats` as a person reads it: a percentage of perplexity, or nats."""
        return f"{math.expm1(nats) * 100:+.2f}%" if self.kind == "ppl" else f"{nats:.4f} nats"


@dataclass(frozen=True)
class Trial:
    """A mix that was built and measured: its predicted harm, what it costs, and value and upper bound of what the budget limits, in nats."""

    mix: dict[str, str]
    predicted: float
    cost: float
    bytes_per_token: int
    bits_per_decoder_weight: float
    value: float
    upper: float

    @property
    def digest(self) -> str:
        return mix_digest(self.mix)

    @property
    def described(self) -> str:
        """How many units take each scheme."""
        counts = {label: sum(taken == label for taken in self.mix.values()) for label in [*SCHEMES, KEEP]}
        return ", ".join(f"{count} {label}" for label, count in counts.items() if count)


@dataclass(frozen=True)
class Found:
    """The checkpoint that won, its seal, what was tried, and the measurement of the winner."""

    directory: Path
    seal: str
    trial: Trial
    trials: list[Trial]
    manifest: dict[str, Any]


def mix_digest(mix: dict[str, str]) -> str:
    """The name of a mix: unit -> candidate."""
    return hashlib.sha256(canonical(mix)).hexdigest()[:12]


def choices_of(plan: Plan, found: Sensitivities, candidates: tuple[str, ...], objective: Objective) -> dict[str, list[Choice]]:
    """Unit -> what it may take, at which cost and harm: bytes for decode and size; for throughput the multiply-adds that batches wait for."""
    choices: dict[str, list[Choice]] = {}
    for unit in plan.units:
        options = options_of(plan, unit, candidates)
        choices[unit.name] = [
            Choice(name, _cost(objective, nbytes, unit.numel, name), found.harm[unit.name][name]) for name, nbytes in options.items()
        ]
    return choices


def _cost(objective: Objective, nbytes: int, numel: int, name: str) -> float:
    if objective == "throughput":
        # eight-bit products run at twice the rate of bfloat16's; weights alone in few bits save bytes and no products
        quantized_inputs = name != KEEP and SCHEMES[name].input_activations is not None
        return numel * (0.5 if quantized_inputs else 1.0) + nbytes * 1e-6
    return float(nbytes)


def recipe_of(base: Recipe, plan: Plan, mix: dict[str, str], name: str, summary: str) -> Recipe:
    """`base` with its decoder's rules replaced by one a scheme, each naming its modules."""
    patterns: dict[str, list[str]] = {}
    for unit in plan.units:
        patterns.setdefault(mix[unit.name], []).extend(
            f"re:{re.escape(matrix.tensor.removesuffix('.weight'))}$" for matrix in unit.matrices
        )
    rest = tuple(rule for rule in base.rules if rule.scheme == KEEP or set(rule.match) <= {"lm_head", "embedding", "ple_embedding"})
    made = [Rule(match=tuple(patterns[label]), scheme=scheme, method="gptq") for label, scheme in SCHEMES.items() if label in patterns]
    if KEEP in patterns:
        made.append(Rule(match=tuple(patterns[KEEP]), scheme="keep"))
    return base.model_copy(update={"name": name, "summary": summary, "rules": (*rest, *made)})


def search(
    job: Job,
    units: Plan,
    sensitivities: Sensitivities,
    budget: Budget,
    *,
    candidates: tuple[str, ...],
    objective: Objective,
    state: Path,
    measure: Callable[[Path], tuple[PplResult, list[dict[str, Any]]]],
    data_identity: str,
    builds: int = 3,
) -> Found:
    """Search, and publish the winner at `job.output`.

    `job` is the quantization to vary, `units` the plan of `sensitivity.search_plan`. `measure` scores an unsealed checkpoint beside its source
    and gives the card's summaries too. Trials are kept in `state` under `data_identity`. Raises OverBudgetError, with the nearest that came
    out, if no mix of at most `builds` builds meets the budget.
    """
    choices = choices_of(units, sensitivities, candidates, objective)
    log = _Trials(state / "trials.json", {"sensitivities": sensitivities.identity, "data": data_identity, "budget": budget.kind})
    reach, tried = _AIM * budget.nats, list[Trial]()
    for number in range(builds):
        mix = allocate(choices, reach)
        if mix is None:
            output.note(f"no mix is predicted to stay within {budget.show(reach)}")
            break
        labels = {unit: choice.label for unit, choice in mix.items()}
        predicted = sum(choice.harm for choice in mix.values())
        if any(trial.mix == labels for trial in tried):
            break
        trial = log.of(labels)
        if trial is None or not (state / f"build-{trial.digest}").exists():
            output.note(f"build {number + 1} of at most {builds}: predicted {budget.show(predicted)}")
            trial = _build(job, units, labels, predicted, sum(choice.cost for choice in mix.values()), budget, state, measure)
            log.add(trial)
        tried.append(trial)
        met = trial.upper <= budget.nats
        output.note(f"measured {budget.show(trial.value)}, bound {budget.show(trial.upper)}, budget {budget.show(budget.nats)}: "
                    f"{'met' if met else 'not met'} at {trial.bits_per_decoder_weight:.2f} bits")  # fmt: skip
        if met and trial.upper >= _BINDS * budget.nats:
            break
        # what was predicted against what came out tells how far the next prediction may go
        last_hope = number + 2 == builds and all(trial.upper > budget.nats for trial in tried)
        aim = (_LAST_AIM if last_hope else _AIM) * budget.nats
        reach = trial.predicted * aim / trial.upper if trial.upper > 0 else 2 * reach
    good = [trial for trial in tried if trial.upper <= budget.nats]
    if not good:
        nearest = min(tried, key=lambda trial: trial.upper, default=None)
        came = "nothing could be built" if nearest is None else (
            f"the nearest of {len(tried)} builds has the bound {budget.show(nearest.upper)} at {nearest.bits_per_decoder_weight:.2f} bits a weight"
        )  # fmt: skip
        raise OverBudgetError(f"no mix meets the budget of {budget.show(budget.nats)}: {came}",
                              "measure on more records (--eval-records) for a tighter bound, or allow a larger budget")  # fmt: skip
    best = min(good, key=lambda trial: (trial.cost, trial.upper))
    return _publish(job, best, tried, sensitivities, budget, objective, state)


class _Trials:
    """What was built and measured, kept in a file under the identity of sensitivities and data."""

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self._path, self._identity = path, json.loads(canonical(identity))
        self._held: dict[str, Trial] = {}
        try:
            held = json.loads(path.read_bytes())
            if held["identity"] == self._identity:
                self._held = {entry: Trial(**trial) for entry, trial in held["trials"].items()}
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError):
            output.warn(f"{path} can't be read: what was tried is measured again")

    def of(self, mix: dict[str, str]) -> Trial | None:
        return self._held.get(mix_digest(mix))

    def add(self, trial: Trial) -> None:
        self._held[trial.digest] = trial
        held = {digest: asdict(kept) for digest, kept in self._held.items()}
        write_file(self._path, canonical({"identity": self._identity, "trials": held}))


def _build(
    job: Job, units: Plan, mix: dict[str, str], predicted: float, cost: float, budget: Budget, state: Path,
    measure: Callable[[Path], tuple[PplResult, list[dict[str, Any]]]],
) -> Trial:  # fmt: skip
    base = job.plan.recipe
    recipe = recipe_of(
        base,
        units,
        mix,
        f"{base.name}-{budget.label}",
        f"Schemes chosen unit by unit for a budget of {budget.show(budget.nats)}; the rest as in {base.name}.",
    )
    skeleton, reader = load_skeleton(job.source.directory)  # a walk leaves its skeleton behind as it was in the last layer
    assert reader is not None
    plan = make_plan(skeleton, recipe)
    directory = state / f"build-{mix_digest(mix)}"
    if directory.exists():  # built and sealed, its measurement lost: quantize would refuse it
        shutil.rmtree(directory)
    results: list[PplResult] = []

    def measured(unsealed: Path) -> list[dict[str, Any]]:
        result, summaries = measure(unsealed)
        results.append(result)
        return summaries

    quantize(Job(job.source, plan, reader, job.calibration, directory, job.seed, job.device), measured)
    value, upper = budget.spent(results[0])
    return Trial(mix, predicted, cost, int(plan.bytes_per_token()[1]), round(plan.bits_per_weight(), 4), value, upper)


def _publish(
    job: Job, best: Trial, tried: list[Trial], sensitivities: Sensitivities, budget: Budget, objective: Objective, state: Path
) -> Found:
    """The winning build, its manifest told of the search, under a seal of its own at the job's output."""
    built = state / f"build-{best.digest}"
    files = read_seal(built)
    manifest = json.loads((built / MANIFEST_FILE).read_bytes())
    manifest["search"] = {
        "budget": {"kind": budget.kind, "limit": budget.limit, "nats": budget.nats}, "objective": objective,
        "tried": [{**asdict(trial), "mix": trial.described, "met": trial.upper <= budget.nats, "chosen": trial is best} for trial in tried],
        "harm": sensitivities.harm, "output_error": sensitivities.error,
    }  # fmt: skip
    recipe = yaml.safe_load((built / "recipe.yaml").read_bytes())
    raw = manifest_bytes(manifest)
    kept = [file for file in files if file.path not in (*REPORTS, MANIFEST_FILE, PROVENANCE_FILE)]
    made = accounts([*kept, sealed_as(MANIFEST_FILE, raw)], manifest, recipe, read_measured(built), inherited_fields(built / CARD_FILE))
    digest = reseal(built, job.output, kept, {MANIFEST_FILE: raw, **made})
    for other in state.glob("build-*"):
        shutil.rmtree(other)
    return Found(job.output, digest, best, tried, manifest)


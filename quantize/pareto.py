"""What each byte buys: the mixes that the sensitivities predict to be best, from the coarsest to the source, and those that were measured.

A predicted KL is the sum of what each decision's scheme alone did to the model. On text that the source writes itself, a mean KL is the
logarithm of the ratio of perplexities; so exp(KL) is the predicted ratio, and on other text no more than an estimate. What the builds of a
search measured over what was predicted is reported too, and draws a second curve.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gemq.quantize.allocation import Choice, Step, allocate, hull_steps
from gemq.quantize.budget import Budget, Trial, describe_mix
from gemq.quantize.decisions import KEEP, Option, decisions_of, options_of
from gemq.quantize.plan import Plan
from gemq.quantize.search import choices_of
from gemq.quantize.sensitivity import Sensitivities

LADDER = (0.20, 0.10, 0.05, 0.03, 0.02, 0.01, 0.005)  # budgets of perplexity in the table, besides those asked for


@dataclass(frozen=True)
class _Costs:
    options: dict[str, dict[str, Option]]
    numel: dict[str, int]
    heads: set[str]
    rest_bytes: float  # that a token reads of what the search doesn't decide on

    def token_bytes(self, mix: Mapping[str, str]) -> float:
        return self.rest_bytes + math.fsum(self.options[name][label].token_bytes for name, label in mix.items())

    def bits(self, mix: Mapping[str, str]) -> float:
        """Mean bits of a decoder weight, head excluded."""
        inside = [name for name in mix if name not in self.heads]
        return 8 * sum(self.options[name][mix[name]].disk_bytes for name in inside) / sum(self.numel[name] for name in inside)


def pareto(
    units: Plan, found: Sensitivities, candidates: Sequence[str], budgets: Sequence[Budget], trials: Mapping[str, Sequence[Trial]]
) -> dict[str, Any]:
    """The figure's and the table's data, as JSON types.

    `curve`: mixes by bytes a token, each one step after the one before it. `budgets`: the predicted mix for each, and what it bought over the
    one before. `measured`: every build of `trials` (by data and recipe), with bounds that account for the builds before it on its data.
    `correction`: what was measured over what was predicted, the median, of perplexity's logarithm and of KL; None without builds. Rows of budgets
    are corrected by it.
    """
    costs = _costs(units, candidates)
    choices = choices_of(units, found, candidates, "decode")
    start, steps = hull_steps(choices)
    measured = [_measured(key, trial) for key, held in trials.items() for trial in held]
    correction = {"ppl": _correction(measured, "log_ratio"), "kl": _correction(measured, "kl_nats")}
    return {
        "source": {"bytes_per_token": int(units.bytes_per_token()[0])},
        "candidates": list(candidates),
        "curve": _curve(start, steps, costs),
        "budgets": _rows(choices, costs, budgets, correction),
        "measured": measured,
        "correction": correction,
    }


def _correction(measured: Sequence[Mapping[str, Any]], key: str) -> float | None:
    factors = [one[key] / one["predicted_kl_nats"] for one in measured if one["predicted_kl_nats"] > 0 and one[key] > 0]
    return statistics.median(factors) if factors else None


def _costs(units: Plan, candidates: Sequence[str]) -> _Costs:
    decisions = decisions_of(units)
    options = {decision.name: options_of(units, decision, candidates) for decision in decisions}
    decided = math.fsum(taken[KEEP].token_bytes for taken in options.values())
    return _Costs(options, {decision.name: decision.numel for decision in decisions}, {d.name for d in decisions if d.is_head},
                  units.bytes_per_token()[0] - decided)  # fmt: skip


def _curve(start: Mapping[str, Choice], steps: Sequence[Step], costs: _Costs) -> list[dict[str, Any]]:
    mix = {name: choice.label for name, choice in start.items()}
    harm, size = math.fsum(choice.harm for choice in start.values()), costs.token_bytes(mix)
    points = [_point(harm, size, None)]
    for step in steps:
        harm, size = harm + step.after.harm - step.before.harm, size + step.after.cost - step.before.cost
        points.append(_point(max(harm, 0.0), size, {
            "decision": step.name, "from": step.before.label, "to": step.after.label, "bytes": int(step.after.cost - step.before.cost),
            "kl_nats": step.before.harm - step.after.harm,
        }))  # fmt: skip
    return points


def _point(harm: float, size: float, step: dict[str, Any] | None) -> dict[str, Any]:
    return {"bytes_per_token": int(size), "predicted_kl_nats": harm, "predicted_ratio": math.exp(harm), "step": step}


def _rows(
    choices: Mapping[str, Sequence[Choice]], costs: _Costs, budgets: Sequence[Budget], correction: Mapping[str, float | None]
) -> list[dict[str, Any]]:
    """Budgets from the loosest to the tightest: the cheapest mix predicted to be within each, and what changed from the row before."""
    asked = {budget.nats: budget for budget in budgets}
    ladder = {budget.nats: budget for budget in (Budget("ppl", limit) for limit in LADDER)}
    rows: list[dict[str, Any]] = []
    before: dict[str, str] | None = None
    for nats, budget in sorted({**ladder, **asked}.items(), reverse=True):
        made = allocate(choices, nats / (correction[budget.kind] or 1.0))
        if made is None:
            rows.append({"budget": budget.show(nats), "asked": nats in asked, "kind": budget.kind, "limit": budget.limit, "mix": None})
            continue
        mix = {name: choice.label for name, choice in made.items()}
        harm, size = math.fsum(choice.harm for choice in made.values()), costs.token_bytes(mix)
        previous = rows[-1] if rows and rows[-1]["mix"] is not None else None
        rows.append({
            "budget": budget.show(nats), "asked": nats in asked, "kind": budget.kind, "limit": budget.limit, "mix": describe_mix(mix),
            "bytes_per_token": int(size), "bits_per_decoder_weight": round(costs.bits(mix), 4), "predicted_kl_nats": harm,
            "predicted_ratio": math.exp(harm * (correction["ppl"] or 1.0)),
            "bought": None if previous is None or before is None else {
                "bytes": int(size) - previous["bytes_per_token"], "kl_nats": previous["predicted_kl_nats"] - harm, "changes": _changes(before, mix)},
        })  # fmt: skip
        before = mix
    return rows


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """"3 units int4-g128 → int8", the most frequent first."""
    counts: dict[tuple[str, str], list[str]] = {}
    for name, label in after.items():
        if before[name] != label:
            counts.setdefault((before[name], label), []).append(name)
    ordered = sorted(counts.items(), key=lambda item: (-len(item[1]), item[0]))
    return [f"{names[0] if len(names) == 1 else f'{len(names)} units'} {old} → {new}" for (old, new), names in ordered]


def _measured(key: str, trial: Trial) -> dict[str, Any]:
    held_out = trial.held_out
    return {
        "data": key, "mix": trial.described, "bytes_per_token": trial.bytes_per_token, "bits_per_decoder_weight": trial.bits_per_decoder_weight,
        "predicted_kl_nats": trial.predicted, "predicted_ratio": math.exp(trial.predicted), "log_ratio": trial.judged.log_ratio,
        "ratio": math.exp(trial.judged.log_ratio), "ratio_upper_95": _exp(trial.judged.log_ratio_upper), "kl_nats": trial.judged.kl,
        "kl_upper_95": trial.judged.kl_upper, "records": trial.judged.records, "reference_ppl": trial.reference_ppl,
        "held_out_ratio": None if held_out is None else math.exp(held_out.log_ratio), "held_out_records": 0 if held_out is None else held_out.records,
    }  # fmt: skip


def _exp(value: float | None) -> float | None:
    return None if value is None else math.exp(value)


def sensitivity_map(units: Plan, found: Sensitivities, candidates: Sequence[str]) -> dict[str, Any]:
    """The KL that each decision's coarsest scheme was measured to add, as the report's heat map takes it."""
    entries: list[dict[str, Any]] = []
    for decision in decisions_of(units):
        options = [option for option in options_of(units, decision, candidates).values() if option.label != KEEP]
        coarsest = min(options, key=lambda option: (option.disk_bytes, option.label), default=None)
        if coarsest is not None:
            kind = decision.name.removeprefix(f"layers.{decision.layer}.")
            entries.append({"unit": decision.name, "layer": decision.layer, "kind": kind, "scheme": coarsest.label, "method": "",
                            "error": found.harm[decision.name][coarsest.label], "of": "KL"})  # fmt: skip
    kinds = list(dict.fromkeys(entry["kind"] for entry in entries if entry["layer"] is not None))
    layers = 1 + max((entry["layer"] for entry in entries if entry["layer"] is not None), default=-1)
    return {"label": "KL, nats a token", "checkpoints": [{"name": "the coarsest scheme, one unit at a time", "layers": layers, "kinds": kinds,
                                                          "units": entries}]}  # fmt: skip

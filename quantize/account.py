"""The search's section in the checkpoint's manifest and card: what was searched, tried and rejected."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from gemq.output import human_bytes
from gemq.quantize.budget import Budget, Spent, Trial
from gemq.quantize.decisions import decisions_of, options_of, refusals
from gemq.quantize.looks import confidence_of
from gemq.quantize.plan import Plan
from gemq.quantize.sensitivity import Sensitivities


def account(
    units: Plan, found: Sensitivities, budget: Budget, objective: str, candidates: Sequence[str], tried: Sequence[Trial], best: Trial,
    data: dict[str, Any], looks: int,
) -> dict[str, Any]:  # fmt: skip
    """manifest["search"]: budget, data, every build with why it was not chosen, every decision with what it could have taken.

    `looks`: how many checkpoints were measured on these records in this search directory, by this search and before it, whatever their recipe;
    all their bounds together hold with 95% confidence.

    Numbers are rounded to five figures; nothing in it differs between two searches that find the same.
    """
    return {
        "budget": {"kind": budget.kind, "limit": budget.limit, "nats": budget.nats},
        "objective": objective,
        "candidates": list(candidates),
        "data": data,
        "bound": {"confidence": 0.95, "method": "Bonferroni correction, spent over the looks at these records in one search directory",
                  "looks": looks, "confidence_of_the_chosen_alone": round(confidence_of(best.look), 6)},
        "held_out": None if best.held_out is None else _held_out(best.held_out, budget),
        "tried": [_tried(trial, best, budget) for trial in tried],
        "decisions": _decisions(units, found, candidates, best),
    }


def _figures(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def _held_out(spent: Spent, budget: Budget) -> dict[str, Any]:
    value = spent.log_ratio if budget.kind == "ppl" else spent.kl
    return {"records": spent.records, "tokens": spent.tokens, "value": _figures(value), "told": budget.show(value), "within": value <= budget.nats}


def _tried(trial: Trial, best: Trial, budget: Budget) -> dict[str, Any]:
    value, upper = trial.judged.of_budget(budget)
    spent = {key: _figures(value) for key, value in asdict(trial.judged).items()}
    return {
        "mix": trial.described, "chosen": trial is best, "met": trial.meets(budget), "why_not": why_not_chosen(trial, best, budget),
        "look": trial.look, "predicted": _figures(trial.predicted), "value": _figures(value), "upper": _figures(upper),
        "bytes_per_token": trial.bytes_per_token, "bits_per_decoder_weight": trial.bits_per_decoder_weight, "cost": _figures(trial.cost),
        "ppl_ratio": _figures(math.exp(trial.judged.log_ratio)), "ppl_ratio_upper_95": _exp(trial.judged.log_ratio_upper),
        "kl_nats": spent["kl"], "kl_upper_95": spent["kl_upper"], "records": trial.judged.records,
    }  # fmt: skip


def _exp(value: float | None) -> float | None:
    return None if value is None else _figures(math.exp(min(value, 700.0)))  # a bound on two records can be larger than a float's exponent


def why_not_chosen(trial: Trial, best: Trial, budget: Budget) -> str:
    """Why `trial` is not the checkpoint, "" for the one that is."""
    if trial is best:
        return ""
    if not trial.meets(budget):
        return f"its bound {budget.show(trial.upper(budget))} is above the budget {budget.show(budget.nats)}"
    more = trial.bytes_per_token - best.bytes_per_token
    return f"within the budget, and a token reads {human_bytes(more)} more" if more > 0 else "within the budget, and costs no less"


def _decisions(units: Plan, found: Sensitivities, candidates: Sequence[str], best: Trial) -> dict[str, Any]:
    made = {}
    for decision in decisions_of(units):
        options = options_of(units, decision, candidates)
        considered = {
            label: {
                "bytes": option.disk_bytes, "bytes_per_token": int(option.token_bytes), "error": _figures(found.error[decision.name][label]),
                "predicted_kl_nats": _figures(found.harm[decision.name][label]),
            }
            for label, option in options.items()
        }  # fmt: skip
        refused = refusals(units, decision, candidates)
        made[decision.name] = {"chosen": best.mix[decision.name], "considered": considered, **({"refused": refused} if refused else {})}
    return made


def card_lines(search: dict[str, Any]) -> list[str]:
    """The card's section on a search, of this gemq or an earlier one."""
    budget = Budget(search["budget"]["kind"], search["budget"]["limit"])
    named = "perplexity over the source's" if budget.kind == "ppl" else "KL from the source, nats a token"
    lines = ["## How the schemes were chosen", "",
             f"For a budget of {budget.show(budget.nats)} ({named}), which limits the upper 95% bound, among "
             f"{', '.join(search['candidates'])}; made small: {search['objective']}. Predicted is the sum of what each unit alone did to the "
             f"model; the rest was measured on finished checkpoints. {_which_bound(search)}", "",
             "| mix | bits a weight | a token reads | predicted KL | measured | 95% bound | |", "|---|---|---|---|---|---|---|"]  # fmt: skip
    for trial in search["tried"]:
        lines.append(f"| {trial['mix']} | {trial['bits_per_decoder_weight']:.2f} | {human_bytes(trial['bytes_per_token'])} | "
                     f"{trial['predicted']:.4f} | {budget.show(trial['value'])} | {budget.show(trial['upper'])} | "
                     f"{'this checkpoint' if trial['chosen'] else trial['why_not']} |")  # fmt: skip
    held_out = search["held_out"]
    if held_out is not None:
        lines += ["", f"On {held_out['records']} held-out records, which the search did not use: {held_out['told']}."]
    return [*lines, "", "`gemq.json` has every unit with what it could have taken, and what was refused and why.", ""]


def _which_bound(search: dict[str, Any]) -> str:
    bound = search.get("bound")
    if bound is None:
        return "The 95% bounds are those of one measurement each and do not account for the choice among them."
    alone = 100 * bound["confidence_of_the_chosen_alone"]
    return (f"The 95% bounds in this table hold for all {bound['looks']} checkpoints measured on these records in one search "
            f"directory together (Bonferroni correction; "
            f"the chosen one's alone has {alone:.2f}%). Bounds elsewhere in this card are those of a single measurement.")  # fmt: skip

"""The page of `gemq pareto`: what is predicted and what was measured, and what each step bought."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gemq
from gemq.eval.report.tables import NONE, Section, Table, number, percent, rows_of, size
from gemq.eval.report.write import publish

_WHAT = ("Grey and black lines are predictions: the sum of what each unit's scheme alone did to the source on held-out windows, and that sum "
         "times what the builds came to. Blue points were measured on finished checkpoints; whiskers end at the one-sided bound "
         "that a budget limits; the bounds of all builds of one recipe on the same records hold together with 95% confidence.")  # fmt: skip


def pareto_section(data: dict[str, Any]) -> Section:
    """The figure, the table of budgets and what each bought, and the table of builds."""
    rows = []
    for one in data["budgets"]:
        named = f"{one['budget']}{' (asked for)' if one['asked'] else ''}"
        if one["mix"] is None:
            rows.append((named, "no mix is predicted to be within", NONE, NONE, NONE, NONE))
            continue
        bought = one["bought"]
        what = "the cheapest here" if bought is None else (
            f"{size(bought['bytes'])} more a token, {bought['kl_nats']:.4f} nats less: {'; '.join(bought['changes'][:4])}"
            + ("; …" if len(bought["changes"]) > 4 else "") if bought["changes"] else "nothing: the same mix")  # fmt: skip
        rows.append((named, one["mix"], size(one["bytes_per_token"]), f"{one['bits_per_decoder_weight']:.2f}", percent(one["predicted_ratio"]), what))
    corrected = data["correction"]["ppl"] is not None
    tables = [Table(("budget", "mix", "a token reads", "bits a weight", "predicted, corrected" if corrected else "predicted", "what the step bought"),
                    rows_of(rows), frozenset({2, 3, 4}), "Predicted: the cheapest mix for each budget, and what it bought over the one above")]
    if data["measured"]:
        built = [(one["mix"], size(one["bytes_per_token"]), f"{one['bits_per_decoder_weight']:.2f}", percent(one["predicted_ratio"]),
                  percent(one["ratio"]), percent(one["ratio_upper_95"]), one["kl_nats"], percent(one["held_out_ratio"]), one["records"])
                 for one in data["measured"]]  # fmt: skip
        columns = ("mix", "a token reads", "bits a weight", "predicted", "measured", "95% bound", "KL, nats", "on records held out", "records")
        tables.append(Table(columns, rows_of(built), frozenset({1, 2, 3, 4, 5, 6, 7, 8}), "Measured: every build of a search"))
    notes = [] if data["measured"] else ["Nothing here was measured on a checkpoint yet: gemq quantize --ppl-budget builds and measures."]
    return Section("pareto", "Perplexity against bytes a token", [_WHAT], data,
                   "Perplexity over the source's against the bytes that a decoded token reads", tables, notes)


def sensitivity_section(data: dict[str, Any]) -> Section:
    """The heat map of what the coarsest scheme does, unit by unit."""
    units = sorted(data["checkpoints"][0]["units"], key=lambda unit: -unit["error"])[:12]
    table = Table(("unit", "scheme", "KL, nats a token"), rows_of([(unit["unit"], unit["scheme"], unit["error"]) for unit in units]), frozenset({2}),
                  "The most sensitive")
    return Section("sensitivities", "What one unit does to the whole model", ["KL(source || source with this unit alone at its coarsest scheme), "
                                                                             "measured on held-out windows."],
                   data, "KL that each unit's coarsest scheme adds, layer by layer", [table])  # fmt: skip


def write_pareto(target: Path, model: str, data: dict[str, Any], sensitivities: dict[str, Any]) -> dict[str, Any]:
    """Publish the page with its figures; returns what report.json holds."""
    told = f"; perplexity {number(data['reference_ppl'])} of the source on {data['reference_data']}" if data["reference_ppl"] is not None else ""
    opening = [f"Made by gemq {gemq.__version__} from sensitivities of {model} among {', '.join(data['candidates'])}{told}. "
               "This page asks the network for nothing."]  # fmt: skip
    return publish(target, f"What each byte of {model} buys", opening, [], [pareto_section(data), sensitivity_section(sensitivities)], [],
                   {"kind": "pareto", "model": model})

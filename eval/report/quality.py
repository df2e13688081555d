"""The sections on quality: gates, perplexity against bytes, errors by layer and unit, KL position by position, perplexity record by record."""

from __future__ import annotations

import math
import re
from typing import Any

from gemq.eval.histogram import EDGES, kl_histogram
from gemq.eval.report.collect import Checkpoint, Material, Rehearsed, Result, is_against_source, is_of
from gemq.eval.report.tables import Missing, Section, Table, number, percent, rows_of, size
from gemq.eval.scores import PPL_MARGIN

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


def gates(material: Material) -> Section | Missing:
    """Every gate of every rehearsal with its value, its limit and its margin."""
    title = "Gates"
    judged = [one for one in material.rehearsals if one.verdict is not None]
    if not judged:
        unfinished = [one.name for one in material.rehearsals]
        why = f"the rehearsal {unfinished[0]} is not finished" if unfinished else "no rehearsal is there"
        return Missing("gates", title, why, "gemq rehearse SUBMISSION --arena efficient-gemma --reference SOURCE --ppl RECORDS.jsonl --output DIR")
    entries, tables = [], []
    for one in judged:
        verdict: Any = one.verdict
        listed = [{**{key: gate[key] for key in ("name", "value", "limit", "kept", "margin")}, "used": _used(gate)} for gate in verdict["gates"]]
        entries.append({"name": one.name, "arena": verdict["arena"], "valid": verdict["valid"], "score": verdict["score"], "parts": verdict["parts"],
                        "gates": listed, "not_enforced": verdict["not_enforced"]})
        rows = [(gate["name"], "✓ kept" if gate["kept"] else "✗ failed", gate["value"], gate["limit"], gate["margin"]) for gate in listed]
        state = "valid" if verdict["valid"] else "not valid"
        tables.append(Table(("gate", "", "value", "limit", "margin"), rows_of(rows), frozenset({2, 3, 4}),
                            f"{one.name} at {verdict['arena']}: score {number(verdict['score'])}, {state}"))
    notes = [f"Not enforced in {entry['name']}: {point}." for entry in entries for point in entry["not_enforced"]]
    return Section("gates", title, ["A gate is kept as long as its value has not used up its limit. The margin is what is left of it."],
                   {"rehearsals": entries}, "How much of each gate's limit is used", tables, notes)


def _used(gate: dict[str, Any]) -> float | None:
    """The share of a gate's limit that its value uses: below 1 it is kept. None for what is yes or no, and for what was not measured."""
    value, limit, margin = gate["value"], gate["limit"], gate["margin"]
    if value is None or limit in (0, None) or (limit == 1 and value in (0, 1)):
        return None
    at_most = math.isclose(limit - value, margin, rel_tol=1e-6, abs_tol=1e-12)
    if at_most:
        return float(value / limit)
    return float(limit / value) if value > 0 else None


def tradeoff(material: Material) -> Section | Missing:
    """Perplexity over the source's against the bytes that a decoded token reads, with budgets."""
    title = "Perplexity against bytes a token"
    points: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    sources, tried, budgets = {}, [], {}
    for checkpoint in material.checkpoints:
        sizes = checkpoint.manifest["bytes"]
        model = str(checkpoint.manifest["source"]["model"])
        search = checkpoint.manifest.get("search")
        if isinstance(search, dict):
            budget = search["budget"]
            if budget["kind"] == "ppl":
                budgets[f"budget of {checkpoint.name}: {percent(1 + budget['limit'], 1)}"] = 1 + budget["limit"]
            tried += [one for trial in search["tried"] if (one := _tried(checkpoint.name, trial, budget["kind"])) is not None]
        for made in _measurements(material, checkpoint):
            ratio = made["ratio"]
            against_source = is_against_source(made, checkpoint)
            (points if against_source else others).append({
                "name": checkpoint.name, "bytes_per_token": sizes["per_token_checkpoint"],
                "bits_per_decoder_weight": sizes["bits_per_decoder_weight"], "ratio": ratio["value"],
                "ratio_upper_95": ratio["upper_95"], "ppl": made["ppl"]["value"],
                "reference_ppl": made["reference_ppl"]["value"], "data": made["data"], "records": made["records"], "tokens": made["tokens"],
                "dtype": made.get("dtype"), "device": made.get("device"), "against": material.against(made), "from": made["from"],
            })  # fmt: skip
            if against_source:
                key = (model, made["data_sha256"], made["tokens"], made["records"], made.get("dtype"), made.get("device"))
                sources[key] = {"model": model, "bytes_per_token": sizes["per_token_source"], "ppl": made["reference_ppl"]["value"],
                                "data": made["data"]}  # fmt: skip
    tried, not_shown = _once(tried), _not_shown(material)
    if not points:
        why = "no checkpoint's perplexity was measured against its source's" if material.checkpoints else "no checkpoint is there"
        why += "".join(f"; {one['from']} is against {one['against']}" for one in others)
        why += "".join(f"; {reason.removeprefix('Not shown: ').rstrip('.')}" for reason in not_shown)
        return Missing("tradeoff", title, why, "gemq eval-ppl CHECKPOINT --reference SOURCE --data RECORDS.jsonl --output DIR/ppl.json")
    if any(one.verdict is not None and one.verdict.get("arena") == "efficient-gemma" for one in material.rehearsals):
        budgets[f"cap of efficient-gemma: {percent(1 + PPL_MARGIN, 0)}"] = 1 + PPL_MARGIN
    rows = [(one["name"], size(one["bytes_per_token"]), one["bits_per_decoder_weight"], one["ppl"], one["reference_ppl"], percent(one["ratio"]),
             percent(one["ratio_upper_95"]), one["data"], one["records"], _computed(one)) for one in points]  # fmt: skip
    columns = ("checkpoint", "a token reads", "bits a weight", "PPL", "source's PPL", "difference", "95% bound", "data", "records", "computed")
    tables = [Table(columns, rows_of(rows), frozenset({1, 2, 3, 4, 5, 6, 8}))]
    if others:
        compared = [(one["name"], one["against"], one["ppl"], one["reference_ppl"], percent(one["ratio"]), percent(one["ratio_upper_95"]),
                     one["data"], one["records"], _computed(one)) for one in others]  # fmt: skip
        tables.append(Table(("checkpoint", "against", "PPL", "reference's PPL", "difference", "95% bound", "data", "records", "computed"),
                            rows_of(compared), frozenset({2, 3, 4, 5, 7}), "Against another reference than the source"))
    if tried:
        built = [(one["mix"], size(one["bytes_per_token"]), one["bits_per_decoder_weight"], percent(one["predicted_ratio"]), percent(one["ratio"]),
                 percent(one["ratio_upper_95"]), "chosen" if one["chosen"] else "met" if one["met"] else "not met") for one in tried]  # fmt: skip
        tables.append(Table(("what the search built", "a token reads", "bits a weight", "predicted", "measured", "95% bound", ""), rows_of(built),
                            frozenset({1, 2, 3, 4, 5}), "The search's builds"))
    text = ["Bytes are those of linears and head that one decoded token reads; perplexity is told over the source's on the same records. "
            "Whiskers end at the one-sided 95% bound, which is what a budget binds on."]  # fmt: skip
    if tried:
        text.append("Predicted is what the search expected from each unit's own measurement; everything else here is measured on a finished "
                    "checkpoint.")  # fmt: skip
    data = {"checkpoints": points, "against_others": others, "sources": list(sources.values()), "tried": tried,
            "budgets": [{"label": label, "ratio": ratio} for label, ratio in budgets.items()]}  # fmt: skip
    return Section("tradeoff", title, text, data, "Perplexity over the source's against the bytes that a decoded token reads", tables, not_shown)


def _computed(one: dict[str, Any]) -> str:
    return " on ".join(one[key] for key in ("dtype", "device") if one[key]) or "–"


def _once(tried: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each build once: searches that share their state tell of each other's, and one that was chosen anywhere is chosen."""
    kept: dict[tuple[Any, ...], dict[str, Any]] = {}
    for one in tried:
        key = (one["mix"], one["bytes_per_token"], one["ratio"])
        if key not in kept or one["chosen"]:
            kept[key] = one
    return list(kept.values())


def _tried(name: str, trial: dict[str, Any], kind: str) -> dict[str, Any] | None:
    """A build of a search as a point; None where its perplexity is not known (a search by KL of an older gemq)."""
    ratio, upper = trial.get("ppl_ratio"), trial.get("ppl_ratio_upper_95")
    if ratio is None and kind == "ppl":
        ratio, upper = math.exp(trial["value"]), math.exp(trial["upper"])
    if ratio is None:
        return None
    return {"checkpoint": name, "mix": trial["mix"], "bytes_per_token": trial["bytes_per_token"],
            "bits_per_decoder_weight": trial["bits_per_decoder_weight"], "predicted_ratio": math.exp(trial["predicted"]), "ratio": ratio,
            "ratio_upper_95": upper, "met": trial["met"], "chosen": trial["chosen"]}  # fmt: skip


def _measurements(material: Material, checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Every perplexity of `checkpoint` with a reference's: of its own account, and of results, where their digest is this checkpoint's.

    Two are one measurement only where reference, data and how it was computed are equal. A result has more details than the account's copy of it,
    which names the kind of device alone, and takes its place.
    """
    results = {}
    for result in material.of_kind("ppl"):
        document = result.document
        if document.get("ratio") and is_of(document, checkpoint):
            results[_key(document, document.get("device"))] = {**document, "data": document["data"].rpartition("/")[2], "from": result.name}
    copied = {_key(one, _device_kind(one)) for one in results.values()}
    own = {}
    for made in checkpoint.measured:
        key = _key(made, _device_kind(made))
        if made["kind"] == "ppl" and made.get("ratio") and is_of(made, checkpoint) and key not in copied:
            own[key] = {**made, "from": f"{checkpoint.name}/measured.json"}
    return [*own.values(), *results.values()]


def _key(made: dict[str, Any], device: str | None) -> tuple[Any, ...]:
    return (*(made.get(key) for key in ("data_sha256", "tokens", "records", "dtype", "reference_digest")), device)


def _device_kind(made: dict[str, Any]) -> str | None:
    device = made.get("device")
    return device.partition(" ")[0] if isinstance(device, str) else None


def _not_shown(material: Material) -> list[str]:
    """A sentence on every perplexity that is of none of the checkpoints here, or says not of which."""
    found = [(f"{checkpoint.name}/measured.json", made) for checkpoint in material.checkpoints for made in checkpoint.measured
             if made["kind"] == "ppl" and not is_of(made, checkpoint)]  # fmt: skip
    found += [(result.name, result.document) for result in material.of_kind("ppl")
              if not any(is_of(result.document, checkpoint) for checkpoint in material.checkpoints)]  # fmt: skip
    reasons = {True: "is unbound: it does not record which weights it measured", False: "is of weights that are not here"}
    return list(dict.fromkeys(f"Not shown: {name} {reasons[not isinstance(made.get('target_digest'), str)]}." for name, made in found))


def errors(material: Material) -> Section | Missing:
    """The error of every unit by layer, and what a search expected of it."""
    title = "Error by layer and unit"
    entries = [_error_map(checkpoint) for checkpoint in material.checkpoints]
    if not entries:
        return Missing("errors", title, "no checkpoint is there", "gemq quantize SOURCE --output DIR/checkpoint")
    tables = []
    for entry in entries:
        worst = sorted(entry["units"], key=lambda unit: -unit["error"])[:8]
        tables.append(Table(("unit", "scheme", "solver", "error"), rows_of([(u["unit"], u["scheme"], u["method"], u["error"]) for u in worst]),
                            frozenset({3}), f"{entry['name']}: the units with the largest error"))
    text = ["The relative squared error of a unit's output on the calibration set (of its weights where it was rounded to nearest without "
            "calibration). Letters in a cell name the scheme where there are several: 4 and 8 for int4 and int8, f8 for fp8, and the group size "
            "below; grey cells are as in the source."]  # fmt: skip
    return Section("errors", title, text, {"checkpoints": entries}, "The error of every quantized unit, layer by layer", tables)


def _error_map(checkpoint: Checkpoint) -> dict[str, Any]:
    units = []
    for name, report in checkpoint.manifest["units"].items():
        found = _LAYER.fullmatch(name)
        error = report.get("output_error", report.get("weight_error"))
        units.append({"unit": name, "layer": int(found[1]) if found else None, "kind": found[2] if found else name, "scheme": str(report["scheme"]),
                      "method": str(report["method"]), "error": float(error), "of": "output" if "output_error" in report else "weights"})
    kinds = list(dict.fromkeys(unit["kind"] for unit in units if unit["layer"] is not None))
    layers = 1 + max((unit["layer"] for unit in units if unit["layer"] is not None), default=-1)
    return {"name": checkpoint.name, "layers": layers, "kinds": kinds, "units": units}


def divergence(material: Material) -> Section | Missing:
    """How KL is spread over positions."""
    title = "KL position by position"
    entries = []
    for one in material.rehearsals:
        if one.stages.keys() >= {"scores", "reference-scores"}:
            entries.append(_served_histogram(one) | {"of": material.origin(one.verdict), "against": material.against(one.verdict)})
    for result in [*material.of_kind("ppl"), *material.of_kind("kl")]:
        counts = result.document.get("kl_histogram")
        if counts:
            estimate = result.document["kl_nats"]
            entries.append({"name": result.name, "of": material.origin(result.document), "against": material.against(result.document),
                            "how": "over the whole vocabulary", "edges": list(EDGES),
                            "counts": list(counts),
                            "mean": estimate["value"], "upper_95": estimate["upper_95"]})
    if not entries:
        return Missing("divergence", title, "no KL was measured position by position",
                       "gemq eval-kl CHECKPOINT --reference SOURCE --data RECORDS.jsonl --output DIR/kl.json")
    rows = [(e["name"], e["of"], e["against"], e["how"], sum(e["counts"]), e["mean"], e["upper_95"], _quantile(e, 0.5), _quantile(e, 0.99),
             f"{100 * _above(e, 0.1):.1f}%")
            for e in entries]  # fmt: skip
    table = Table(("measured by", "of", "against", "how", "positions", "mean", "95% bound", "median, at most", "99% are below", "above 0.1"),
                  rows_of(rows), frozenset({4, 5, 6, 7, 8, 9}))  # fmt: skip
    text = ["KL(reference || checkpoint) in nats at each scored position. A few positions usually carry most of the mean, so the mean alone says "
            "little about the rest. Quantiles are the upper ends of their bins."]  # fmt: skip
    return Section("divergence", title, text, {"measured": entries}, "How many positions have which KL", [table])


def _served_histogram(one: Rehearsed) -> dict[str, Any]:
    from gemq.eval.served_kl import position_kl, served_kl

    sides = [[[{int(token): float(value) for token, value in position.items()} for position in record] for record in one.stages[name]["records"]]
             for name in ("reference-scores", "scores")]  # fmt: skip
    estimate = served_kl(*sides)
    values = [position_kl(p, q) for a, b in zip(*sides, strict=True) for p, q in zip(a, b, strict=True)]
    return {"name": one.name, "how": "served, over the likeliest tokens and all others as one", "edges": list(EDGES),
            "counts": kl_histogram(values), "mean": estimate.value, "upper_95": estimate.upper_95}  # fmt: skip


def _quantile(entry: dict[str, Any], share: float) -> float:
    """The upper end of the bin in which `share` of the positions is reached."""
    wanted, reached = share * sum(entry["counts"]), 0
    for edge, count in zip(entry["edges"][1:], entry["counts"], strict=True):
        reached += count
        if reached >= wanted:
            return float(edge)
    return float(entry["edges"][-1])


def _above(entry: dict[str, Any], limit: float) -> float:
    """The share of positions in bins from `limit` on."""
    above = sum(count for edge, count in zip(entry["edges"], entry["counts"], strict=False) if edge >= limit * (1 - 1e-9))
    return above / max(1, sum(entry["counts"]))


def records(material: Material) -> Section | Missing:
    """Each record's perplexity beside the reference's."""
    title = "Perplexity record by record"
    entries = [entry | {"of": material.origin(one.verdict), "against": material.against(one.verdict)} for one in material.rehearsals
               if (entry := _rehearsed_records(one)) is not None]  # fmt: skip
    entries += [entry | {"of": material.origin(result.document), "against": material.against(result.document)} for result in material.of_kind("ppl")
                if (entry := _measured_records(result)) is not None]  # fmt: skip
    if not entries:
        return Missing("records", title, "no perplexity was measured record by record beside a reference's",
                       "gemq eval-ppl CHECKPOINT --reference SOURCE --data RECORDS.jsonl --output DIR/ppl.json")
    tables = []
    for entry in entries:
        worst = sorted(entry["records"], key=lambda record: -record["ratio"])[:5]
        rows = [(record["id"], record["tokens"], record["ppl"], record["reference_ppl"], percent(record["ratio"])) for record in worst]
        tables.append(Table(("record", "tokens", "PPL", "reference's PPL", "difference"), rows_of(rows), frozenset({1, 2, 3, 4}),
                            f"{entry['name']}, of {entry['of']} against {entry['against']}: {percent(entry['ratio'])} over all, "
                            f"{len(entry['records'])} records; "
                            "the five that lost most"))
    return Section("records", title, ["Each point is a record; those above the line of 0% became less likely than they are to the reference."],
                   {"measured": entries}, "Each record's perplexity over the reference's", tables)


def _entry(name: str, rows: list[tuple[str, int, float, float]]) -> dict[str, Any]:
    listed = [{"id": str(record), "tokens": tokens, "ppl": math.exp(ours / tokens), "reference_ppl": math.exp(theirs / tokens),
               "ratio": math.exp((ours - theirs) / tokens)} for record, tokens, ours, theirs in rows]  # fmt: skip
    tokens = sum(row[1] for row in rows)
    return {"name": name, "records": listed, "ratio": math.exp(math.fsum(ours - theirs for _, _, ours, theirs in rows) / tokens)}


def _rehearsed_records(one: Rehearsed) -> dict[str, Any] | None:
    if not one.stages.keys() >= {"ppl", "reference-ppl"}:
        return None
    theirs = {record["id"]: record for record in one.stages["reference-ppl"]["per_record"]}
    rows = [(record["id"], record["tokens"], record["nll_nats"], theirs[record["id"]]["nll_nats"])
            for record in one.stages["ppl"]["per_record"] if record["id"] in theirs]  # fmt: skip
    return _entry(one.name, rows) if rows else None


def _measured_records(result: Result) -> dict[str, Any] | None:
    rows = [(record["id"], record["tokens"], record["nll_nats"], record["reference_nll_nats"]) for record in result.document["per_record"]
            if record.get("reference_nll_nats") is not None]  # fmt: skip
    return _entry(result.name, rows) if rows else None


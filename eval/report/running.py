"""The sections on running and on origin: latency and throughput, memory over time, answers, and where everything comes from."""

from __future__ import annotations

from collections import Counter
from typing import Any

from gemq.eval.report.collect import Checkpoint, Material
from gemq.eval.report.tables import NONE, Missing, Section, Table, number, percent, rows_of, size

BENCH = "gemq bench SUBMISSION --workload efficient-gemma --output DIR/bench"
_SIDES = {"speed-": "submission", "reference-speed-": "reference"}


def _benches(material: Material) -> list[tuple[str, str, dict[str, Any]]]:
    """(where, whose, bench document) of every measurement of speed."""
    found = []
    for one in material.rehearsals:
        for stage, document in one.stages.items():
            side = next((side for prefix, side in _SIDES.items() if stage.startswith(prefix)), None)
            if side is not None and document.get("kind") == "bench":
                found.append((one.name, side, document))
    return found + [(f"{result.name}, of {material.origin(result.document)}", "submission", result.document) for result in material.of_kind("bench")]


def speed(material: Material) -> Section | Missing:
    """Throughput and latency, load by load."""
    title = "Throughput and latency"
    entries: list[dict[str, Any]] = []
    for where, side, document in _benches(material):
        for load in document["loads"]:
            runs, probe = load["runs"], load["streamed_probe"] or load["runs"][0]
            entries.append({
                "from": where, "side": side, "load": load["name"], "requests": load["requests"], "output_tokens": load["output_tokens"],
                "in_flight": load["in_flight"], "tps": [run["tps"] for run in runs], "tps_mean": load["tps"]["mean"],
                "tps_lower_95": load["tps"]["lower_95"], "latency_ms": runs[0]["latency_ms"], "first_token_ms": probe["first_token_ms"],
                "between_tokens_ms": probe["between_tokens_ms"],
            })  # fmt: skip
    if not entries:
        return Missing("speed", title, "nothing was timed", BENCH)

    def times(measured: dict[str, float] | None) -> str:
        return NONE if measured is None else f"{number(measured['median'])} / {number(measured['p99'])}"

    rows = [(e["from"], e["side"], e["load"], f"{e['requests']} × {e['output_tokens']}, {e['in_flight']} in flight", e["tps_mean"], e["tps_lower_95"],
             times(e["latency_ms"]), times(e["first_token_ms"]), times(e["between_tokens_ms"])) for e in entries]  # fmt: skip
    columns = ("measured in", "of", "load", "requests × tokens", "tokens/s", "safe to report", "latency, ms", "first token, ms", "between tokens, ms")
    return Section("speed", title, ["Tokens per second are counted from token ids. Times are medians and 99th percentiles over requests (between "
                                    "tokens: over tokens), of the first run. Safe to report is the bound above which one more run lies with 95% "
                                    "confidence; it needs several runs."],
                   {"loads": entries}, "Tokens per second and latency, load by load", [Table(columns, rows_of(rows), frozenset({4, 5, 6, 7, 8}))])


def memory(material: Material) -> Section | Missing:
    """Memory of the server over time."""
    title = "Memory over time"
    entries = []
    for where, side, document in _benches(material):
        held = document["memory"]
        if held["samples"]:
            entries.append({"from": where, "side": side, "load": ", ".join(load["name"] for load in document["loads"]), "kind": held["kind"],
                            "peak_bytes": held["peak_bytes"], "held": held.get("held"),
                            "samples": [[float(at), int(count)] for at, count in held["samples"]]})
    if not entries:
        return Missing("memory", title, "no server's memory was watched (a URL's can't be)", BENCH)
    rows = [(e["from"], e["side"], e["load"], e["kind"], size(e["peak_bytes"]), f"{e['samples'][-1][0]:.0f} s") for e in entries]
    tables = [Table(("measured in", "of", "load", "what", "peak", "watched for"), rows_of(rows), frozenset({4, 5}))]
    parts = ("weights_bytes", "reservations_bytes", "kv_preallocated_bytes", "kv_used_bytes")
    held_rows = [(e["from"], e["side"], e["load"], *(size(e["held"][part]) for part in parts), number(e["held"]["preemptions"]))
                 for e in entries if e["held"]]  # fmt: skip
    if held_rows:
        columns = ("measured in", "of", "load", "weights", "reservations", "KV preallocated", "KV in use at most", "preemptions")
        tables.append(Table(columns, rows_of(held_rows), frozenset({3, 4, 5, 6, 7}), "By kind, at the most"))
    capped = _capped(material)
    if capped:
        cap_rows = [(e["from"], e["load"], size(e["cap_bytes"]), f"{100 * e['share_of_speed']:.1f}%", "yes" if e["kept_requests"] else "no",
                     e["why"] or NONE) for e in capped]  # fmt: skip
        tables.append(Table(("measured in", "load", "cap", "of its speed", "every request kept", "why not"), rows_of(cap_rows), frozenset({2, 3}),
                            "Served again under a hard cap"))
    return Section("memory", title, ["Polled every half second while the load ran."], {"series": entries, "capped": capped},
                   "Memory of the server's processes over time", tables)


def _capped(material: Material) -> list[dict[str, Any]]:
    keys = ("cap_bytes", "share_of_speed", "kept_requests", "why")
    return [{"from": one.name, "load": stage.removeprefix("capped-"), **{key: document[key] for key in keys}}
            for one in material.rehearsals for stage, document in one.stages.items() if "cap_bytes" in document]  # fmt: skip


def answers(material: Material) -> Section | Missing:
    """Accuracy with its intervals, and whether greedy answers are the plain ones."""
    title = "Answers"
    accuracy = [(f"{result.name}, of {material.origin(result.document)}", result.document) for result in material.of_kind("accuracy")]
    greedy = [(f"{result.name}, of {material.origin(result.document)}", result.document) for result in material.of_kind("greedy")]
    for one in material.rehearsals:
        accuracy += [(f"{one.name}, {side}", one.stages[stage]) for stage, side in (("accuracy", "submission"), ("reference-accuracy", "reference"))
                     if stage in one.stages]  # fmt: skip
        greedy += [(one.name, one.stages["greedy"])] if "greedy" in one.stages else []
    if not accuracy and not greedy:
        return Missing("answers", title, "neither accuracy nor greedy identity was measured",
                       "gemq eval-accuracy SUBMISSION --data GSM8K.jsonl --output DIR/accuracy.json; "
                       "gemq eval-greedy SUBMISSION --reference CHECKPOINT --output DIR/greedy")  # fmt: skip
    domains = [{"from": name, **{key: domain[key] for key in ("name", "metric", "accuracy", "low", "high")}, "questions": len(domain["questions"]),
                "drop": domain["drop"]} for name, document in accuracy for domain in document["domains"]]  # fmt: skip
    audits = [{"from": name, **{key: document[key] for key in ("prompts", "divergent", "identical_share", "near_ties", "tokens")}}
              for name, document in greedy]  # fmt: skip
    tables = []
    if domains:
        rows = [(d["from"], d["name"], d["questions"], f"{100 * d['accuracy']:.1f}%", f"{100 * d['low']:.1f} to {100 * d['high']:.1f}%",
                 d["drop"]["points"] if d["drop"] else NONE, d["drop"]["upper_95_points"] if d["drop"] else NONE) for d in domains]  # fmt: skip
        tables.append(Table(("measured in", "questions of", "asked", "right", "95% interval", "drop, points", "its 95% bound"), rows_of(rows),
                            frozenset({2, 3, 4, 5, 6}), "Accuracy"))
    if audits:
        audited = [(a["from"], a["prompts"], f"{100 * a['identical_share']:.1f}%", a["divergent"], a["near_ties"], a["tokens"]) for a in audits]
        tables.append(Table(("measured in", "prompts", "identical", "divergent", "near ties", "tokens"), rows_of(audited), frozenset({1, 2, 3, 4, 5}),
                            "Served greedy ids against plain greedy decoding"))
    return Section("answers", title, [], {"accuracy": domains, "greedy": audits}, "", tables)


def provenance(material: Material) -> Section | Missing:
    """Where each checkpoint comes from, and what this page was made of."""
    title = "Provenance"
    entries = [_origin(checkpoint) for checkpoint in material.checkpoints]
    tables = [Table(("", ""), [(key, value) for key, value in entry["facts"].items()], frozenset(), entry["name"]) for entry in entries]
    tables.append(Table(("file", "SHA-256"), sorted(material.files.items()), frozenset(), "What this page was made of"))
    text = ["Taken from each checkpoint's own account. gemq verify CHECKPOINT checks every byte against its seal, with --source against what it "
            "was made from."]  # fmt: skip
    return Section("provenance", title, text, {"checkpoints": entries, "files": material.files}, "", tables)


def _origin(checkpoint: Checkpoint) -> dict[str, Any]:
    manifest = checkpoint.manifest
    source, calibration, sizes = manifest["source"], manifest["calibration"], manifest["bytes"]
    schemes = Counter(str(unit["scheme"]) for unit in manifest["units"].values())
    facts = {
        "source": str(source["model"]) + (f" at commit {source['revision']}" if source["revision"] else ""),
        "source's files": f"{len(source['files'])}, each with its SHA-256 in gemq.json",
        "recipe": str(manifest["recipe"]),
        "schemes": ", ".join(f"{count} units {scheme}" for scheme, count in sorted(schemes.items())),
        "calibration": "none" if calibration is None else (
            f"{calibration['samples']} windows, {calibration['tokens']} tokens, of {calibration.get('name', calibration['kind'])}; "
            f"SHA-256 {calibration['sha256']}"),
        "seed and device": f"{manifest['seed']}, {manifest['device']}" + (f", {manifest['threads']} threads" if manifest["threads"] else ""),
        "made by": ", ".join(f"{name} {version}" for name, version in sorted(manifest["versions"].items())),
        "bytes": f"{size(sizes['source'])} → {size(sizes['checkpoint'])} on disk; a token reads {size(sizes['per_token_source'])} → "
                 f"{size(sizes['per_token_checkpoint'])} of linears and head",
        "seal": f"sha256:{checkpoint.seal}" if checkpoint.seal else "none: this is no finished checkpoint",
    }  # fmt: skip
    search = manifest.get("search")
    if isinstance(search, dict):
        budget = search["budget"]
        limit = percent(1 + budget["limit"], 2) if budget["kind"] == "ppl" else f"{number(budget['limit'])} nats a token"
        facts["search"] = f"{len(search['tried'])} builds for a budget of {limit} ({budget['kind']}), to make {search['objective']} small"
    return {"name": checkpoint.name, "facts": facts}

"""A folder such as `gemq report` reads, with numbers that a test can work out by hand: two checkpoints, two rehearsals, results."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

from gemq.quantize.content import files_digest
from gemq.quantize.seal import SealedFile, content_digest, seal_bytes

HOSTILE = "<script>alert(1)</script> & $\\frac{1}{$ \"x\""


def estimate(value: float, upper: float | None = None) -> dict[str, Any]:
    return {"value": value, "standard_error": None if upper is None else (upper - value) / 2, "upper_95": upper}


def write(path: Path, document: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document), encoding="utf-8")


SOURCE_FILES = {"config.json": "0" * 64}
SOURCE_DIGEST = files_digest(SOURCE_FILES)


def manifest(recipe: str, bytes_per_token: int, layers: int = 3, search: dict[str, Any] | None = None) -> dict[str, Any]:
    schemes = ("int4 g128", "int8 channel")
    units = {f"layers.{layer}.{kind}": {"scheme": schemes[layer % 2], "method": "gptq", "output_error": 10.0 ** -(2 + layer)}
             for layer in range(layers) for kind in ("self_attn.qkv_proj", "mlp.down_proj")}  # fmt: skip
    units["lm_head"] = {"scheme": "int8 channel", "method": "rtn", "weight_error": 1e-5}
    made = {
        "version": 1, "source": {"model": "source", "revision": None, "files": SOURCE_FILES}, "recipe": recipe, "seed": 0,
        "calibration": {"sha256": "1" * 64, "kind": "self", "name": HOSTILE, "samples": 8, "tokens": 256}, "device": "cpu", "threads": 2,
        "versions": {"gemq": "0"}, "dropped_tensors": [], "units": units,
        "bytes": {"source": 4_000_000, "checkpoint": 2_000_000, "per_token_source": 3_000_000, "per_token_checkpoint": bytes_per_token,
                  "bits_per_decoder_weight": 4.5},
    }  # fmt: skip
    return made | ({} if search is None else {"search": search})


def checkpoint(folder: Path, bytes_per_token: int, ratio: float, search: dict[str, Any] | None = None) -> str:
    """A sealed checkpoint's own account, with a measurement that is bound to it; returns its content digest."""
    write(folder / "gemq.json", manifest(folder.name, bytes_per_token, search=search))
    digest = content_digest(_listed(folder))
    write(folder / "measured.json", {"version": 1, "measurements": [{
        "kind": "ppl", "data": "records.jsonl", "data_sha256": "2" * 64, "dtype": "float32", "tokens": 100, "records": 4, "target_digest": digest,
        "reference_digest": SOURCE_DIGEST,
        "ppl": estimate(20 * ratio, 20 * ratio + 1), "reference_ppl": estimate(20.0, 21.0), "ratio": estimate(ratio, ratio + 0.005),
    }]})  # fmt: skip
    (folder / "gemq.seal.json").write_bytes(seal_bytes(_listed(folder)))
    return digest


def _listed(folder: Path) -> list[SealedFile]:
    return [SealedFile(False, path.name, hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_size) for path in sorted(folder.iterdir())]


def per_record(nlls: dict[str, float], theirs: dict[str, float] | None = None) -> list[dict[str, Any]]:
    return [{"id": name, "tokens": 10, "nll_nats": nll, "reference_nll_nats": None if theirs is None else theirs[name], "kl_nats": None}
            for name, nll in nlls.items()]  # fmt: skip


def bench(tps: float, peak: int) -> dict[str, Any]:
    times = {"mean": 10.0, "median": 9.0, "p99": 20.0}
    runs = [{"run": number, "tps": tps + number, "latency_ms": times, "first_token_ms": times, "between_tokens_ms": None} for number in range(2)]
    load = {"name": "batch-8k", "requests": 4, "output_tokens": 16, "in_flight": 2, "runs": runs, "streamed_probe": None,
            "tps": {"mean": tps + 0.5, "lower_95": tps - 2.0}}  # fmt: skip
    held = {"weights_bytes": peak // 4, "reservations_bytes": None, "kv_preallocated_bytes": peak, "kv_used_bytes": peak // 8, "preemptions": 0}
    return {"kind": "bench", "loads": [load], "memory": {"kind": "resident memory", "peak_bytes": peak, "samples": [[0.0, peak // 2], [0.5, peak]],
                                                               "held": held}}  # fmt: skip


def gate(name: str, value: float | None, limit: float, *, at_most: bool = True) -> dict[str, Any]:
    margin = None if value is None else limit - value if at_most else value - limit
    return {"name": name, "value": value, "limit": limit, "kept": margin is not None and margin >= 0, "margin": margin}


def rehearsal(folder: Path) -> None:
    write(folder / "verdict.json", {
        "kind": "rehearsal", "arena": "lowbarena", "valid": False, "score": 1.25, "parts": {}, "not_enforced": ["the arena's own hardware"],
        "gates": [gate("contract", 1.0, 1.0, at_most=False), gate("KL, nats a token", 0.03, 0.15), gate(HOSTILE, 12.0, 5.0),
                  gate("speed over BF16, lower bound", 1.9, 0.95, at_most=False), gate("accuracy drop", None, 5.0)],
    })  # fmt: skip
    write(folder / "01-seal.json", {"sealed": True})
    write(folder / "03-speed-batch-8k.json", bench(100.0, 2_000_000_000))
    write(folder / "06-capped-batch-8k.json", {"cap_bytes": 3_000_000_000, "held": None, "tps": 95.0, "share_of_speed": 0.945, "why": None,
                                               "kept_requests": True})  # fmt: skip
    write(folder / "09-reference-speed-batch-8k.json", bench(50.0, 5_000_000_000))
    here, there = {"1": math.log(0.5), "2": math.log(0.25)}, {"1": math.log(0.5), "2": math.log(0.125)}
    write(folder / "08-scores.json", {"records": [[there, here], [here]]})
    write(folder / "13-reference-scores.json", {"records": [[here, here], [here]]})
    write(folder / "15-greedy.json", {"kind": "greedy", "prompts": 8, "divergent": 1, "identical_share": 0.875, "near_ties": 0, "tokens": 64})
    for name, right in (("07-accuracy.json", 0.75), ("12-reference-accuracy.json", 0.8)):
        write(folder / name, {"kind": "accuracy", "domains": [{"name": "gsm8k", "metric": "exact", "accuracy": right, "low": 0.5, "high": 0.9,
                                                               "questions": [{}] * 20, "drop": None}]})


def everything(folder: Path) -> Path:
    """The whole folder."""
    search = {"budget": {"kind": "ppl", "limit": 0.05, "nats": math.log(1.05)}, "objective": "decode", "tried": [
        {"mix": "6 int4-g128", "predicted": 0.06, "bytes_per_token": 1_000_000, "bits_per_decoder_weight": 4.1, "value": math.log(1.07),
         "upper": math.log(1.08), "met": False, "chosen": False},
        {"mix": "3 int4-g128, 3 int8", "predicted": 0.03, "bytes_per_token": 1_200_000, "bits_per_decoder_weight": 5.0, "value": math.log(1.04),
         "upper": math.log(1.045), "met": True, "chosen": True},
    ]}  # fmt: skip
    checkpoint(folder / "best", 1_200_000, 1.04, search)
    plain = checkpoint(folder / "plain", 1_000_000, 1.10)
    rehearsal(folder / "rehearsal")
    ours, theirs = {"a": 22.0, "b": 31.0, HOSTILE: 15.0}, {"a": 20.0, "b": 31.5, HOSTILE: 14.0}
    counts = [0] * 28
    counts[8], counts[20], counts[27] = 50, 49, 1
    write(folder / "ppl.json", {
        "kind": "ppl", "target": "elsewhere/under-another-name", "target_digest": plain, "data": "data/more.jsonl",
        "data_sha256": "3" * 64, "reference_digest": SOURCE_DIGEST, "tokens": 30, "records": 3,
        "ppl": estimate(math.exp(68 / 30), 10.0), "reference_ppl": estimate(math.exp(65.5 / 30), 9.0), "ratio": estimate(math.exp(2.5 / 30), 1.2),
        "kl_nats": estimate(0.02, 0.03), "kl_histogram": counts, "per_record": per_record(ours, theirs),
    })  # fmt: skip
    (folder / "broken.json").write_text('{"kind": "ppl"')
    (folder / "linked.json").symlink_to(folder / "ppl.json")
    return folder

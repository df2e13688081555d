"""The model card of a checkpoint: `README.md`, made from what the checkpoint's own files say and from what was measured, and nothing else.

The numbers come from `measured.json`, which holds what `gemq eval-ppl` and `eval-kl` computed, rounded to six figures and without paths.
Card and measurements are reports: the seal covers them, the content digest does not, so a card can name its checkpoint by that digest.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemq.errors import IntegrityError, UsageError
from gemq.output import human_bytes
from gemq.quantize.audit import strict_json
from gemq.quantize.content import files_digest
from gemq.quantize.seal import CARD_FILE, MEASURED_FILE, SealedFile, content_digest, read_regular

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

ESTIMATES = {
    "ppl": ("perplexity", "Perplexity"),
    "ratio": ("perplexity_ratio", "Perplexity, times the source's"),
    "kl_nats": ("kl_divergence", "KL from the source, nats a token"),
}
"""Estimates of a measurement -> the metric's type in the model index, and its name."""
_NUMBERS = ("value", "standard_error", "upper_95")
KINDS = {"ppl": ("ppl", "reference_ppl", "ratio", "kl_nats"), "kl": ("kl_nats",)}
_ORIGIN = ("target_digest", "reference_digest", "device")
"""What a measurement says of where it is from, where that is known: the content digests of both models, and the device."""
UNBOUND = "unbound"
"""What a measurement is called that does not say which weights it is of: an older gemq's, or a server's at a URL."""
_NAMES = {key: name for key, (_, name) in ESTIMATES.items()} | {"reference_ppl": "Perplexity of the source"}
# of the source's own card, what is as true of a quantized copy; each is a text or a list of texts
_INHERITED = ("license", "license_name", "license_link", "language", "pipeline_tag")
_MAX_BYTES = 16 << 20
_HEX = re.compile(r"[0-9a-f]{64}")
_VALID = "give what `gemq eval-ppl` or `gemq eval-kl` wrote to --output"


def summary(document: dict[str, Any], data: str | None = None) -> dict[str, Any]:
    """What a card keeps of a measurement's JSON: estimates, whose they are, data and its digest, how much of it; `data` renames the data.

    Raises UsageError on what is no result of eval-ppl or eval-kl.
    """
    try:
        kind = document["kind"]
        made: dict[str, Any] = {
            "kind": kind, "data": Path(data or document["data"]).name, "data_sha256": document["data_sha256"], "dtype": document["dtype"],
            "tokens": document["tokens"], "records": document["records"],
        }  # fmt: skip
        made |= {key: document[key] for key in _ORIGIN if document.get(key) is not None}
        if "device" in made:
            made["device"] = made["device"].partition(" ")[0]  # the kind, which the same seal depends on, and not the card's name
        made |= {key: _rounded(document[key]) for key in KINDS[kind] if document.get(key) is not None}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"a measurement lacks or garbles what a card needs ({type(error).__name__}: {error})", _VALID) from None
    problem = _measurement_problem(made)
    if problem:
        raise UsageError(f"a measurement {problem}", _VALID)
    return made


def _rounded(estimate: dict[str, Any]) -> dict[str, float | None]:
    return {key: None if estimate[key] is None else float(f"{estimate[key]:.6g}") for key in _NUMBERS}


def _measurement_problem(made: Any) -> str:
    """Why `made` is no measurement as `summary` gives it ("" if it is one)."""
    if not isinstance(made, dict) or not isinstance(made.get("kind"), str) or made["kind"] not in KINDS:
        return f"must be of a kind among {', '.join(KINDS)}"
    estimates = KINDS[made["kind"]]
    facts = {"kind": str, "data": str, "data_sha256": str, "dtype": str, "tokens": int, "records": int}
    if not set(facts) | {estimates[0]} <= set(made) <= {*facts, *estimates, *_ORIGIN}:
        return f"of kind {made['kind']} has {', '.join(facts)}, {estimates[0]} and maybe {', '.join([*estimates[1:], *_ORIGIN])}"
    for key, kind in facts.items():
        if type(made[key]) is not kind or (kind is int and made[key] < 1) or (kind is str and not _is_plain(made[key])):
            return f"has the {key} {str(made[key])[:80]!r}"
    for key in set(_ORIGIN) & set(made):
        if not isinstance(made[key], str) or not (_is_plain(made[key]) if key == "device" else _HEX.fullmatch(made[key])):
            return f"has the {key} {str(made[key])[:80]!r}"
    if not _HEX.fullmatch(made["data_sha256"]):
        return f"has the data_sha256 {made['data_sha256'][:80]!r}, which is no SHA-256"
    for key in set(estimates) & set(made):
        estimate = made[key]
        if not isinstance(estimate, dict) or set(estimate) != set(_NUMBERS):
            return f"has a {key} without value, standard_error and upper_95"
        for name, value in estimate.items():
            absent = value is None and name != "value"
            if not absent and (isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value)):
                return f"has a {key} whose {name} is {str(value)[:40]}"
    return ""


def _is_plain(text: str) -> bool:
    return bool(text) and text.isprintable() and len(text) <= 200 and not set(text) & set("|<>`[]")


def measured_bytes(measurements: list[dict[str, Any]]) -> bytes:
    """`measured.json` of these summaries."""
    return (json.dumps({"measurements": measurements, "version": 1}, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def read_measured(directory: Path) -> list[dict[str, Any]]:
    """The measurements that a checkpoint holds, none where it has no file of them; raises IntegrityError on anything else."""
    path = directory / MEASURED_FILE
    raw = read_regular(path, _MAX_BYTES)
    if raw is None:
        return []
    document = strict_json(raw, str(path))
    sound = isinstance(document, dict) and set(document) == {"measurements", "version"} and document["version"] == 1
    if not sound or not isinstance(document["measurements"], list):
        raise IntegrityError(f"{path} must have version 1 and a list of measurements, and nothing else", "fetch the checkpoint again")
    for made in document["measurements"]:
        problem = _measurement_problem(made)
        if problem:
            raise IntegrityError(f"{path}: a measurement {problem}", "fetch the checkpoint again")
    return list(document["measurements"])


def joined(measurements: list[dict[str, Any]], more: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`measurements` and `more`; a later one of the same kind and models on as much of the same data, computed alike, replaces the earlier one."""
    keys = ("kind", "data_sha256", "dtype", "device", "tokens", "records", "target_digest", "reference_digest")
    by_key = {tuple(made.get(key) for key in keys): made for made in [*measurements, *more]}
    return list(by_key.values())


def whose(measurement: dict[str, Any], digest: str) -> str:
    """Whose a measurement is, for the checkpoint with the content digest `digest`: "" where it is its own, UNBOUND, or another checkpoint's digest.

    Digests decide alone: a path or a name says nothing of the bytes behind it.
    """
    target = measurement.get("target_digest")
    return UNBOUND if target is None else "" if target == digest else str(target)


def source_digest(manifest: Mapping[str, Any]) -> str | None:
    """The content digest of the source that a manifest (gemq.json) records, as `directory_digest` computes it; None where it records no files."""
    source = manifest.get("source")
    files = source.get("files") if isinstance(source, dict) else None
    return files_digest(files) if isinstance(files, dict) and files else None


def is_against(measurement: Mapping[str, Any], source: str | None) -> bool:
    """Whether a measurement's reference is the source with the content digest `source`: only then are its ratio and KL those to the source."""
    return source is not None and measurement.get("reference_digest") == source


def rebound(measurements: list[dict[str, Any]], files: list[SealedFile], measured_as: str | None = None) -> list[dict[str, Any]]:
    """The measurements with the content digest of `files` in place of the one that they were made under.

    That is the digest of the same files before they were sealed, or `measured_as`: that of a checkpoint whose model files these are, under other
    accounts (a search adds its own to gemq.json).
    """
    earlier = {measured_as, files_digest({file.path: file.sha256 for file in files})} - {None}
    digest = content_digest(files)
    return [{**made, "target_digest": digest} if made.get("target_digest") in earlier else made for made in measurements]


def inherited_fields(card: Path) -> dict[str, Any]:
    """What of another card's metadata is as true of a quantized copy: licence, language, pipeline. Empty where there is no such card."""
    import yaml
    from huggingface_hub import ModelCard

    try:
        text = card.read_text(encoding="utf-8")
        if not text.startswith("---"):  # the library would say so on a line of its own
            return {}
        data = ModelCard(text, ignore_metadata_errors=True).data.to_dict()
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, yaml.YAMLError):
        return {}  # a source without a readable card has nothing to pass on
    kept = {key: data[key] for key in _INHERITED if key in data}
    return {key: value for key, value in kept.items() if _is_text(value) or (isinstance(value, list) and value and all(map(_is_text, value)))}


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def model_name(manifest: dict[str, Any]) -> str:
    """The name of a checkpoint: the source's last part and the recipe."""
    return f"{Path(manifest['source']['model']).name}-{manifest['recipe']}"


def eval_results(measurements: list[dict[str, Any]]) -> list[EvalResult]:
    """The measurements as entries of a model index."""
    from huggingface_hub import EvalResult

    results = []
    for made in measurements:
        for key, (metric, name) in ESTIMATES.items():
            if key in made:
                results.append(EvalResult(
                    task_type="text-generation", dataset_type=re.sub(r"[^a-z0-9]+", "-", made["data"].lower()).strip("-") or "data",
                    dataset_name=made["data"], dataset_args={"sha256": made["data_sha256"]}, metric_type=metric, metric_name=name,
                    metric_value=made[key]["value"],
                    metric_args={"standard_error": made[key]["standard_error"], "upper_95": made[key]["upper_95"],
                                 "tokens": made["tokens"], "records": made["records"], "dtype": made["dtype"]},
                ))  # fmt: skip
    return results


def card_bytes(manifest: dict[str, Any], recipe: dict[str, Any], files: list[SealedFile], measurements: list[dict[str, Any]],
               inherited: dict[str, Any]) -> bytes:
    """`README.md` of a checkpoint that `files` (sealed or about to be), gemq.json and recipe.yaml describe."""
    from huggingface_hub import ModelCard, ModelCardData

    digest, source, original = content_digest(files), manifest["source"], source_digest(manifest)
    results = eval_results(_indexed(measurements, digest, original))
    on_hub = source["revision"] is not None
    data = ModelCardData(
        base_model=source["model"] if on_hub else None, base_model_relation="quantized" if on_hub else None, library_name="vllm",
        tags=[recipe.get("format", "compressed-tensors"), "gemq", *sorted({entry["scheme"].split()[0] for entry in manifest["units"].values()})],
        model_name=model_name(manifest) if results else None, eval_results=results or None, **inherited,
    )  # fmt: skip
    body = "\n".join([
        f"# {model_name(manifest)}", "", _opening(manifest, recipe), "", *_sizes(manifest), "",
        *_quality(measurements, digest, original), "",
        *_making(manifest, recipe), "", *_searching(manifest), *_serving(), "", *_checking(digest), "",
    ])  # fmt: skip
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}")).encode()


def _opening(manifest: dict[str, Any], recipe: dict[str, Any]) -> str:
    source = manifest["source"]
    base = f"[{source['model']}](https://huggingface.co/{source['model']}) at commit `{source['revision']}`" if source["revision"] else (
        f"`{source['model']}`")  # fmt: skip
    return (f"{base}, its text decoder quantized by gemq {manifest['versions']['gemq']} with the recipe `{manifest['recipe']}`: "
            f"{recipe['summary'].rstrip('.')}. Every tensor that was not quantized is the source's, byte for byte"
            f"{_but_norms(manifest)}.")  # fmt: skip


def _but_norms(manifest: dict[str, Any]) -> str:
    """Of a smoothed checkpoint, which tensors the sentence before doesn't hold for."""
    smoothed = manifest.get("smoothed_tensors") or []
    norms = sum(name.endswith("norm.weight") for name in smoothed)
    return f", but for {norms} norms that take scales of the weights behind them, which leaves the function as it was" if norms else ""


def _sizes(manifest: dict[str, Any]) -> list[str]:
    sizes = manifest["bytes"]
    rows = [("Tensors on disk, bytes", "source", "checkpoint"), ("Linears and head that a decoded token reads, bytes", "per_token_source",
            "per_token_checkpoint")]  # fmt: skip
    table = [f"| {name} | {human_bytes(sizes[before])} | {human_bytes(sizes[after])} |" for name, before, after in rows]
    return ["| | source | this checkpoint |", "|---|---|---|", *table, "",
            f"A weight of the decoder's linears has {sizes['bits_per_decoder_weight']:.2f} bits, scales included."]  # fmt: skip


def _indexed(measurements: list[dict[str, Any]], digest: str, source: str | None) -> list[dict[str, Any]]:
    """What the model index may say: measurements of these weights, and comparisons where the reference was the source."""
    own = [made for made in measurements if not whose(made, digest)]
    return [made if is_against(made, source) else {key: made[key] for key in made if key not in ("ratio", "kl_nats")} for made in own]


def _quality(measurements: list[dict[str, Any]], digest: str, source: str | None) -> list[str]:
    if not measurements:
        return ["## Quality", "", "Not measured. `gemq eval-ppl CHECKPOINT --reference SOURCE --data FILE --output ppl.json` measures, and "
                "`gemq card CHECKPOINT --measured ppl.json --output NEW` writes it here."]  # fmt: skip
    lines = ["## Quality"]
    own = [made for made in measurements if not whose(made, digest)]
    if own:
        lines += ["", "Measured on these weights by gemq. Bounds are one-sided, 95%, with records as clusters; perplexity is "
                  "exp(total NLL / target tokens).", "", *_table(own, source)]  # fmt: skip
    others: dict[str, list[dict[str, Any]]] = {}
    for made in measurements:
        if whose(made, digest):
            others.setdefault(whose(made, digest), []).append(made)
    for whom, listed in others.items():
        why = ("these measurements do not record which weights they were made on" if whom == UNBOUND
               else f"these measurements are of another checkpoint, with the content digest `{whom}`")  # fmt: skip
        lines += ["", f"### {'Unbound' if whom == UNBOUND else 'Of another checkpoint'}", "", f"Not shown to be of these weights: {why}.", "",
                  *_table(listed, source)]  # fmt: skip
    return lines


def _table(measurements: list[dict[str, Any]], source: str | None) -> list[str]:
    lines = ["| data | quantity | value | std. error | 95% upper bound | tokens | records |", "|---|---|---|---|---|---|---|"]
    for made in measurements:
        of_source = is_against(made, source)
        for key in (key for key in KINDS[made["kind"]] if key in made):
            numbers = ("–" if made[key][name] is None else f"{made[key][name]:.6g}" for name in _NUMBERS)
            name = _NAMES[key] if of_source else _NAMES[key].replace("the source", "the reference")
            lines.append(f"| {made['data']} | {name} | {' | '.join(numbers)} | {made['tokens']} | {made['records']} |")
    used = sorted({(made["data"], made["data_sha256"], made["dtype"], made.get("device", "")) for made in measurements})
    lines += ["", *(f"- {data}: SHA-256 `{digest}`, computed in {dtype}{f' on {device}' if device else ''}" for data, digest, dtype, device in used)]
    strange = sorted({made["reference_digest"] for made in measurements if made.get("reference_digest") is not None and not is_against(made, source)})
    return [*lines, *(f"- a reference is not the source of this checkpoint: its content digest is `{digest}`" for digest in strange)]


def _making(manifest: dict[str, Any], recipe: dict[str, Any]) -> list[str]:
    kinds = Counter((entry["scheme"], entry["method"]) for entry in manifest["units"].values())
    table = [f"| {scheme} | {method} | {count} |" for (scheme, method), count in sorted(kinds.items())]
    calibration = manifest["calibration"]
    if calibration is None:
        how = "No calibration: the recipe looks at weights alone."
    else:
        how = (f"Calibration: {calibration['samples']} windows, {calibration['tokens']} tokens, of "
               f"{'samples that the source wrote itself' if calibration['kind'] == 'self' else calibration.get('name', calibration['kind'])}; "
               f"SHA-256 of the windows `{calibration['sha256']}`.")  # fmt: skip
    versions = ", ".join(f"{name} {number}" for name, number in sorted(manifest["versions"].items()))
    dropped = len(manifest.get("dropped_tensors") or [])
    left_out = [f"{dropped} tensors that no forward reads were left out; `gemq.json` lists them.", ""] if dropped else []
    smoothed = manifest.get("smoothed_tensors") or []
    if smoothed:
        left_out += [f"{len(smoothed)} norms and up projections were smoothed; `gemq.json` lists them, with each unit's alpha and losses.", ""]
    threads = f" with {manifest['threads']} thread{'s' if manifest['threads'] > 1 else ''}" if manifest["threads"] else ""
    devices = manifest["device"] if "devices" not in manifest else f"{manifest['devices']} devices ({manifest['device']})"
    return ["## How it was made", "", "| scheme | solver | units (what is fused for serving is one) |", "|---|---|---|", *table, "", how, "",
            *left_out, f"Seed {manifest['seed']}, on {devices}{threads}, by {versions}. `recipe.yaml` is the whole recipe, "
            "`provenance.intoto.json` names every file that went in by its SHA-256."]  # fmt: skip


def _searching(manifest: dict[str, Any]) -> list[str]:
    if not isinstance(manifest.get("search"), dict) or "decisions" not in manifest["search"]:
        return []
    from gemq.quantize.account import card_lines

    return card_lines(manifest["search"])


def _serving() -> list[str]:
    return ["## How to serve it", "", "```", "gemq serve DIRECTORY    # checks the seal, then starts vLLM", "vllm serve DIRECTORY", "```"]


def _checking(digest: str) -> list[str]:
    return ["## What it should be", "", f"Content digest: `{digest}`", "",
            "That is the SHA-256 of the seal (`gemq.seal.json`) over every file but this card and `measured.json`, which tell of the content. "
            "`gemq verify DIRECTORY` checks every byte and prints it beside the seal's own digest, which covers the card too."]  # fmt: skip


def reports(manifest: dict[str, Any], recipe: dict[str, Any], files: list[SealedFile], measurements: list[dict[str, Any]],
            inherited: dict[str, Any], measured_as: str | None = None) -> dict[str, bytes]:
    """The files that describe a checkpoint: its card and, where something was measured, its measurements (`rebound`)."""
    measurements = rebound(measurements, files, measured_as)
    made = {MEASURED_FILE: measured_bytes(measurements)} if measurements else {}
    return {**made, CARD_FILE: card_bytes(manifest, recipe, files, measurements, inherited)}

"""Where a checkpoint comes from: an in-toto Statement v1 with the SLSA v1 provenance predicate, in `provenance.intoto.json`.

Subjects are the checkpoint's files, with their SHA-256: all but this statement, the seal, and the reports (`README.md`, `measured.json`),
which tell of the finished checkpoint and can be written anew without another build. The seal, written last, covers the statement. It holds
nothing that differs between two runs that give the same bytes: no times, no paths of a machine, no run's id.
Formats: in-toto attestation framework, spec v1 (Statement, ResourceDescriptor, DigestSet); SLSA provenance v1. What `externalParameters`
mean is in docs/provenance.md, as SLSA asks of every build type.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gemq.errors import IntegrityError
from gemq.quantize.audit import strict_json
from gemq.quantize.seal import PROVENANCE_FILE as PROVENANCE_FILE
from gemq.quantize.seal import REPORTS, SEAL_FILE, Difference, SealedFile, read_regular

MANIFEST_FILE, RECIPE_FILE = "gemq.json", "recipe.yaml"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:gemq:quantize:v1"
# whoever runs `gemq quantize` is the platform: nothing but their word says what it ran on (SLSA Build L1)
BUILDER_ID = "urn:gemq:command-line"
_NO_SUBJECTS = {PROVENANCE_FILE, SEAL_FILE, *REPORTS}
_DEFINITION = {"buildType", "externalParameters", "internalParameters", "resolvedDependencies"}
_MAX_BYTES = 64 << 20
_ADVICE = "don't use this checkpoint; fetch or quantize it again"
_SHA256 = re.compile(r"[0-9a-f]{64}")


def statement(files: list[SealedFile], manifest: dict[str, Any], recipe: dict[str, Any]) -> dict[str, Any]:
    """The statement over `files`, made as `manifest` (gemq.json) and `recipe` (recipe.yaml, read) say."""
    source, calibration = manifest["source"], manifest["calibration"]
    subjects = [file for file in sorted(files, key=lambda file: file.path) if file.path not in _NO_SUBJECTS]
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": file.path, "digest": {"sha256": file.sha256}} for file in subjects],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {
                    "model": source["model"], "revision": source["revision"], "recipe": recipe,
                    "calibration": None if calibration is None else {key: calibration[key] for key in sorted(calibration) if key != "sha256"},
                    "seed": manifest["seed"], "device": manifest["device"],
                },
                "internalParameters": {"threads": manifest["threads"]} | ({"devices": manifest["devices"]} if "devices" in manifest else {}),
                "resolvedDependencies": [*_source_files(source), *_calibration_data(calibration)],
            },
            "runDetails": {"builder": {"id": BUILDER_ID, "version": dict(sorted(manifest["versions"].items()))}},
        },
    }  # fmt: skip


def _source_files(source: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for path, digest in sorted(source["files"].items()):
        entry: dict[str, Any] = {"name": path, "digest": {"sha256": digest}}
        if source["revision"] is not None:  # a package URL of a model on the Hub, at its commit
            entry["uri"] = f"pkg:huggingface/{quote(source['model'])}@{source['revision']}#{quote(path)}"
        found.append(entry)
    return found


def _calibration_data(calibration: dict[str, Any] | None) -> list[dict[str, Any]]:
    if calibration is None:
        return []
    found: list[dict[str, Any]] = [{
        "name": "calibration", "digest": {"sha256": calibration["sha256"]},
        "annotations": {"digestOf": "the token windows: a line each, its ids in decimal joined by commas, ended by a newline"},
    }]  # fmt: skip
    name, revision = calibration.get("name"), calibration.get("revision")
    if "file_sha256" in calibration:
        found.append({"name": name, "digest": {"sha256": calibration["file_sha256"]}})
    if isinstance(revision, str) and re.fullmatch(r"[0-9a-f]{40}", revision):
        found.append({"name": name, "digest": {"gitCommit": revision}})
    return found


def statement_bytes(document: dict[str, Any]) -> bytes:
    """A statement as it is written."""
    return (json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_statement(directory: Path) -> dict[str, Any] | None:
    """A checkpoint's statement, None where it has none; raises IntegrityError on what is no provenance of gemq's."""
    path = directory / PROVENANCE_FILE
    raw = read_regular(path, _MAX_BYTES + 1)
    return None if raw is None else parse_statement(raw, str(path))


def parse_statement(raw: bytes, where: str = PROVENANCE_FILE) -> dict[str, Any]:
    """The statement in `raw`; raises IntegrityError unless it has the form that `statement` gives."""
    if len(raw) > _MAX_BYTES:
        raise IntegrityError(f"{where} is larger than the {_MAX_BYTES} bytes that a provenance may have", _ADVICE)
    document = strict_json(raw, where, _ADVICE)
    problem = _form_problem(document)
    if problem:
        raise IntegrityError(f"{where} is no provenance that gemq wrote: {problem}", _ADVICE)
    return dict(document)


def _form_problem(document: Any) -> str:
    if not isinstance(document, dict) or set(document) != {"_type", "subject", "predicateType", "predicate"}:
        return "a statement has _type, subject, predicateType and predicate"
    for key, valid in (("_type", STATEMENT_TYPE), ("predicateType", PREDICATE_TYPE)):
        if document[key] != valid:
            return f"its {key} is {str(document[key])[:80]!r}, {valid!r} is valid"
    subjects = document["subject"]
    if not isinstance(subjects, list) or not all(_is_descriptor(subject, {"name", "digest"}) for subject in subjects):
        return "each subject has a name and a digest with a sha256"
    predicate = document["predicate"]
    if not isinstance(predicate, dict) or set(predicate) != {"buildDefinition", "runDetails"}:
        return "its predicate has a buildDefinition and runDetails"
    definition, details = predicate["buildDefinition"], predicate["runDetails"]
    if not isinstance(definition, dict) or set(definition) != _DEFINITION:
        return f"its buildDefinition has {', '.join(sorted(_DEFINITION))}"
    if definition["buildType"] != BUILD_TYPE:
        return f"its buildType is {str(definition['buildType'])[:80]!r}, {BUILD_TYPE!r} is valid"
    if not isinstance(definition["externalParameters"], dict) or "recipe" not in definition["externalParameters"]:
        return "its externalParameters name no recipe"
    dependencies = definition["resolvedDependencies"]
    if not isinstance(dependencies, list) or not all(_is_dependency(dependency) for dependency in dependencies):
        return "each of its resolvedDependencies has a name and a digest"
    if not isinstance(details, dict) or not isinstance(details.get("builder"), dict) or details["builder"].get("id") != BUILDER_ID:
        return f"its builder's id is not {BUILDER_ID!r}"
    return ""


def _is_descriptor(entry: Any, keys: set[str]) -> bool:
    if not isinstance(entry, dict) or set(entry) != keys or not isinstance(entry["name"], str) or not isinstance(entry["digest"], dict):
        return False
    digest = entry["digest"].get("sha256")
    return isinstance(digest, str) and _SHA256.fullmatch(digest) is not None


def _is_dependency(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not isinstance(entry.get("digest"), dict):
        return False
    return bool(entry["digest"]) and all(isinstance(value, str) for value in entry["digest"].values())


def provenance_differences(directory: Path, files: list[SealedFile]) -> list[Difference]:
    """Where a checkpoint's statement does not fit its sealed `files`, its manifest and its recipe; none where there is no statement.

    The seal says whether the files are what was sealed; this says whether what was sealed is what the statement tells of.
    """
    try:
        document = read_statement(directory)
        if document is None:
            return []
        return _subject_differences(document, files) + _account_differences(document, directory)
    except IntegrityError as error:
        return [Difference(PROVENANCE_FILE, error.message)]


def _subject_differences(document: dict[str, Any], files: list[SealedFile]) -> list[Difference]:
    sealed = {file.path: file.sha256 for file in files if file.path not in _NO_SUBJECTS}
    differences, seen = [], set()
    for subject in document["subject"]:
        name, digest = subject["name"], subject["digest"]["sha256"]
        shown = name[:200].encode("unicode_escape").decode()
        if name in seen:
            differences.append(Difference(PROVENANCE_FILE, f"lists {shown} twice"))
        elif name not in sealed:
            differences.append(Difference(PROVENANCE_FILE, f"lists {shown}, which is not in the seal"))
        elif digest != sealed[name]:
            differences.append(Difference(name, f"is not what {PROVENANCE_FILE} tells of: SHA-256 {sealed[name][:16]}…, there {digest[:16]}…"))
        seen.add(name)
    return differences + [Difference(name, f"is not among the subjects of {PROVENANCE_FILE}") for name in sorted(set(sealed) - seen)]


def _account_differences(document: dict[str, Any], directory: Path) -> list[Difference]:
    """Where the statement tells another story than gemq.json and recipe.yaml."""
    definition = document["predicate"]["buildDefinition"]
    told = [(entry["name"], entry["digest"].get("sha256")) for entry in definition["resolvedDependencies"]]
    differences = []
    try:
        manifest = strict_json(read_regular(directory / MANIFEST_FILE, _MAX_BYTES) or b"", MANIFEST_FILE)
        expected = list(manifest["source"]["files"].items())
        if manifest["calibration"] is not None:
            expected.append(("calibration", manifest["calibration"]["sha256"]))
        absent = [name for name, digest in expected if (name, digest) not in told]
        if absent:
            differences.append(Difference(PROVENANCE_FILE, f"does not name {absent[0]} as {MANIFEST_FILE} does"))
        if definition["externalParameters"]["recipe"] != _plain_yaml(directory / RECIPE_FILE):
            differences.append(Difference(PROVENANCE_FILE, f"has another recipe than {RECIPE_FILE}"))
    except IntegrityError as error:
        differences.append(Difference(MANIFEST_FILE, error.message))
    except (KeyError, TypeError, AttributeError):
        differences.append(Difference(PROVENANCE_FILE, f"tells of a source, and {MANIFEST_FILE} or {RECIPE_FILE} does not"))
    return differences


def _plain_yaml(path: Path) -> Any:
    import yaml

    try:
        return yaml.safe_load(read_regular(path, _MAX_BYTES) or b"")
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise IntegrityError(f"{path.name} is no YAML: {str(error)[:100]}", _ADVICE) from None

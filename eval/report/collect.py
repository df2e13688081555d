"""What a directory holds that a report can tell of: checkpoints, rehearsals, results of measurements, searches.

Files are found by what they are (gemq.json, verdict.json, a JSON document's `kind`), down to two folders below the directory. They may be a
stranger's: links are not followed, sizes are limited, and a file that can't be read is told of and left out.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gemq.errors import IntegrityError, UsageError
from gemq.quantize.audit import strict_json
from gemq.quantize.card import UNBOUND, is_against, source_digest
from gemq.quantize.content import directory_digest
from gemq.quantize.provenance import MANIFEST_FILE
from gemq.quantize.seal import MEASURED_FILE, SEAL_FILE, read_regular

RESULT_KINDS = ("ppl", "kl", "accuracy", "greedy", "bench")
_DEPTH = 2
_MAX_BYTES = 64 << 20
_MAX_FILES = 5000
_STAGE = re.compile(r"\d\d-([a-z0-9-]+)\.json")
_NOT_RESULTS = {MANIFEST_FILE, SEAL_FILE, MEASURED_FILE, "verdict.json", "key.json"}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's own account: `manifest` (gemq.json), `measured` (of measured.json), the seal's digest if it has one.

    `digest` names the content of its files, which were hashed; None where they are not what was sealed.
    """

    name: str
    directory: Path
    manifest: dict[str, Any]
    measured: list[dict[str, Any]]
    seal: str | None
    digest: str | None


@dataclass(frozen=True)
class Rehearsed:
    """A rehearsal's stages by name, and its verdict, None as long as it is not finished."""

    name: str
    directory: Path
    verdict: dict[str, Any] | None
    stages: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Result:
    """A document that an `eval-` command or `bench` wrote."""

    name: str
    document: dict[str, Any]

    @property
    def kind(self) -> str:
        return str(self.document["kind"])


@dataclass
class Material:
    """Everything found, with the SHA-256 of every file read (`files`, by its path below the directory) and what could not be read."""

    directory: Path
    checkpoints: list[Checkpoint] = field(default_factory=list)
    rehearsals: list[Rehearsed] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)

    def of_kind(self, kind: str) -> list[Result]:
        """The results of one kind."""
        return [result for result in self.results if result.kind == kind]

    def origin(self, document: dict[str, Any] | None) -> str:
        """Which checkpoint a result is of, by its digest alone: one here by name, another by the start of its digest, or "unbound"."""
        digest = (document or {}).get("target_digest")
        if not isinstance(digest, str):
            return UNBOUND
        names = [checkpoint.name for checkpoint in self.checkpoints if checkpoint.digest == digest]
        return " and ".join(names) or f"a checkpoint that is not here ({digest[:12]}…)"

    def against(self, document: dict[str, Any] | None) -> str:
        """What a measurement was compared with: the source of its checkpoint, or another reference, by its digest."""
        document = document or {}
        if any(is_of(document, checkpoint) and is_against_source(document, checkpoint) for checkpoint in self.checkpoints):
            return "the source"
        digest = document.get("reference_digest")
        return f"another reference ({digest[:12]}…)" if isinstance(digest, str) else "a reference that is not recorded"


def is_of(document: dict[str, Any], checkpoint: Checkpoint) -> bool:
    """Whether a measurement is of `checkpoint`: by its content digest alone."""
    return checkpoint.digest is not None and document.get("target_digest") == checkpoint.digest


def is_against_source(document: dict[str, Any], checkpoint: Checkpoint) -> bool:
    """Whether a measurement's reference is the source of `checkpoint`: by the digest of the files that gemq.json records, as on the model card."""
    return is_against(document, source_digest(checkpoint.manifest))


def collect(directory: Path) -> Material:
    """What `directory` holds; raises UsageError where it is none, or holds nothing that a report could tell of."""
    if not directory.is_dir():
        raise UsageError(f"{directory} is no directory", "give a checkpoint, what gemq rehearse wrote to --output, or a folder with several of them")
    found = Material(directory)
    for folder in _folders(directory):
        _collect_folder(found, folder)
    if not (found.checkpoints or found.rehearsals or found.results):
        why = f" ({found.unreadable[0]})" if found.unreadable else ""
        raise UsageError(f"{directory} holds nothing to report{why}",
                         "give a checkpoint of gemq quantize, the --output of gemq rehearse, bench, eval-ppl, eval-kl, or a folder with these")
    return found


def _folders(directory: Path, depth: int = 0) -> Iterator[Path]:
    yield directory
    if depth < _DEPTH:
        try:
            inner = sorted(path for path in directory.iterdir() if path.is_dir() and not path.is_symlink() and not path.name.startswith("."))
        except OSError:
            return
        for path in inner:
            yield from _folders(path, depth + 1)


def _collect_folder(found: Material, folder: Path) -> None:
    name = folder.relative_to(found.directory).as_posix()
    shown = found.directory.resolve().name if name == "." else name
    files = sorted(path for path in folder.glob("*.json") if path.is_file())[:_MAX_FILES]
    names = {path.name for path in files}
    if MANIFEST_FILE in names:
        manifest = _object(found, folder / MANIFEST_FILE)
        if manifest is not None:
            measured = _object(found, folder / MEASURED_FILE) if MEASURED_FILE in names else None
            listed = (measured or {}).get("measurements")
            seal = read_regular(folder / SEAL_FILE, _MAX_BYTES) if SEAL_FILE in names else None
            found.checkpoints.append(Checkpoint(shown, folder, manifest, listed if isinstance(listed, list) else [],
                                                None if seal is None else hashlib.sha256(seal).hexdigest(), _digest(found, folder, shown)))
        return
    stages = {match[1]: path for path in files if (match := _STAGE.fullmatch(path.name))}
    if stages and names & {"verdict.json", "key.json"}:
        verdict = _object(found, folder / "verdict.json") if "verdict.json" in names else None
        read = {stage: document for stage, path in stages.items() if (document := _object(found, path)) is not None}
        found.rehearsals.append(Rehearsed(shown, folder, verdict, read))
        return
    for path in files:
        if path.name not in _NOT_RESULTS:
            document = _object(found, path, wanted=lambda document: document.get("kind") in RESULT_KINDS)
            if document is not None:
                found.results.append(Result(path.relative_to(found.directory).as_posix(), document))


def _digest(found: Material, folder: Path, name: str) -> str | None:
    try:
        return directory_digest(folder)
    except IntegrityError as error:
        found.unreadable.append(f"the measurements of {name}, since {error.message.replace(str(folder), name)}")
        return None


def _object(found: Material, path: Path, wanted: Callable[[dict[str, Any]], bool] = lambda document: True) -> dict[str, Any] | None:
    """The JSON object in `path` if it is `wanted`; what can't be read is noted."""
    where = path.relative_to(found.directory).as_posix()
    try:
        raw = read_regular(path, _MAX_BYTES + 1)
        if raw is None:
            return None
        if len(raw) > _MAX_BYTES:
            raise IntegrityError(f"{where} has over {_MAX_BYTES} bytes")
        document = strict_json(raw, where)
    except IntegrityError as error:
        found.unreadable.append(error.message.replace(str(path), where))
        return None
    if not isinstance(document, dict):
        if path.name == MANIFEST_FILE or path.name == "verdict.json":
            found.unreadable.append(f"{where} is no JSON object")
        return None
    if not wanted(document):
        return None
    found.files[where] = hashlib.sha256(raw).hexdigest()
    return document

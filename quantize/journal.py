"""What of an interrupted quantization is finished, so that the same command goes on there.

`OUT.partial/checkpoint` is the checkpoint as far as it is written, `OUT.partial/journal.json` says which parts of it count, with a digest
of their bytes. A part counts only if its bytes still have that digest: a journal that is damaged, or bytes that changed, cost work, never truth.
A directory without gemq's record (`atomic.claim`) and without a sound journal is not gemq's, and is refused.
The digest is XXH3's of 128 bits: six times as fast as SHA-256, and against accidents, which is all that can be asked of a file in the same folder.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import xxhash

from gemq import atomic
from gemq.errors import UsageError
from gemq.output import note, warn
from gemq.quantize.checkpoint import require_own_files
from gemq.quantize.companions import may_be_written
from gemq.shards import ShardWriter

Resume = Literal["auto", "required", "never"]
_FILE, _CHECKPOINT = "journal.json", "checkpoint"
_KIND = "quantize"
_VERSION = 2
_PIECE_BYTES = 64 << 20


def canonical(data: Any) -> bytes:
    """The one JSON form of `data` that digests are taken of."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest_of(writer: ShardWriter, names: list[str], over: Callable[..., Iterable[bytes]] = map) -> str:
    """XXH3-128 over those of the pieces of `names` as they lie in the shards; `over` maps a function over the pieces, in order."""

    def piece(name: str, start: int) -> bytes:
        state = xxhash.xxh3_128()
        writer.feed(name, state.update, start, _PIECE_BYTES)
        return state.digest()

    pieces = [(name, start) for name in names for start in range(0, writer.tensors[name].nbytes, _PIECE_BYTES)]
    return xxhash.xxh3_128_hexdigest(b"".join(over(piece, *zip(*pieces, strict=True)) if pieces else ()))


@dataclass
class Journal:
    """The finished parts of the job whose identity is `job` (a JSON object: source, recipe, calibration, versions...)."""

    path: Path
    job: dict[str, Any]
    parts: dict[str, str] = field(default_factory=dict)  # "copied", "before", "layer 3", "head" -> digest of its bytes
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)  # unit -> its report

    def save(self) -> None:
        """Write the journal, with a digest over itself."""
        body = {"version": _VERSION, "job": self.job, "parts": self.parts, "reports": dict(self.reports)}  # a copy: another thread may add to it
        atomic.write_file(self.path, json.dumps({"sha256": hashlib.sha256(canonical(body)).hexdigest(), "body": body}, indent=1) + "\n")

    def finish(self, part: str, writer: ShardWriter, names: list[str]) -> None:
        """Record that the tensors `names` are written; their bytes reach the disk before the record does."""
        writer.sync()
        self.parts[part] = digest_of(writer, names)
        self.save()

    def holds(self, part: str, writer: ShardWriter, names: list[str]) -> bool:
        """Whether `part` was finished and its bytes are still what was written; says so where they aren't."""
        if part not in self.parts:
            return False
        if digest_of(writer, names) == self.parts[part]:
            return True
        warn(f"{part} in {self.path.parent} is not what was written: it is done again")
        del self.parts[part]
        return False


def is_fresh(partial: Path, resume: Resume) -> bool:
    """Whether a job in `partial` would start from nothing, whatever it is."""
    return resume == "never" or (resume == "auto" and not (partial / _FILE).exists())


def open_journal(partial: Path, job: dict[str, Any], resume: Resume, *, save: bool = True) -> Journal:
    """The journal of `job` in `partial`, with what an earlier run finished.

    Raises UsageError where `resume` forbids going on or starting, where nothing shows that gemq made what is in `partial`, and where its
    checkpoint holds a file that no checkpoint of gemq's has.
    save: whether a fresh journal is written now; else `job` may still be completed, until the first part is recorded.
    """
    path = partial / _FILE
    atomic.require_own(partial, _KIND, proven=_is_sound(path))
    require_own_files(partial / _CHECKPOINT, may_be_written)
    found = None if resume == "never" else _read(path)
    if found is not None and found["job"] != job:
        changed = sorted(key for key in {*found["job"], *job} if found["job"].get(key) != job.get(key))
        raise UsageError(
            f"{partial} holds an unfinished quantization with another {', '.join(changed)}",
            "give the same options to finish it, --resume never to discard it, or another --output",
        )
    if found is None and resume == "required":
        raise UsageError(f"{partial} holds no unfinished quantization", "leave out --resume required")
    if found is None:
        discard(partial)
        atomic.claim(partial, _KIND)
        (partial / _CHECKPOINT).mkdir()
        journal = Journal(path, job)
        if save:
            journal.save()
        return journal
    note(f"going on with {partial}: {len(found['parts'])} finished parts")
    (partial / _CHECKPOINT).mkdir(exist_ok=True)
    for file in (partial / _CHECKPOINT).rglob("*"):
        if not file.is_symlink():
            os.chmod(file, file.stat().st_mode | 0o200)  # sealing, if the earlier run came so far, made files read-only
    return Journal(path, job, found["parts"], found["reports"])


def discard(partial: Path) -> None:
    """Delete an unfinished quantization's own files in `partial`, and `partial` if nothing else is in it."""
    atomic.discard(partial, _CHECKPOINT, _FILE)


def discard_after(partial: Path) -> None:
    """As `discard`, once the checkpoint is published: what can't be deleted is a warning."""
    atomic.discard_after(partial, _CHECKPOINT, _FILE)


def _body(path: Path) -> dict[str, Any]:
    """The body of a journal of any version; raises OSError, or one of the errors of a damaged file."""
    data = json.loads(path.read_text(encoding="utf-8"))
    body = data["body"]
    if hashlib.sha256(canonical(body)).hexdigest() != data["sha256"]:
        raise ValueError("it does not have the digest that it names")
    if not isinstance(body, dict) or "version" not in body:
        raise ValueError("it has no version")
    return body


def _is_sound(path: Path) -> bool:
    try:
        return bool(_body(path))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _read(path: Path) -> dict[str, Any] | None:
    try:
        body = _body(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        warn(f"{path} is damaged ({error}): starting over")
        return None
    if body["version"] != _VERSION:
        raise UsageError(f"{path.parent} holds an unfinished quantization of another version of gemq",
                         "finish it with that one, give --resume never to discard it, or another --output")  # fmt: skip
    return body

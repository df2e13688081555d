"""Distributions that a model told of itself, one line a record: kept by `gemq eval-kl --record` and read as a reference when it is not served.

The first line says what they are: the model and its content digest, the data's SHA-256, how many likeliest tokens each position has, and how many
records follow. Each further line holds a record's id, the SHA-256 of its token ids, and for each target the natural log-probabilities by token id.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gemq import atomic, output
from gemq.errors import IntegrityError, UsageError
from gemq.eval.records import Record

VERSION = 1
_DIGITS = 7  # of a log-probability; servers compute them in float32
_TOLERANCE_NATS = 0.01  # as `finished`: servers in bf16 don't repeat the last digits
Distribution = dict[int, float]


def record_sha256(record: Record) -> str:
    """The SHA-256 of a record's token ids and the position of its first target."""
    return hashlib.sha256(f"{record.first_target}:{','.join(map(str, record.tokens))}".encode()).hexdigest()


def _line(record: Record, found: Sequence[Mapping[int, float]]) -> str:
    positions = [{str(token): round(value, _DIGITS) for token, value in position.items()} for position in found]
    return json.dumps({"id": record.id, "record_sha256": record_sha256(record), "positions": positions}) + "\n"


def _positions(line: dict[str, Any]) -> list[Distribution]:
    found = [{int(token): float(value) for token, value in position.items()} for position in line["positions"]]
    if not all(position and all(math.isfinite(value) and value <= 0 for value in position.values()) for position in found):
        raise ValueError("a log-probability is not finite, or above 0")
    return found


@dataclass(frozen=True)
class Recorded:
    """A file of distributions; `name` is the path as it was given, `top` the tokens that a position has at least."""

    name: str
    path: Path
    model: str
    data_sha256: str
    top: int
    offsets: Mapping[str, int] = field(repr=False)
    model_digest: str | None = None  # the content digest of the checkpoint; None where an endpoint was recorded, or by an older gemq
    vocab_size: None = None
    max_length: None = None

    @classmethod
    def open(cls, name: str) -> Recorded:
        """Read the first line and find the others; raises UsageError for another kind of file, IntegrityError for one that is not whole."""
        path = Path(name)
        offsets: dict[str, int] = {}
        try:
            with open(path, "rb") as file:
                head = json.loads(file.readline())
                if not isinstance(head, dict) or head.get("kind") != "distributions":
                    raise UsageError(f"{name} holds no distributions", "make it with gemq eval-kl REFERENCE --data FILE --record FILE")
                if head.get("version") != VERSION:
                    raise UsageError(f"{name} is of version {head.get('version')!r}, {VERSION} is valid", "record it again")
                while True:
                    start = file.tell()
                    line = file.readline()
                    if not line:
                        break
                    offsets[str(json.loads(line)["record_sha256"])] = start
                digest = head.get("model_digest")
                found = cls(name, path, str(head["model"]), str(head["data_sha256"]), int(head["top"]), offsets,
                            digest if isinstance(digest, str) else None)  # fmt: skip
                count = int(head["records"])
        except OSError as error:
            raise UsageError(f"{name} can't be read: {error.strerror}", "give a directory, a URL, or a file of distributions") from None
        except (ValueError, KeyError, TypeError) as error:
            raise IntegrityError(f"{name} can't be read as a file of distributions ({error!r})", "record it again") from None
        if len(offsets) != count:
            raise IntegrityError(f"{name} holds {len(offsets)} records of the {count} that its first line says", "record it again")
        return found

    def distributions(self, record: Record, top: int) -> list[Distribution]:
        """The record's distributions; raises UsageError where it wasn't recorded, IntegrityError where its line is broken."""
        start = self.offsets.get(record_sha256(record))
        if start is None:
            raise UsageError(f"{self.name} holds nothing on {record.where}: it was recorded on other data, or cut at another length",
                             "record it again with the same --data, --length and tokenizer")  # fmt: skip
        try:
            with open(self.path, "rb") as file:
                file.seek(start)
                found = _positions(json.loads(file.readline()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise IntegrityError(f"{self.name}: the line of {record.id} can't be read ({error!r})", "record it again") from None
        if len(found) != record.target_count or any(len(position) < top for position in found):
            raise IntegrityError(f"{self.name}: the line of {record.id} does not have {top} tokens for each of {record.target_count} targets",
                                 "record it again, or choose a smaller --top")  # fmt: skip
        return found


class Recording:
    """A file of distributions being written: FILE.partial a line a record, FILE when all are there. A stopped one goes on.

    The last record that an earlier run kept is told again; raises IntegrityError from `add` if the model is not the same any more.
    """

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        atomic.require_absent(path)
        self.path, self.partial = path, atomic.partial_of(path)
        self._head = {"kind": "distributions", "version": VERSION, **json.loads(json.dumps(head))}
        self._kept: list[str] = []
        self._check: list[Distribution] | None = None
        if self.partial.exists():
            self._resume()
        with atomic.disk_errors(self.partial):
            atomic.write_file(self.partial, "".join([json.dumps(self._head) + "\n", *self._kept]))
            self._file = open(self.partial, "a", encoding="utf-8")  # noqa: SIM115  (closed by `close`)

    def _resume(self) -> None:
        try:
            lines = self.partial.read_text(encoding="utf-8").splitlines(keepends=True)
            head = json.loads(lines[0]) if lines else self._head
            kept = [line for line in lines[1:] if line.endswith("\n")]  # a kill may leave half a line
            if head == self._head and kept:
                self._check = _positions(json.loads(kept[-1]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise IntegrityError(f"the partial results {self.partial} can't be read ({error!r})",
                                 "delete it and start again if gemq made it; otherwise choose another --record") from None  # fmt: skip
        if head != self._head:
            raise UsageError(f"{self.partial} holds partial results of another recording", "choose another --record, or delete that file")
        self._kept = kept[:-1]
        if kept:
            output.note(f"{len(kept)} records are kept in {self.partial}; going on from there")

    @property
    def done(self) -> int:
        """How many records are there."""
        return len(self._kept)

    def add(self, record: Record, found: Sequence[Mapping[int, float]]) -> None:
        """Keep the next record's distributions."""
        if self._check is not None:
            kept, self._check = self._check, None
            same = len(kept) == len(found) and record.target_count == len(found)
            drift = math.fsum(abs(a.get(t, -99.0) - b[t]) for a, b, t in zip(kept, found, record.targets, strict=True)) if same else math.inf
            if drift > _TOLERANCE_NATS * len(found):
                raise IntegrityError(f"{record.where} is told otherwise than what {self.partial} kept: the model has changed",
                                     "delete that file and start again")  # fmt: skip
        line = _line(record, found)
        self._kept.append(line)
        with atomic.disk_errors(self.partial):
            self._file.write(line)
            self._file.flush()

    def close(self) -> str:
        """Close the file; returns a sentence on what was kept."""
        self._file.close()
        return f"{self.done} records are kept in {self.partial}"

    def publish(self) -> None:
        """Give the file its final name."""
        self._file.close()
        atomic.publish(self.partial, self.path)

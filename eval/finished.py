"""Scores of records that are done, kept beside --output so that a stopped evaluation goes on where it was.

The file belongs to one evaluation (its `key`: target, data, limits). After a resume the last kept record is scored again; if the
number moved, the target is not the one that gave the others, and nothing is mixed.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gemq import atomic
from gemq.errors import IntegrityError, UsageError

SAVE_SECONDS = 10.0
_TOLERANCE_NATS = 0.01  # a token; servers in bf16 don't repeat the last digits


class FinishedRecords:
    """The scores of finished records by role ("target", "reference", "both") and index; on disk every ten seconds and after `save`."""

    def __init__(self, output: Path | None, key: dict[str, Any]) -> None:
        self.path = None if output is None else atomic.partial_of(output)
        self._key = json.loads(json.dumps(key))
        self._scores: dict[str, dict[int, list[float]]] = {}
        self._to_check: dict[str, tuple[int, list[float]]] = {}
        self._saved_at = time.monotonic()
        if self.path is not None and self.path.exists():
            self._load(self.path)

    def _load(self, path: Path) -> None:
        try:
            kept = json.loads(path.read_bytes())
            key, scores = kept["key"], kept["scores"]
            loaded = {role: {int(index): [float(v) for v in values] for index, values in done.items()} for role, done in scores.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise IntegrityError(f"the partial results {path} can't be read ({error!r})",
                                 "delete it and start again if gemq made it; otherwise choose another --output") from None  # fmt: skip
        if key != self._key:
            raise UsageError(f"{path} holds partial results of another evaluation", "choose another --output, or delete that file")
        self._scores = loaded
        for role, done in loaded.items():
            if done:
                last = max(done)
                self._to_check[role] = (last, done.pop(last))

    def missing(self, role: str, count: int) -> Iterator[int]:
        """The indices below `count` that `role` has not scored yet, the one to be compared after a resume first."""
        done = self._scores.setdefault(role, {})
        first = self._to_check.get(role)
        if first is not None:
            yield first[0]
        yield from (index for index in range(count) if index not in done and (first is None or index != first[0]))

    def add(self, role: str, index: int, scores: list[float], tokens: int, where: str) -> None:
        """Keep a record's scores; raises IntegrityError if a resumed record scores differently now."""
        kept = self._to_check.pop(role, None)
        if kept is not None:
            drift = max(abs(now - then) for now, then in zip(scores, kept[1], strict=True)) / tokens
            if not math.isfinite(drift) or drift > _TOLERANCE_NATS:
                self._to_check[role] = kept
                raise IntegrityError(f"{where} scores {drift:.4f} nats a token away from what {self.path} kept: the model has changed",
                                     "delete that file and start again")  # fmt: skip
        self._scores.setdefault(role, {})[index] = scores
        if time.monotonic() - self._saved_at >= SAVE_SECONDS:
            self.save()

    def attach(self, role: str, index: int, values: list[float]) -> None:
        """Keep numbers that go with a record and are not compared after a resume; before `add`, which saves."""
        self._to_check.pop(role, None)
        self._scores.setdefault(role, {})[index] = values

    def attached(self, role: str, count: int) -> list[list[float]] | None:
        """What was attached to all `count` records, None where one has nothing."""
        held = self._scores.get(role, {})
        return [held[index] for index in range(count)] if all(index in held for index in range(count)) else None

    def scores(self, role: str, count: int) -> list[list[float]]:
        """The scores of all `count` records of `role`, in order."""
        return [self._scores[role][index] for index in range(count)]

    def save(self) -> str:
        """Write what is done; returns a sentence on what was kept."""
        scores = {role: dict(done) for role, done in self._scores.items()}
        for role, (index, kept) in self._to_check.items():
            scores.setdefault(role, {})[index] = kept
        count = max(map(len, scores.values()), default=0)
        if self.path is None or not count:
            return f"{count} records were done; " + (
                "nothing is kept without --output" if self.path is None else "there is nothing to keep"
            )
        with atomic.disk_errors(self.path):
            atomic.write_file(self.path, json.dumps({"key": self._key, "scores": scores}))
        self._saved_at = time.monotonic()
        return f"{count} finished records are kept in {self.path}"

    def discard(self) -> None:
        """Delete the file: the whole result is written."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

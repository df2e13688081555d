"""The arena's decode records: what an endpoint decoded greedily, a line a prompt, with digests that say whether a line is what was captured.

A record is {id, prompt_sha256, prompt_token_ids, completion_token_ids, completion_token_sha256}; the last is the SHA-256 of the ids joined by
commas. `prompt_sha256` is of the prompt as it was given: its text as UTF-8, or, where ids were given, those joined by commas.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gemq.errors import UsageError
from gemq.eval.workloads import Prompt, ids_text
from gemq.text_files import read_lines

_KEYS = ("id", "prompt_sha256", "prompt_token_ids", "completion_token_ids", "completion_token_sha256")


def ids_sha256(ids: Sequence[int]) -> str:
    """The SHA-256 of token ids joined by commas, in hexadecimal."""
    return hashlib.sha256(ids_text(ids).encode()).hexdigest()


@dataclass(frozen=True)
class DecodeRecord:
    """A prompt and the token ids that followed it."""

    id: str
    prompt_sha256: str
    prompt_token_ids: tuple[int, ...]
    completion_token_ids: tuple[int, ...]
    completion_token_sha256: str

    @classmethod
    def of(cls, prompt: Prompt, ids: Sequence[int]) -> DecodeRecord:
        """The record of `ids` after a prompt that has token ids."""
        assert prompt.tokens is not None
        return cls(prompt.id, prompt.sha256, prompt.tokens, tuple(ids), ids_sha256(ids))

    def line(self) -> str:
        """The record as a line of the file."""
        return json.dumps(asdict(self), ensure_ascii=False) + "\n"


def write_decoded(path: Path, records: Iterable[DecodeRecord]) -> None:
    """Write a .jsonl of records in one step."""
    from gemq import atomic

    with atomic.disk_errors(path):
        atomic.write_file(path, "".join(record.line() for record in records))


def read_decoded(path: Path) -> list[DecodeRecord]:
    """The records of a file, never none; raises UsageError naming the line where one can't be compared: its form, an id, a digest."""
    found = [_parse(line, f"{path} line {number}") for number, line in read_lines(path)]
    seen: set[str] = set()
    for record in found:
        if record.id in seen:
            raise UsageError(f"{path}: the id {record.id!r} is there twice", "give every record its own id")
        seen.add(record.id)
    return found


def _parse(line: str, where: str) -> DecodeRecord:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON: {error}", "capture the records again") from None
    if not isinstance(entry, dict):
        raise UsageError(f"{where} is no object", f"a decode record has {', '.join(_KEYS)}")
    for key in _KEYS:
        if key not in entry:
            raise UsageError(f"{where} lacks {key}", f"a decode record has {', '.join(_KEYS)}")
    for key in ("prompt_token_ids", "completion_token_ids"):
        ids = entry[key]
        if not isinstance(ids, list) or not ids or not all(type(token) is int and token >= 0 for token in ids):
            raise UsageError(f"{where}: {key} is no list of token ids", "capture the records again")
    if not re.fullmatch("[0-9a-f]{64}", str(entry["prompt_sha256"])):
        raise UsageError(f"{where}: prompt_sha256 is {str(entry['prompt_sha256'])[:70]!r}, no SHA-256", "capture the records again")
    made = ids_sha256(entry["completion_token_ids"])
    if made != entry["completion_token_sha256"]:
        raise UsageError(f"{where}: completion_token_sha256 is {str(entry['completion_token_sha256'])[:12]}…, and the ids give {made[:12]}…",
                         "the ids were changed after they were captured: capture them again")  # fmt: skip
    return DecodeRecord(str(entry["id"]), entry["prompt_sha256"], tuple(entry["prompt_token_ids"]), tuple(entry["completion_token_ids"]),
                        entry["completion_token_sha256"])  # fmt: skip


def require_same_prompts(ours: DecodeRecord, theirs: DecodeRecord) -> None:
    """Refuse two records that don't follow the same prompt; raises UsageError."""
    if ours.prompt_token_ids != theirs.prompt_token_ids:
        raise UsageError(f"record {ours.id}: the prompts' token ids differ, {len(ours.prompt_token_ids)} and {len(theirs.prompt_token_ids)} of them",
                         "compare captures of the same prompts")  # fmt: skip

"""The records to score: windows of a text, or the arena's token records.

A record is a prompt of token ids and the position from which its tokens are targets. Every problem names the file and the line.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemq.calibration.special_tokens import beyond_vocabulary, clean_text, warn_of
from gemq.errors import UsageError
from gemq.text_files import read_lines, read_text

DEFAULT_LENGTH = 1024
_KEYS = ("id", "context_token_ids", "target_token_ids")


@dataclass(frozen=True)
class Record:
    """A prompt whose tokens from `first_target` on are scored; `where` names the line or window it came from."""

    id: str
    tokens: tuple[int, ...]
    first_target: int
    where: str

    @property
    def target_count(self) -> int:
        return len(self.tokens) - self.first_target

    @property
    def targets(self) -> tuple[int, ...]:
        return self.tokens[self.first_target :]


def file_sha256(path: Path) -> str:
    """The SHA-256 of a data file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_records(
    data: Path, *, tokenizer: Path | None, vocab_size: int | None, length: int | None = None, records: int | None = None, skip: int = 0
) -> list[Record]:
    """The records of `data`, at most `records` of them after the first `skip`; never an empty list.

    A .txt is tokenized whole by the tokenizer in `tokenizer`, without special tokens, and cut into windows of BOS + `length` - 1
    tokens (default 1024); the last, shorter window counts if it has two tokens, BOS included. A .jsonl holds the arena's token
    records {id, context_token_ids, target_token_ids}; with `length` each is cut to its first `length` tokens, and one left without
    targets is dropped. Raises UsageError on anything else, with file and line.
    """
    if records is not None and records < 1:
        raise UsageError(f"--records {records}: at least 1 is needed", "leave --records out to score them all")
    if skip < 0:
        raise UsageError(f"--skip {skip} is negative", "give the number of records to leave out at the start")
    if length is not None and length < 2:
        raise UsageError(f"--length {length}: a window needs at least 2 tokens, BOS and a target", "choose 2 or more; 1024 is the default")
    if not data.is_file():
        raise UsageError(f"data file {data} does not exist", "give a .txt, or a .jsonl of token records, to --data")
    if data.suffix == ".txt":
        found = list(_windows(data, tokenizer, vocab_size, length or DEFAULT_LENGTH))
    elif data.suffix == ".jsonl":
        found = list(_token_records(data, vocab_size))
    else:
        raise UsageError(f"data file {data} ends in {data.suffix or 'nothing'!r}", "give a .txt, or a .jsonl of token records, to --data")
    if not found:
        raise UsageError(f"data file {data} holds nothing to score", "give a file with text, or with token records")
    chosen = found[skip:] if records is None else found[skip : skip + records]
    if not chosen:
        raise UsageError(f"--skip {skip} leaves nothing: {data} has {len(found)} records", f"skip at most {len(found) - 1}")
    if data.suffix == ".jsonl" and length is not None:
        chosen = [Record(r.id, r.tokens[:length], r.first_target, r.where) for r in chosen if r.first_target < length]
        if not chosen:
            raise UsageError(f"--length {length} cuts every target off: the contexts of {data} are longer", "choose a larger --length")
    return chosen


def _windows(data: Path, tokenizer_directory: Path | None, vocab_size: int | None, length: int) -> Iterator[Record]:
    text = read_text(data)
    if tokenizer_directory is None:
        raise UsageError(
            f"{data} is text, and an endpoint's URL says nothing of its tokenizer", "give the checkpoint's directory to --tokenizer"
        )
    tokenizer = load_tokenizer(tokenizer_directory)
    bos = tokenizer.bos_token_id
    if bos is None:
        raise UsageError(f"the tokenizer in {tokenizer_directory} has no BOS token, with which every window starts",
                         "give token records (.jsonl) instead of text")  # fmt: skip
    seen: Counter[str] = Counter()
    ids = tokenizer(clean_text(tokenizer, text, str(data), seen), add_special_tokens=False, verbose=False)["input_ids"]
    warn_of(seen, str(data), "each stays inside its window, as the start of another document", tokenizer)
    if vocab_size is not None and (highest := max([bos, *ids])) >= vocab_size:
        what, advice = beyond_vocabulary(highest, vocab_size, tokenizer)
        raise UsageError(f"the tokenizer in {tokenizer_directory} gives id {highest}, {what}", advice)
    for number, start in enumerate(range(0, len(ids), length - 1)):
        yield Record(f"window-{number}", (bos, *ids[start : start + length - 1]), 1, f"{data} window {number}")


def load_tokenizer(directory: Path) -> Any:
    """The tokenizer of a checkpoint directory, from its files alone; raises UsageError if it has none."""
    if not any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        raise UsageError(
            f"{directory} has no tokenizer (tokenizer.json)", "give a directory that has one to --tokenizer, or token records (.jsonl)"
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UsageError(
            f"the tokenizer in {directory} can't be loaded: {error}", "copy the tokenizer's files from the source again"
        ) from error


def _token_records(data: Path, vocab_size: int | None) -> Iterator[Record]:
    seen: dict[str, str] = {}
    for number, line in read_lines(data):
        where = f"{data} line {number}"
        record = _parse(line, where, vocab_size)
        if record.id in seen:
            raise UsageError(f"{where}: the id {record.id!r} stands on line {seen[record.id]} already", "give every record its own id")
        seen[record.id] = str(number)
        yield record


def _parse(line: str, where: str, vocab_size: int | None) -> Record:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON: {error}", "write one JSON object a line") from None
    if not isinstance(entry, dict):
        raise UsageError(f"{where} is a JSON {type(entry).__name__}, not an object", f"write one object a line, with {', '.join(_KEYS)}")
    for key in _KEYS:
        if key not in entry:
            raise UsageError(f"{where} lacks {key}", f"a token record has {', '.join(_KEYS)}")
    if isinstance(entry["id"], bool) or not isinstance(entry["id"], (str, int)):
        raise UsageError(f"{where}: the id {entry['id']!r} is neither text nor a number", "give every record its own id")
    context, target = (_ids(entry[key], key, where, vocab_size) for key in _KEYS[1:])
    if not target:
        raise UsageError(f"{where}: target_token_ids is empty, so nothing would be scored", "leave the record out, or give it targets")
    if not context:
        raise UsageError(f"{where}: context_token_ids is empty, so the first target has nothing to follow", "start the context with BOS")
    return Record(str(entry["id"]), (*context, *target), len(context), where)


def _ids(value: object, key: str, where: str, vocab_size: int | None) -> list[int]:
    if not isinstance(value, list):
        raise UsageError(f"{where}: {key} is a {type(value).__name__}, not a list", "write token ids as a list of integers")
    for position, token in enumerate(value):
        if isinstance(token, bool) or not isinstance(token, int):
            raise UsageError(f"{where}: {key}[{position}] is {token!r}, not an integer", "write token ids as integers")
        if token < 0:
            raise UsageError(f"{where}: {key}[{position}] is {token}, and token ids start at 0", "tokenize the record again")
        if vocab_size is not None and token >= vocab_size:
            what, advice = beyond_vocabulary(token, vocab_size)
            raise UsageError(f"{where}: {key}[{position}] is {token}, {what}", advice)
    return value

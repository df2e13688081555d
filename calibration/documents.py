"""From files and data set rows to documents: token ids of one text, chat or record each.

.txt     one document, the whole file, so that its windows are consecutive
.jsonl   one document a row, all rows alike, an "id" allowed beside the keys of ROW_KINDS, "tools" beside messages; .jsonl.gz too. Chat
         messages may hold images and recordings: such a row is a record of its own (media.py), and not cut into windows
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gemq import output
from gemq.calibration.chats import Losses, chat_text, encode_messages
from gemq.calibration.media import KINDS, MediaReader, MediaRecord, has_media
from gemq.calibration.special_tokens import clean_text, warn_of
from gemq.calibration.tokenize import TokenLimits, check_ids, encode_text, load_tokenizer, read_limits, short
from gemq.errors import UsageError
from gemq.text_files import read_lines, read_text

TOOLS = "tools"
TEXT, MESSAGES, PAIR = ("text",), ("messages",), ("context_token_ids", "target_token_ids")
ROW_KINDS: tuple[tuple[str, ...], ...] = (TEXT, MESSAGES, ("token_ids",), ("input_ids",), PAIR)


class DocumentReader:
    """Turns rows into token ids; loads the tokenizer when the first row needs one, so that token-id records work without."""

    def __init__(self, model_dir: Path, column: str | None, length: int = 512) -> None:
        self.model_dir = model_dir
        self.column = column
        self.length = length  # of records with media, which are not cut later
        self.media: MediaReader | None = None
        self.rows = 0
        self.losses = Losses()
        self._inner_bos = 0
        self._tokenizer: Any = None
        self._limits: TokenLimits | None = None

    @property
    def tokenizer(self) -> Any:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.model_dir)
        return self._tokenizer

    @property
    def limits(self) -> TokenLimits:
        """BOS and EOS come from the tokenizer where the checkpoint has one."""
        if self._limits is None:
            has_one = any((self.model_dir / name).exists() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"))
            self._limits = read_limits(self.model_dir, self.tokenizer if has_one else None)
        return self._limits

    def file_documents(self, path: Path) -> Iterator[list[int] | MediaRecord]:
        """The documents of a .txt or .jsonl(.gz) file as token ids, in order; records where they have images or recordings."""
        if path.name.endswith(".txt"):
            text = read_text(path, path.name)
            self.rows = 1
            yield self._checked(self._encoded(text, path.name), path.name)
        elif path.name.endswith((".jsonl", ".jsonl.gz")):
            yield from self._documents(_json_rows(path), path.parent)
        else:
            raise UsageError(f"calibration file {path.name} has an unknown ending", "use .txt, .jsonl or .jsonl.gz")

    def known_ids(self, documents: Iterable[Sequence[int]], name: str) -> Iterator[list[int]]:
        """Token ids as they are, checked against the vocabulary."""
        for number, ids in enumerate(documents, 1):
            self.rows += 1
            yield self._checked(list(ids), f"{name} window {number}")

    def dataset_documents(self, dataset: Any, name: str, seed: int) -> Iterator[list[int] | MediaRecord]:
        """The documents of a data set as token ids, in an order drawn from `seed`."""
        import numpy

        column = self.column
        if column is not None and column not in dataset.column_names:
            raise UsageError(f"data set {name} has no column {column!r}", f"choose --column from: {', '.join(dataset.column_names)}")
        if column is None:
            kinds = [kind for kind in ROW_KINDS if set(kind) <= set(dataset.column_names)]
            if len(kinds) != 1:
                which = "several columns that could be meant" if kinds else "no column named text, messages, token_ids or input_ids"
                raise UsageError(f"data set {name} has {which}", f"choose --column from: {', '.join(dataset.column_names)}")
            keys = kinds[0]
        else:
            keys = (column,)
        # a permutation of our own: datasets' shuffle writes an index file beside the data
        order = numpy.random.default_rng(seed).permutation(len(dataset)).tolist()
        dataset = dataset.select_columns([*keys, *(name for name in (TOOLS,) if name in dataset.column_names and name not in keys)])

        def row(index: int) -> dict[str, Any]:
            return {key: _without_nulls(value) for key, value in dataset[index].items()}

        yield from self._documents(((f"{name} row {index}", row(index)) for index in order), None)

    def _documents(self, rows: Iterable[tuple[str, object]], folder: Path | None) -> Iterator[list[int] | MediaRecord]:
        first: tuple[str, ...] | None = None
        for where, row in rows:
            kind, value = _row_kind(row, self.column, where)
            if first is not None and kind != first:
                raise UsageError(f"{where}: this row has {' and '.join(kind)}, the rows before it have {' and '.join(first)}",
                                 "put rows of one kind in a file")
            first = kind
            self.rows += 1
            if kind == TEXT:
                if not isinstance(value, str):
                    raise UsageError(f"{where}: text must be a string, got {short(value)}", "write {\"text\": \"…\"}")
                ids = self._encoded(value, where)
            elif kind == MESSAGES and has_media(value):
                self.media = self.media or MediaReader(self.model_dir)
                text = chat_text(self.tokenizer, value, where, more_parts=KINDS, tools=_tools_of(row), losses=self.losses)
                record = self.media.record(self.tokenizer, value, text, folder, where, bos=self.limits.bos, length=self.length)
                self._checked(list(record.token_ids), where)
                yield record
                continue
            elif kind == MESSAGES:
                ids = encode_messages(self.tokenizer, value, where, tools=_tools_of(row), losses=self.losses)
            else:
                ids = [token for part in (value if kind == PAIR else [value]) for token in self._checked(part, where)]
                self._inner_bos += ids[1:].count(self.limits.bos) if self.limits.bos is not None else 0
            yield self._checked(ids, where)

    def _encoded(self, text: str, where: str) -> list[int]:
        return encode_text(self.tokenizer, clean_text(self.tokenizer, text, where, self.losses.special), where)

    def _checked(self, ids: object, where: str) -> list[int]:
        return check_ids(ids, self.limits, where, self._tokenizer)

    def report(self, name: str) -> None:
        """Warn of what was read of `name` and may not be meant so: special tokens as text, BOS inside records, what no chat template writes."""
        warn_of(self.losses.special, name, "each begins a new document", self._tokenizer)
        if self._inner_bos:
            output.warn(f"{name} holds BOS ({self.limits.bos}) {self._inner_bos} times inside token records: each begins a new document")
        for what, count in sorted(self.losses.unwritten.items()):
            output.warn(f"{name}: {count} chats have {what} that the model's chat template does not write: the calibration doesn't see them")


def _without_nulls(value: Any) -> Any:
    """A value of an Arrow row without the keys that its objects do not have: Arrow gives every row all keys that any row has, as null."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _without_nulls(item) for key, item in value.items() if item is not None}


def _tools_of(row: object) -> object:
    return row.get(TOOLS) if isinstance(row, dict) else None


def _row_kind(row: object, column: str | None, where: str) -> tuple[tuple[str, ...], Any]:
    """A row's kind and its value (for a context-target pair, both)."""
    if not isinstance(row, dict):
        raise UsageError(f"{where}: a row must be a JSON object, got {short(row)}", "write {\"text\": …} on each line")
    if column is not None:
        if column not in row:
            raise UsageError(f"{where}: there is no {column!r}, only {', '.join(map(repr, row)) or 'nothing'}", "choose another --column")
        value = row[column]
        if isinstance(value, str):
            return TEXT, value
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return MESSAGES, value
        if isinstance(value, list):
            return ("token_ids",), value
        raise UsageError(f"{where}: {column!r} is {short(value)}", "choose a --column of strings, chat messages or token ids")
    keys = {str(key) for key in row if key != "id" and not (key == TOOLS and "messages" in row)}
    for kind in ROW_KINDS:
        if keys == set(kind):
            return kind, [row[key] for key in kind] if len(kind) > 1 else row[kind[0]]
    raise UsageError(f"{where}: the keys are {', '.join(map(repr, sorted(keys))) or 'none'}; a row has one of: "
                     + ", ".join(" and ".join(kind) for kind in ROW_KINDS), "rename or remove keys, or name the one to read with --column")


def _json_rows(path: Path) -> Iterator[tuple[str, object]]:
    """Each line's place and JSON value; blank lines are passed over but counted."""
    for number, line in read_lines(path, path.name):
        where = f"{path.name} line {number}"
        try:
            yield where, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where}: this is no JSON ({short(error)})", "write one JSON object a line, in UTF-8") from None

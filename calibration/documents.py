"""From files and data set rows to documents: token ids of one text, chat or record each.

.txt     one document, the whole file, so that its windows are consecutive
.jsonl   one document a row, all rows alike, an "id" allowed beside the keys of ROW_KINDS; .jsonl.gz too. Chat messages may hold images
         and recordings: such a row is a record of its own (media.py), and not cut into windows
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

from gemq.calibration.media import MediaReader, MediaRecord, has_media
from gemq.calibration.tokenize import TokenLimits, check_ids, encode_messages, encode_text, load_tokenizer, read_limits, short
from gemq.errors import UsageError

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
            text = _read_text(path)
            self.rows = int(bool(text.strip()))
            yield self._checked(encode_text(self.tokenizer, text, path.name), path.name)
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
        dataset = dataset.select_columns(list(keys))
        yield from self._documents(((f"{name} row {index}", dataset[index]) for index in order), None)

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
                ids = encode_text(self.tokenizer, value, where)
            elif kind == MESSAGES and has_media(value):
                self.media = self.media or MediaReader(self.model_dir)
                record = self.media.record(self.tokenizer, value, folder, where, bos=self.limits.bos, length=self.length)
                self._checked(list(record.token_ids), where)
                yield record
                continue
            elif kind == MESSAGES:
                ids = encode_messages(self.tokenizer, value, where)
            else:
                ids = [token for part in (value if kind == PAIR else [value]) for token in check_ids(part, self.limits, where)]
            yield self._checked(ids, where)

    def _checked(self, ids: list[int], where: str) -> list[int]:
        return check_ids(ids, self.limits, where)


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
    keys = {str(key) for key in row if key != "id"}
    for kind in ROW_KINDS:
        if keys == set(kind):
            return kind, [row[key] for key in kind] if len(kind) > 1 else row[kind[0]]
    raise UsageError(f"{where}: the keys are {', '.join(map(repr, sorted(keys))) or 'none'}; a row has one of: "
                     + ", ".join(" and ".join(kind) for kind in ROW_KINDS), "rename or remove keys, or name the one to read with --column")


def _open(path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path, "rb")) if path.name.endswith(".gz") else open(path, "rb")


def _read_text(path: Path) -> str:
    try:
        with open(path, encoding="utf-8-sig") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path.name} is not UTF-8 text (byte {error.start})", "convert it to UTF-8") from None
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}", "check the file and its permissions") from None


def _json_rows(path: Path) -> Iterator[tuple[str, object]]:
    """Each line's place and JSON value; blank lines are passed over but counted."""
    try:
        with _open(path) as file:
            for number, line in enumerate(file, 1):
                where = f"{path.name} line {number}"
                if not line.strip():
                    continue
                try:
                    yield where, json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
                except (ValueError, RecursionError) as error:
                    raise UsageError(f"{where}: this is no JSON ({short(error)})", "write one JSON object a line, in UTF-8") from None
    except (OSError, EOFError) as error:
        raise UsageError(f"{path} can't be read: {short(error)}", "check the file; is it a whole .gz?") from None

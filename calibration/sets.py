"""Calibration sets: which token windows the quantizer's statistics come from, and their digest.

A set comes from the model's own samples (`self`), a local file, or a data set of the Hub. Windows may differ in length: a document that
ends early gives a short one. Files are read in order, data sets in an order drawn from `seed`; the first `samples` windows are taken.
Chats with images or recordings count among them, and are kept whole beside the windows of text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from gemq.atomic import disk_errors, write_file
from gemq.calibration import hub
from gemq.calibration.documents import DocumentReader
from gemq.calibration.media import KINDS, MediaRecord
from gemq.calibration.tokenize import cut_windows, read_limits, short
from gemq.errors import IntegrityError, UsageError

FORMAT_VERSION = 1
ENDINGS = (".txt", ".jsonl", ".jsonl.gz")
_HEADER = "gemq_calibration"


@dataclass(frozen=True)
class CalibrationSet:
    """Token windows with their digest. `description` is JSON: kind, name, samples, length, packed, seed, tokens and what the kind adds.

    `records` are chats with images or recordings, which the digest covers down to the files' bytes.
    """

    windows: tuple[tuple[int, ...], ...]
    sha256: str
    description: dict[str, Any]
    records: tuple[MediaRecord, ...] = ()

    @classmethod
    def of(cls, windows: Iterable[Sequence[int]], description: dict[str, Any], records: Iterable[MediaRecord] = ()) -> CalibrationSet:
        """A set of `windows` and `records`, its digest computed, its `tokens` and `samples` (and media) counted into `description`."""
        kept, media = tuple(tuple(window) for window in windows), tuple(records)
        counts: dict[str, Any] = {
            "samples": len(kept) + len(media), "tokens": sum(map(len, kept)) + sum(len(record.token_ids) for record in media)
        }  # fmt: skip
        if media:
            counts["media"] = {kind: sum(file.kind == kind for record in media for file in record.files) for kind in KINDS}
        return cls(kept, digest(kept, media), {**description, **counts}, media)

    def save(self, path: Path) -> None:
        """Write a .jsonl: a line with digest and description, then {"token_ids": […]} a window. Same set, same bytes.

        Raises UsageError for a set with images or recordings, whose files it would have to hold.
        """
        if self.records:
            raise UsageError(f"{path.name} can't hold a calibration set with images or recordings", "keep its .jsonl and files instead")
        header = {_HEADER: FORMAT_VERSION, "sha256": self.sha256, "description": dict(sorted(self.description.items()))}
        lines = [json.dumps(header, ensure_ascii=False)]
        lines += [json.dumps({"token_ids": list(window)}) for window in self.windows]
        with disk_errors(path):
            write_file(path, "\n".join(lines) + "\n")

    @classmethod
    def load(cls, path: Path) -> CalibrationSet:
        """The set that `save` wrote; raises IntegrityError when the windows don't have the digest that the file states."""

        def damaged(why: str) -> IntegrityError:
            return IntegrityError(f"calibration set {path} is damaged: {why}", "make it again, or restore the file")

        try:
            lines = path.read_text(encoding="utf-8").splitlines()
            header, *rows = [json.loads(line) for line in lines]
            stated, description = header["sha256"], header["description"]
            windows = tuple(tuple(row["token_ids"]) for row in rows)
            version = header[_HEADER]
            if not isinstance(description, dict) or any(type(token) is not int for window in windows for token in window):
                raise damaged("its rows aren't token ids")
        except FileNotFoundError:
            raise UsageError(f"there is no calibration set {path}", "check the path") from None
        except (ValueError, KeyError, TypeError) as error:
            raise damaged(f"it can't be read ({short(error)})") from None
        if version != FORMAT_VERSION:
            raise UsageError(f"calibration set {path} has format {version!r}, this gemq reads {FORMAT_VERSION}",
                             "make it again with this gemq")
        if digest(windows) != stated:
            raise damaged(f"its windows have SHA-256 {digest(windows)[:12]}…, it states {str(stated)[:12]}…")
        return cls(windows, stated, description)


def digest(windows: Iterable[Sequence[int]], records: Iterable[MediaRecord] = ()) -> str:
    """SHA-256 (hex) of the windows and records alone: a line each, its ids in decimal joined by commas, ended by a newline.

    A record's line goes on with kind:SHA-256 of each of its files, after spaces.
    """
    total = hashlib.sha256()
    for window in windows:
        total.update((",".join(map(str, window)) + "\n").encode())
    for record in records:
        files = "".join(f" {file.kind}:{file.sha256}" for file in record.files)
        total.update((",".join(map(str, record.token_ids)) + files + "\n").encode())
    return total.hexdigest()


def require_source(spec: str, length: int, model_dir: Path) -> None:
    """Refuse a calibration `spec` or `length` that can't be used, as far as that shows without reading data; raises UsageError."""
    longest = read_limits(model_dir).max_length
    if not 2 <= length <= (longest or length):
        raise UsageError(f"--length {length} can't be used, this model takes 2 to {longest or 'any number of'} tokens",
                         "choose a --length in that range")
    path = Path(spec).expanduser()
    if path.is_file() and spec != "self" and not path.name.endswith(ENDINGS):
        raise UsageError(f"calibration file {path.name} has an unknown ending", f"use {', '.join(ENDINGS)}")
    if spec and path.is_dir() and (path / "config.json").is_file() and spec != "self":
        raise UsageError(f"calibration {spec} is a model's directory", "name a .txt or .jsonl file, a data set, or self")
    if spec == "self" or path.is_file() or (spec and path.is_dir()) or (hub.HUB_ID.fullmatch(spec) and not _looks_like_file(spec)):
        return
    if _looks_like_file(spec):
        raise UsageError(f"there is no calibration file {spec}", "check the path; --calibration self needs no file")
    raise UsageError(f"calibration {spec!r} is neither self, nor a file, nor a data set like org/name[:config][@revision]",
                     "name a .txt or .jsonl file, a data set of the Hub, or self")


def load_calibration(spec: str, *, model_dir: Path, samples: int, length: int, seed: int, split: str = "train", column: str | None = None,
                     pack: bool = False, device: str = "cpu", cache_dir: Path | None = None) -> CalibrationSet:
    """Exactly `samples` windows of at most `length` tokens for the checkpoint in `model_dir`.

    spec: "self", a .txt, .jsonl or .jsonl.gz file, a local data set directory, or a Hub data set "org/name[:config][@revision]".
    model_dir: the checkpoint whose tokenizer and vocabulary count.
    split, column: of a data set; `column` also names a .jsonl row's field, and other fields are then ignored.
    device, cache_dir: for "self" only, where it generates and keeps the result.
    Raises UsageError when the data can't be read, doesn't fit the vocabulary, or gives fewer windows than `samples`.
    """
    if samples < 1:
        raise UsageError(f"--samples {samples} asks for no calibration data", "use --samples 1 or more")
    require_source(spec, length, model_dir)
    common = {"length": length, "seed": seed}
    if spec == "self":
        from gemq.calibration.selfgen import generate_self_set

        return generate_self_set(model_dir, samples=samples, length=length, seed=seed, device=device, cache_dir=cache_dir)
    path = Path(spec).expanduser()
    reader = DocumentReader(model_dir, column, length)
    documents: Iterable[Sequence[int] | MediaRecord]
    if path.is_file():
        documents = reader.known_ids(CalibrationSet.load(path).windows, path.name) if _is_saved_set(path) else reader.file_documents(path)
        described: dict[str, Any] = {"kind": "file", "name": path.name, "file_sha256": _file_sha256(path)}
    else:
        dataset, described = hub.open_dataset(spec, split)
        documents = reader.dataset_documents(dataset, described["name"], seed)
    taken = list(islice(_windows(documents, length, reader, pack=pack), samples))
    reader.report(path.name or spec)
    if len(taken) < samples:
        found = f"gives {len(taken)} windows of up to {length} tokens" if taken else f"gives no window ({reader.rows} documents read)"
        raise UsageError(f"calibration {spec} {found}, --samples asks for {samples}",
                         "lower --samples or --length, pass --pack to join short documents, or bring more data")
    windows, records = [each for each in taken if not isinstance(each, MediaRecord)], [each for each in taken if isinstance(each, MediaRecord)]
    return CalibrationSet.of(windows, {**described, **common, "column": column, "packed": pack}, records)


def _windows(
    documents: Iterable[Sequence[int] | MediaRecord], length: int, reader: DocumentReader, *, pack: bool
) -> Iterator[tuple[int, ...] | MediaRecord]:
    if pack:
        yield from cut_windows(_texts_only(documents), length, bos=reader.limits.bos, eos=reader.limits.eos, pack=True)
        return
    for document in documents:
        if isinstance(document, MediaRecord):
            yield document
        else:
            yield from cut_windows([document], length, bos=reader.limits.bos, eos=reader.limits.eos)


def _texts_only(documents: Iterable[Sequence[int] | MediaRecord]) -> Iterator[Sequence[int]]:
    for document in documents:
        if isinstance(document, MediaRecord):
            raise UsageError(f"{document.where}: --pack joins texts, and this record has images or recordings", "leave out --pack")
        yield document


def _looks_like_file(spec: str) -> bool:
    return spec.endswith((".txt", ".jsonl", ".jsonl.gz", ".json", ".gz", ".parquet", ".csv")) or spec.startswith((".", "/", "~"))


def _is_saved_set(path: Path) -> bool:
    with open(path, "rb") as file:
        return path.name.endswith(".jsonl") and file.read(64).startswith(f'{{"{_HEADER}": '.encode())


def _file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()



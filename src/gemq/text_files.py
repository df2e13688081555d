"""The one reader of text that users bring: evaluation and calibration see the same characters of the same file.

UTF-8, with or without a byte order mark, which is not part of the text. Line ends are \\n, \\r\\n or \\r, and become \\n. Refused are invalid UTF-8
and NUL, with their byte position, UTF-16 and UTF-32, by their marks, and a file that holds nothing but white space.
"""

from __future__ import annotations

import codecs
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from gemq.errors import UsageError

_OTHER_MARKS = ((codecs.BOM_UTF32_LE, "UTF-32"), (codecs.BOM_UTF32_BE, "UTF-32"), (codecs.BOM_UTF16_LE, "UTF-16"), (codecs.BOM_UTF16_BE, "UTF-16"))


def read_text(path: Path, name: str | None = None) -> str:
    """The text of a file; `name` is what errors call it (the path). Raises UsageError for what is no text, or none."""
    shown = name or str(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{shown} can't be read: {error.strerror}", "check the path and its permissions") from None
    text = _decoded(raw, shown, 0, 1).replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise _empty(shown)
    return text


def read_lines(path: Path, name: str | None = None) -> Iterator[tuple[int, str]]:
    """The lines of a .jsonl, or of a .jsonl.gz, with their numbers from 1; blank ones are counted and passed over. Raises as `read_text`.

    Lines are read as they are asked for, and a byte position counts in what was decompressed.
    """
    shown, position, some = name or str(path), 0, False
    try:
        with _open(path) as file:
            for number, raw in enumerate(file, 1):
                line = _decoded(raw, shown, position, number)
                position += len(raw)
                if line.strip():
                    some = True
                    yield number, line.rstrip("\r\n")
    except (OSError, EOFError, zlib.error) as error:  # what a .gz raises that is cut off, damaged or none
        raise UsageError(f"{shown} can't be read: {getattr(error, 'strerror', None) or error}", "check the file; is a .gz complete?") from None
    if not some:
        raise _empty(shown)


def _open(path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path, "rb")) if path.name.endswith(".gz") else open(path, "rb")


def _empty(name: str) -> UsageError:
    return UsageError(f"{name} holds nothing but white space", "give a file with text, or with records")


def _decoded(raw: bytes, name: str, position: int, line: int) -> str:
    """The text of `raw`, which starts at byte `position` and line `line` of its file."""
    start = 0
    if position == 0:
        for mark, encoding in _OTHER_MARKS:
            if raw.startswith(mark):
                raise UsageError(f"{name} is {encoding} (its byte order mark says so), UTF-8 is valid", f"iconv -f {encoding} -t UTF-8 converts it")
        start = len(codecs.BOM_UTF8) if raw.startswith(codecs.BOM_UTF8) else 0
    found = raw.find(b"\0")
    if found >= 0:
        raise UsageError(f"{name} line {line + raw[:found].count(10)} holds a NUL (byte {position + found}), which text has not",
                         "save the file as UTF-8: UTF-16 without a byte order mark looks like this")  # fmt: skip
    try:
        return raw[start:].decode("utf-8")
    except UnicodeDecodeError as error:
        at = start + error.start
        raise UsageError(f"{name} line {line + raw[:at].count(10)} is not UTF-8 text (byte {position + at})", "save the file as UTF-8") from None

"""Evaluation and calibration read the same characters of the same file, and refuse the same bytes by their position."""

from __future__ import annotations

import codecs
import gzip
import json
import random
from pathlib import Path

import pytest

from gemq.errors import UsageError
from gemq.text_files import read_lines, read_text

TEXT = "Größe eins\nzwei\n"


def written(path: Path, raw: bytes) -> Path:
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


@pytest.mark.parametrize("raw", [TEXT.encode(), codecs.BOM_UTF8 + TEXT.encode(), TEXT.replace("\n", "\r\n").encode(),
                                 codecs.BOM_UTF8 + TEXT.replace("\n", "\r\n").encode(), TEXT.replace("\n", "\r").encode()])  # fmt: skip
def test_marks_and_line_ends_are_not_text(tmp_path: Path, raw: bytes) -> None:
    assert read_text(written(tmp_path / "a.txt", raw)) == TEXT


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_lines_are_numbered_with_blank_ones(tmp_path: Path, name: str, mark: bytes, end: bytes) -> None:
    path = written(tmp_path / name, mark + end.join([b'{"a": 1}', b"", b"  ", '{"b": "ü"}'.encode()]) + end)
    assert [(number, json.loads(line)) for number, line in read_lines(path)] == [(1, {"a": 1}), (4, {"b": "ü"})]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize(("raw", "said"), [
    (b"one\ntw\xe9\n", r"line 2 is not UTF-8 text \(byte 6\)"),
    (codecs.BOM_UTF8 + b"one\ntw\xe9\n", r"line 2 is not UTF-8 text \(byte 9\)"),
    (b"one\ntwo\n\xed\xa0\x80", r"line 3 is not UTF-8 text \(byte 8\)"),  # a surrogate
    (b"one\n\xc3", r"line 2 is not UTF-8 text \(byte 4\)"),  # cut in a character
    (b"one\ntwo\0\n", r"line 2 holds a NUL \(byte 7\)"),
    ("one\n".encode("utf-16-le"), r"line 1 holds a NUL \(byte 1\)"),
    ("one\n".encode("utf-16"), "is UTF-16"),
    (codecs.BOM_UTF16_BE + "one\n".encode("utf-16-be"), "is UTF-16"),
    ("one\n".encode("utf-32"), "is UTF-32"),
    (b"", "holds nothing"), (b" \r\n\t\n", "holds nothing"), (codecs.BOM_UTF8, "holds nothing"),
])  # fmt: skip
def test_what_is_no_text_is_refused_by_its_byte(tmp_path: Path, name: str, raw: bytes, said: str) -> None:
    path = written(tmp_path / name, raw)
    read = read_text if name.endswith(".txt") else lambda path: list(read_lines(path))
    with pytest.raises(UsageError, match=said) as refused:
        read(path)
    assert refused.value.next_step


def test_a_cut_gz_and_a_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"a": 1}\n' * 1000)[:-20])
    (tmp_path / "b.jsonl.gz").write_bytes(b"not gzip")
    damaged = bytearray(gzip.compress(random.Random(1).randbytes(4000).hex().encode() + b"\n"))
    damaged[1000:1100] = bytes(100)  # zlib.error, which is no OSError
    (tmp_path / "d.jsonl.gz").write_bytes(damaged)
    (tmp_path / "c.jsonl").mkdir()
    for name in ("a.jsonl.gz", "b.jsonl.gz", "c.jsonl", "d.jsonl.gz", "none.jsonl"):
        with pytest.raises(UsageError, match="can't be read"):
            list(read_lines(tmp_path / name))
    with pytest.raises(UsageError, match="can't be read"):
        read_text(tmp_path / "c.jsonl")

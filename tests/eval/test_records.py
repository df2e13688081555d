"""Records come out as the arenas cut them, and what is wrong with a file is named with its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small import BOS, random_records

from gemq.errors import UsageError
from gemq.eval.records import read_records


def read(path: Path, tokenizer: Path | None = None, **limits: int):  # type: ignore[no-untyped-def]
    return read_records(path, tokenizer=tokenizer, vocab_size=320, **limits)


def test_windows_of_a_text(source: Path, text_file: Path) -> None:
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(source)(text_file.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    windows = read(text_file, source, length=50)
    assert all(window.tokens[0] == BOS and window.first_target == 1 for window in windows)
    assert [token for window in windows for token in window.targets] == ids
    assert {len(window.tokens) for window in windows[:-1]} == {50}
    assert 2 <= len(windows[-1].tokens) <= 50
    assert windows[3].where == f"{text_file} window 3"


def test_last_window_needs_a_target(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "eight.txt"
    path.write_text("abcdefgh")
    assert [len(window.tokens) for window in read(path, source, length=5)] == [5, 5]
    assert [len(window.tokens) for window in read(path, source, length=8)] == [8, 2]
    assert [len(window.tokens) for window in read(path, source)] == [9]


def test_line_ends_stay_as_they_are(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "mixed.txt"
    path.write_bytes(b"a\nb\tc\n\n")
    assert read(path, source)[0].target_count == 7


def test_limits(records_file: Path) -> None:
    everything = read(records_file)
    assert [record.id for record in read(records_file, records=3)] == [record.id for record in everything[:3]]
    assert [record.id for record in read(records_file, records=3, skip=2)] == [record.id for record in everything[2:5]]
    assert len(read(records_file, records=99)) == 12
    for wrong in ({"records": 0}, {"records": -1}, {"skip": -1}, {"length": 1}, {"skip": 12}):
        with pytest.raises(UsageError):
            read(records_file, **wrong)


def test_token_records_score_targets_only(records_file: Path) -> None:
    for record, written in zip(read(records_file), random_records(12), strict=True):
        assert list(record.targets) == written["target_token_ids"]
        assert list(record.tokens[: record.first_target]) == written["context_token_ids"]


def test_token_records_are_cut_at_a_length(records_file: Path) -> None:
    whole = read(records_file)
    cut = read(records_file, length=25)
    assert all(len(record.tokens) <= 25 and record.target_count >= 1 for record in cut)
    assert [record.id for record in cut] == [record.id for record in whole if record.first_target < 25]
    with pytest.raises(UsageError, match="cuts every target off"):
        read(records_file, length=2)


GOOD = {"id": "x", "context_token_ids": [2, 7], "target_token_ids": [8, 9]}


@pytest.mark.parametrize(
    ("third", "message"),
    [
        ("{not json", "not JSON"),
        ('{"id": "x"', "not JSON"),
        ("[1, 2]", "JSON list, not an object"),
        ("[" * 100_000, "not JSON"),
        *((json.dumps({k: v for k, v in GOOD.items() if k != key}), f"lacks {key}") for key in GOOD),
        (json.dumps(GOOD | {"target_token_ids": []}), "target_token_ids is empty"),
        (json.dumps(GOOD | {"context_token_ids": []}), "context_token_ids is empty"),
        (json.dumps(GOOD | {"target_token_ids": [8, 320]}), r"target_token_ids\[1\] is 320, beyond the vocabulary of 320"),
        (json.dumps(GOOD | {"context_token_ids": [2, 10**30]}), r"context_token_ids\[1\] is 1000"),
        (json.dumps(GOOD | {"target_token_ids": [-1]}), r"target_token_ids\[0\] is -1"),
        (json.dumps(GOOD | {"target_token_ids": [True]}), r"target_token_ids\[0\] is True"),
        (json.dumps(GOOD | {"target_token_ids": [1.0]}), r"target_token_ids\[0\] is 1\.0"),
        (json.dumps(GOOD | {"target_token_ids": [None]}), r"target_token_ids\[0\] is None"),
        (json.dumps(GOOD | {"target_token_ids": "8 9"}), "target_token_ids is a str"),
        (json.dumps(GOOD | {"id": None}), "the id None"),
        (json.dumps(GOOD | {"id": True}), "the id True"),
        (json.dumps(GOOD | {"id": "record-1"}), "'record-1' stands on line 2 already"),
    ],
)
def test_a_bad_record_names_file_and_line(bad_line, third: str, message: str) -> None:  # type: ignore[no-untyped-def]
    path = bad_line(third)
    with pytest.raises(UsageError, match=message) as caught:
        read(path)
    assert f"{path} line 3" in str(caught.value)
    assert caught.value.next_step


@pytest.mark.parametrize("content", ["", "\n \n"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_empty_file(source: Path, tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match="holds nothing"):
        read(tmp_path / name, source)


def test_files_that_can_not_be_read(source: Path, tmp_path: Path, text_file: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        read(tmp_path / "none.txt", source)
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(UsageError, match=r"'\.csv'"):
        read(tmp_path / "a.csv", source)
    (tmp_path / "latin.txt").write_bytes(b"one\ntw\xe9\n")
    with pytest.raises(UsageError, match=r"line 2 is not UTF-8"):
        read(tmp_path / "latin.txt", source)
    with pytest.raises(UsageError, match="says nothing of its tokenizer"):
        read(text_file, None)
    with pytest.raises(UsageError, match="no tokenizer"):
        read(text_file, tmp_path)
    with pytest.raises(UsageError, match="beyond the vocabulary of 100 tokens"):
        read_records(text_file, tokenizer=source, vocab_size=100)

"""Special tokens that stand in a text as literals: a leading BOS is dropped, others count and are reported, placeholders of media are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gemq.calibration.sets import CalibrationSet, load_calibration
from gemq.calibration.special_tokens import beyond_vocabulary
from gemq.calibration.tokenize import load_tokenizer
from gemq.config_file import read_config
from gemq.errors import UsageError
from gemq.eval.records import read_records

TEXT = "The river froze over night, and in the morning nobody crossed it. " * 4


def calibrated(path: Path, model: Path, samples: int = 1) -> CalibrationSet:
    return load_calibration(str(path), model_dir=model, samples=samples, length=40, seed=0)


def scored(path: Path, model: Path) -> list[tuple[int, ...]]:
    return [record.tokens for record in read_records(path, tokenizer=model, vocab_size=None, length=40)]


def chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "Indeed it was so."}]}


@pytest.mark.parametrize("lead", ["<bos>", "<bos><bos>", "\ufeff", "\ufeff<bos>"])
def test_a_leading_bos_makes_no_difference(chat_model: Path, tmp_path: Path, lead: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain, led = tmp_path / "plain.txt", tmp_path / "led.txt"
    plain.write_text(TEXT)
    led.write_text(lead + TEXT)
    assert scored(led, chat_model) == scored(plain, chat_model)
    assert calibrated(led, chat_model).windows == calibrated(plain, chat_model).windows
    for make in (lambda text: {"text": text}, chat):
        rows = [tmp_path / "plain.jsonl", tmp_path / "led.jsonl"]
        for path, text in zip(rows, (TEXT, lead + TEXT), strict=True):
            path.write_text(json.dumps(make(text)) + "\n")
        assert calibrated(rows[1], chat_model).windows == calibrated(rows[0], chat_model).windows
    assert "special tokens as text" not in capsys.readouterr().err


def test_others_count_as_tokens_and_are_reported_once_with_how_often(chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"<bos>{TEXT}<bos>{TEXT}<eos><start_of_turn>{TEXT}<bos>x"
    path = tmp_path / "a.txt"
    path.write_text(text)
    windows = scored(path, chat_model)
    assert sum(window[1:].count(2) for window in windows) == 2
    said = capsys.readouterr().err
    calibrated(path, chat_model)
    again = capsys.readouterr().err
    for each in (said, again):
        assert "<bos> 2 times" in each
        assert "<eos> 1 times" in each
        assert "<start_of_turn> 1 times" in each
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(chat(f"{TEXT}<bos>{TEXT}")) + "\n")
    calibrated(path, chat_model)
    assert "<bos> 1 times" in capsys.readouterr().err  # the template's own are not counted


def test_bos_inside_token_records_is_reported(chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ids.jsonl"
    path.write_text(json.dumps({"token_ids": [2, *range(300, 330), 2, *range(300, 330)]}) + "\n")
    calibrated(path, chat_model)
    assert "1 times inside token records" in capsys.readouterr().err


@pytest.mark.parametrize("make", [lambda text: text, lambda text: json.dumps({"text": text}), lambda text: json.dumps(chat(text))])
def test_a_placeholder_of_an_image_in_text_is_refused(multimodal_model: Path, tmp_path: Path, make: Any) -> None:
    content = make(f"{TEXT}<image_soft_token>{TEXT}")
    path = tmp_path / ("a.jsonl" if content.startswith("{") else "a.txt")
    path.write_text(content)
    with pytest.raises(UsageError, match="<image_soft_token>"):
        calibrated(path, multimodal_model)
    if path.suffix == ".txt":
        with pytest.raises(UsageError, match="<image_soft_token>"):
            scored(path, multimodal_model)


def test_an_id_that_the_model_lacks_is_explained(chat_model: Path, tmp_path: Path) -> None:
    tokenizer, size = load_tokenizer(chat_model), int(read_config(chat_model)["vocab_size"])
    what, advice = beyond_vocabulary(size, size)
    assert "placeholder of an image" in what
    assert "another model" not in advice
    assert "another model" in beyond_vocabulary(size + 1, size)[1]
    placeholder = tokenizer.convert_tokens_to_ids("<image_soft_token>")
    what, advice = beyond_vocabulary(placeholder, placeholder, tokenizer)
    assert "<image_soft_token>" in what
    assert "multimodal" in advice
    path = tmp_path / "ids.jsonl"
    path.write_text(json.dumps({"token_ids": [2, *range(300, 330), size]}) + "\n")
    with pytest.raises(UsageError, match=f"line 1: token 31 has id {size}, .*placeholder of an image"):
        calibrated(path, chat_model)
    path.write_text(json.dumps({"id": "a", "context_token_ids": [2], "target_token_ids": [size]}) + "\n")
    with pytest.raises(UsageError, match=f"line 1: .* is {size}, .*placeholder of an image"):
        read_records(path, tokenizer=None, vocab_size=size)

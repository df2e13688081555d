"""Kinds of calibration and evaluation files: equal content gives equal results, and what can't be used is refused before any work."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from tests.blackbox import sources
from tests.blackbox.command import DONE, USAGE, Done, Gemq
from tests.blackbox.files import left_beside, read_json

TEXT = "The river below the mill froze in the first week of December,\nand for nine days nobody could grind any corn.\n\n" * 12

TOOL_TEMPLATE = """\
{{ bos_token }}{% if tools %}<start_of_turn>tools
{% for tool in tools %}{{ tool.function.name }} {{ tool.function.description }}
{% endfor %}<end_of_turn>
{% endif %}{% for message in messages %}<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}
{% if message.content is string %}{{ message.content }}{% elif message.content %}{% for part in message.content %}{{ part.text }}{% endfor %}\
{% endif %}{% for call in message.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}<end_of_turn>
{% endfor %}"""
TOOLS = [{"type": "function", "function": {
    "name": "weather", "description": "the weather of a place, now or in some hours",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}}}}]  # fmt: skip
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"place": "the village below the mill"}}}
CHAT = [
    {"role": "user", "content": "What is the weather like in the village below the mill this evening?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "name": "weather", "content": "south wind, ice on the river, four degrees below zero"},
    {"role": "assistant", "content": "It is cold, and the wind has turned to the south."},
]
PLAIN_CHAT = [message for message in CHAT if message["content"] is not None and message["role"] != "tool"]


def quantize(gemq: Gemq, source: Path, calibration: Path | str, name: str, samples: int = 8) -> tuple[Done, Path]:
    """The command with a calibration file, and where its checkpoint would be."""
    out = gemq.cwd / name
    done = gemq("quantize", source, "--recipe", "w4a16-g32", "--calibration", calibration, "--samples", str(samples), "--length", "32",
                "--eval-data", "none", "--output", out)  # fmt: skip
    return done, out


def made(gemq: Gemq, source: Path, calibration: Path, name: str, samples: int = 8) -> tuple[str, str]:
    """The digest of the calibration windows, and that of the weights that came of them."""
    done, out = quantize(gemq, source, calibration, name, samples)
    done.exited(DONE)
    (weights,) = (file["sha256"] for file in read_json(out / "gemq.seal.json")["files"] if file["path"] == "model.safetensors")
    return read_json(out / "gemq.json")["calibration"]["sha256"], weights


def rows(path: Path, *documents: Any) -> Path:
    """A .jsonl."""
    path.write_text("".join(json.dumps(document, ensure_ascii=False) + "\n" for document in documents), encoding="utf-8")
    return path


def test_a_byte_order_mark_and_other_line_ends_and_a_leading_bos_change_nothing(gemq, source, tmp_path):
    """And rows of one text are the text: the windows of a document don't depend on the file around it."""
    forms = {
        "plain.txt": TEXT.encode(),
        "bom-crlf.txt": b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode(),
        "bos.txt": b"<bos>" + TEXT.encode(),
        "bom-crlf.jsonl.gz": gzip.compress(b"\xef\xbb\xbf" + json.dumps({"text": TEXT}).encode() + b"\r\n\r\n"),
    }
    found = {}
    for name, content in forms.items():
        (tmp_path / name).write_bytes(content)
        found[name] = made(gemq, source, tmp_path / name, f"by-{name}")
    assert {name: digests for name, digests in found.items() if digests != found["plain.txt"]} == {}


def test_a_bos_inside_a_text_is_warned_of(gemq, source, tmp_path):
    path = tmp_path / "inside.txt"
    path.write_text(TEXT + "<bos>" + TEXT + "<bos>" + TEXT)
    done, _ = quantize(gemq, source, path, "out")
    assert "bos" in done.exited(DONE).stderr.lower()
    assert "2" in done.stderr


def test_chats_with_tools_and_calls_without_content_are_used_whole(gemq, source, tmp_path):
    model = sources.changed(source, tmp_path / "source")
    (model / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    told = {
        "with": rows(tmp_path / "with.jsonl", *[{"messages": CHAT, "tools": TOOLS}] * 4),
        "without": rows(tmp_path / "without.jsonl", *[{"messages": CHAT}] * 4),
    }
    found = {name: made(gemq, model, path, name, samples=4) for name, path in told.items()}
    assert len({digest for digest, _ in found.values()}) == 2, "tools or tool calls are lost"


def test_chats_of_strings_and_of_parts_are_one(gemq, source, tmp_path):
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in PLAIN_CHAT]
    strings = made(gemq, source, rows(tmp_path / "strings.jsonl", *[{"messages": PLAIN_CHAT}] * 4), "strings", samples=4)
    assert made(gemq, source, rows(tmp_path / "parts.jsonl", *[{"messages": parts}] * 4), "parts", samples=4) == strings


def test_token_ids_are_used_as_they_are_in_rows_of_either_form(gemq, source, tmp_path, calibration):
    windows = [json.loads(line)["token_ids"] for line in calibration.read_text().splitlines()]
    pairs = [{"id": number, "context_token_ids": ids[:5], "target_token_ids": ids[5:]} for number, ids in enumerate(windows)]
    assert made(gemq, source, rows(tmp_path / "pairs.jsonl", *pairs), "pairs") == made(gemq, source, calibration, "plain")


IDS = list(range(20, 52))

REFUSED: dict[str, tuple[str, bytes]] = {
    "blank-txt": ("blank.txt", b" \n\t\r\n " * 50),
    "empty-jsonl": ("empty.jsonl", b""),
    "binary-txt": ("binary.txt", bytes(range(256)) * 20),
    "utf-16": ("utf16.txt", TEXT.encode("utf-16")),
    "gzip-truncated": ("cut.jsonl.gz", gzip.compress(json.dumps({"text": TEXT}).encode())[:-20]),
    "row-of-unknown-keys": ("keys.jsonl", b'{"content": "x"}\n' * 9),
    "text-null": ("null.jsonl", b'{"text": null}\n' * 9),
    "rows-of-two-kinds": ("two.jsonl", json.dumps({"text": TEXT[:120]}).encode() + b"\n" + json.dumps({"token_ids": IDS * 9}).encode() + b"\n"),
    "json-deep": ("deep.jsonl", b"[" * 100_000 + b"\n"),
    "ids-beyond-the-vocabulary": ("ids.jsonl", json.dumps({"token_ids": [*IDS, 100_000]}).encode() + b"\n"),
    "ids-floats": ("ids.jsonl", json.dumps({"token_ids": [float(token) for token in IDS]}).encode() + b"\n"),
    "chat-role-unknown": ("chat.jsonl", (json.dumps({"messages": [{"role": "narrator", "content": TEXT}]}) + "\n").encode() * 9),
    "chat-nothing-said": ("chat.jsonl", (json.dumps({"messages": [{"role": "user", "content": None}]}) + "\n").encode() * 9),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_calibration_that_cannot_be_used_is_refused_and_leaves_nothing(gemq, source, tmp_path, kind):
    name, content = REFUSED[kind]
    (tmp_path / name).write_bytes(content)
    done, out = quantize(gemq, source, tmp_path / name, "out", samples=4 if kind == "rows-of-two-kinds" else 1)
    done.exited(USAGE)
    assert name in done.told
    assert left_beside(out) == set()


def test_calibration_that_is_not_a_file_is_refused(gemq, source, tmp_path):
    (tmp_path / "folder.jsonl").mkdir()
    for wrong in (tmp_path / "folder.jsonl", tmp_path / "missing.txt", "/dev/null"):
        done, out = quantize(gemq, source, wrong, "out")
        done.exited(USAGE)
        assert left_beside(out) == set()


def test_an_id_equal_to_the_vocabulary_size_is_refused_without_blaming_another_model(gemq, source, tmp_path):
    """Gemma 3's image token has that id in the text-only models: it is the right model, and the row has to go."""
    path = rows(tmp_path / "image.jsonl", *[{"token_ids": [2, *IDS[:20], 512, *IDS[20:]]}] * 9)
    done, out = quantize(gemq, source, path, "out")
    done.exited(USAGE)
    assert "512" in done.told
    assert "another model" not in done.told
    assert left_beside(out) == set()


# evaluation reads text by the same rules


def ppl(gemq: Gemq, model: Path, data: Path) -> dict[str, Any]:
    """What eval-ppl printed."""
    found: dict[str, Any] = gemq("eval-ppl", model, "--data", data, "--length", "64", "--json").exited(DONE).json
    return found


def test_a_byte_order_mark_and_other_line_ends_and_a_leading_bos_do_not_change_a_perplexity(gemq, source, tmp_path):
    found = {}
    for name, content in {
        "plain": TEXT.encode(), "bom-crlf": b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode(), "bos": b"<bos>" + TEXT.encode()
    }.items():  # fmt: skip
        (tmp_path / f"{name}.txt").write_bytes(content)
        result = ppl(gemq, source, tmp_path / f"{name}.txt")
        found[name] = (result["tokens"], result["ppl"]["value"])
    assert found == dict.fromkeys(found, found["plain"])


def test_a_bos_inside_evaluation_text_is_warned_of(gemq, source, tmp_path):
    (tmp_path / "inside.txt").write_text(TEXT + "<bos>" + TEXT)
    done = gemq("eval-ppl", source, "--data", tmp_path / "inside.txt", "--length", "64").exited(DONE)
    assert "bos" in done.stderr.lower()


def test_evaluation_records_with_a_byte_order_mark_are_the_same_records(gemq, source, records, tmp_path):
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + records.read_bytes().replace(b"\n", b"\r\n"))
    assert ppl(gemq, source, tmp_path / "bom.jsonl")["ppl"] == ppl(gemq, source, records)["ppl"]


def test_evaluation_data_that_cannot_be_used_is_refused(gemq, source, tmp_path):
    (tmp_path / "folder.txt").mkdir()
    contents = {
        "only-bom.txt": b"\xef\xbb\xbf", "only-bos.txt": b"<bos>", "binary.txt": bytes(range(256)), "text.jsonl": b'{"text": "x"}\n',
        "beyond.jsonl": b'{"id": 1, "context_token_ids": [2], "target_token_ids": [512]}\n',
    }  # fmt: skip
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    for name in (*contents, "folder.txt"):
        gemq("eval-ppl", source, "--data", tmp_path / name, "--output", tmp_path / "result.json").exited(USAGE)
        assert not (tmp_path / "result.json").exists(), name

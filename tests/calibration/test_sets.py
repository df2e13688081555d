"""Calibration sets from files and data sets: exact windows, one digest a content, and every bad input named by its line."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemq.calibration import hub
from gemq.calibration.sets import CalibrationSet, digest, load_calibration
from gemq.calibration.tokenize import load_tokenizer
from gemq.errors import IntegrityError, UsageError

BOS, EOS = 2, 1
TEXTS = [f"The miller wrote the number {number} into a book, and the river below the mill froze." for number in range(12)]


def rows(path: Path, values: list[object]) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def load(spec: Path | str, model: Path, **options: Any) -> CalibrationSet:
    return load_calibration(str(spec), model_dir=model, **{"samples": 3, "length": 32, "seed": 0, **options})


# ---- the digest and the saved file


def test_the_digest_is_sha256_of_lines_of_comma_joined_ids() -> None:
    assert digest([(2, 5), (2, 7, 9)]) == hashlib.sha256(b"2,5\n2,7,9\n").hexdigest()


@given(st.lists(st.lists(st.integers(0, 300), min_size=1), min_size=1), st.lists(st.lists(st.integers(0, 300), min_size=1), min_size=1))
def test_two_sets_have_one_digest_only_if_their_windows_agree(one: list[list[int]], other: list[list[int]]) -> None:
    assert (digest(one) == digest(other)) == (one == other)


def test_the_description_does_not_enter_the_digest() -> None:
    assert CalibrationSet.of([(2, 3)], {"kind": "file"}).sha256 == CalibrationSet.of([[2, 3]], {"kind": "self"}).sha256


def test_a_saved_set_loads_as_it_was_and_saves_to_the_same_bytes(tmp_path: Path) -> None:
    made = CalibrationSet.of([(2, 3, 4), (2, 5)], {"kind": "file", "name": "straße.txt", "seed": 0})
    assert made.description == {"kind": "file", "name": "straße.txt", "seed": 0, "samples": 2, "tokens": 5}
    made.save(tmp_path / "a.jsonl")
    loaded = CalibrationSet.load(tmp_path / "a.jsonl")
    assert loaded == made
    loaded.save(tmp_path / "b.jsonl")
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


@pytest.mark.parametrize("damage", [
    lambda text: text.replace("[2, 5]", "[2, 6]"),  # a token
    lambda text: text[: text.rindex("\n", 0, -1) + 1],  # the last window
    lambda text: text[:-4],  # half a line
    lambda text: "",
    lambda text: text.split("\n", 1)[1],  # the header
    lambda text: text.replace("[2, 5]", '["2", 5]'),
    lambda text: text.replace('"sha256": "', '"sha256": "0'),
], ids=["token", "window", "cut", "empty", "header", "type", "digest"])  # fmt: skip
def test_any_damage_to_a_saved_set_is_found(tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "set.jsonl"
    CalibrationSet.of([(2, 3, 4), (2, 5)], {"kind": "file"}).save(path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(IntegrityError, match="is damaged"):
        CalibrationSet.load(path)


def test_a_set_of_another_format_and_a_missing_one_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    CalibrationSet.of([(2, 3)], {}).save(path)
    path.write_text(path.read_text().replace('{"gemq_calibration": 1', '{"gemq_calibration": 2'))
    with pytest.raises(UsageError, match="has format 2, this gemq reads 1"):
        CalibrationSet.load(path)
    with pytest.raises(UsageError, match="no calibration set"):
        CalibrationSet.load(tmp_path / "none.jsonl")


def test_a_saved_set_is_calibration_data_again_and_its_damage_is_found_then_too(tmp_path: Path, base_model: Path) -> None:
    made = load(rows(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS]), base_model)
    made.save(tmp_path / "saved.jsonl")
    assert load(tmp_path / "saved.jsonl", base_model).sha256 == made.sha256
    (tmp_path / "saved.jsonl").write_text((tmp_path / "saved.jsonl").read_text().replace("[2, ", "[2, 9, ", 1))
    with pytest.raises(IntegrityError, match="is damaged"):
        load(tmp_path / "saved.jsonl", base_model)


# ---- text files


def test_a_text_file_is_one_document_cut_into_consecutive_windows(tmp_path: Path, base_model: Path) -> None:
    text = "\n\n".join(TEXTS)
    (tmp_path / "book.txt").write_text(text)
    ids = load_tokenizer(base_model)(text, add_special_tokens=False)["input_ids"]
    made = load(tmp_path / "book.txt", base_model, samples=5)
    assert made.windows == tuple((BOS, *ids[31 * at : 31 * (at + 1)]) for at in range(5))
    assert made.sha256 == digest(made.windows)
    assert made.description == {
        "kind": "file", "name": "book.txt", "file_sha256": hashlib.sha256(text.encode()).hexdigest(), "length": 32, "seed": 0,
        "column": None, "packed": False, "samples": 5, "tokens": 160,
    }  # fmt: skip
    json.dumps(made.description)


@pytest.mark.slow
def test_wikitext_gives_the_windows_that_the_peers_use(shared_data: Path, demo_model: Path) -> None:
    made = load(shared_data / "wikitext2-valid.txt", demo_model, samples=64, length=512)
    text = (shared_data / "wikitext2-valid.txt").read_text(encoding="utf-8")
    ids = load_tokenizer(demo_model)(text, add_special_tokens=False)["input_ids"]
    assert made.windows == tuple((BOS, *ids[511 * at : 511 * (at + 1)]) for at in range(64))
    assert made.sha256 == "0c799bf70525d9449a64f67c7f8135053e7b5e0c7ca5e6a2ee6d3d3ceb697228"


def test_the_arena_s_records_are_read_as_context_and_target(shared_data: Path, demo_model: Path) -> None:
    path = shared_data / "ppl_ground_truth_tokens.jsonl"
    made = load(path, demo_model, samples=1, length=4096)
    first = json.loads(path.read_text().splitlines()[0])
    assert list(made.windows[0]) == first["context_token_ids"] + first["target_token_ids"]


def test_a_byte_order_mark_and_windows_line_ends_are_not_text(tmp_path: Path, base_model: Path) -> None:
    text = "\n".join(TEXTS)
    (tmp_path / "plain.txt").write_bytes(text.encode())
    (tmp_path / "other.txt").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert load(tmp_path / "plain.txt", base_model).sha256 == load(tmp_path / "other.txt", base_model).sha256


def test_text_that_is_not_utf8_is_refused(tmp_path: Path, base_model: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("Straße".encode("latin-1"))
    with pytest.raises(UsageError, match=r"latin\.txt line 1 is not UTF-8 text \(byte 4\)"):
        load(tmp_path / "latin.txt", base_model)


def test_the_samples_of_a_file_are_its_first_windows_whatever_the_seed(tmp_path: Path, base_model: Path) -> None:
    path = rows(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    many = load(path, base_model, samples=6, seed=1).windows
    assert load(path, base_model, samples=2, seed=9).windows == many[:2]


# ---- rows


def test_each_row_is_a_document(tmp_path: Path, base_model: Path) -> None:
    tokenizer = load_tokenizer(base_model)
    made = load(rows(tmp_path / "texts.jsonl", [{"text": text, "id": number} for number, text in enumerate(TEXTS)]), base_model, length=200)
    assert [tokenizer.decode(window[1:]) for window in made.windows] == TEXTS[:3]


def test_packing_joins_rows_with_eos(tmp_path: Path, base_model: Path) -> None:
    tokenizer = load_tokenizer(base_model)
    made = load(rows(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS]), base_model, length=100, samples=2, pack=True)
    assert made.description["packed"] is True
    assert [len(window) for window in made.windows] == [100, 100]
    assert tokenizer.decode([token for window in made.windows for token in window[1:]]).startswith("<eos>".join(TEXTS[:2]))


@pytest.mark.parametrize("row", [
    {"token_ids": [2, *range(20, 40)]}, {"input_ids": list(range(20, 40))},
    {"context_token_ids": [2, *range(20, 30)], "target_token_ids": list(range(30, 40)), "id": "x"},
], ids=["token_ids", "input_ids", "context and target"])  # fmt: skip
def test_token_records_need_no_tokenizer_and_get_one_bos(tmp_path: Path, base_model: Path, row: dict[str, object]) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(base_model / "config.json", bare)
    assert load(rows(tmp_path / "ids.jsonl", [row]), bare, samples=1).windows == ((BOS, *range(20, 40)),)


def test_chats_are_rendered_with_the_template_and_one_bos(tmp_path: Path, chat_model: Path) -> None:
    chat = [{"role": "user", "content": "Is the river frozen?"}, {"role": "assistant", "content": "It is."}]
    (window,) = load(rows(tmp_path / "chats.jsonl", [{"messages": chat}]), chat_model, samples=1, length=256).windows
    assert window.count(BOS) == 1
    assert load_tokenizer(chat_model).decode(window) == (
        "<bos><start_of_turn>user\nIs the river frozen?<end_of_turn>\n<start_of_turn>model\nIt is.<end_of_turn>\n")


def test_a_gzipped_file_gives_what_the_plain_one_gives(tmp_path: Path, base_model: Path) -> None:
    plain = rows(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    assert load(tmp_path / "packed.jsonl.gz", base_model).sha256 == load(plain, base_model).sha256
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes())[:-20])
    with pytest.raises(UsageError, match=r"cut\.jsonl\.gz can't be read"):
        load(tmp_path / "cut.jsonl.gz", base_model, samples=100)


def test_a_column_names_the_field_to_read(tmp_path: Path, base_model: Path) -> None:
    path = rows(tmp_path / "qa.jsonl", [{"question": text, "answer": "?"} for text in TEXTS])
    made = load(path, base_model, length=200, column="question")
    assert load_tokenizer(base_model).decode(made.windows[1][1:]) == TEXTS[1]
    with pytest.raises(UsageError, match="line 1: there is no 'text', only 'question', 'answer'"):
        load(path, base_model, column="text")


GOOD = {"text": TEXTS[0]}


@pytest.mark.parametrize(("line", "message"), [
    ('{"text": "x"', "this is no JSON"),
    ("\xff", "not UTF-8 text"),
    ("[1, 2]", "must be a JSON object"),
    ("null", "must be a JSON object"),
    ('{"text": 3}', "text must be a string, got 3"),
    ('{"txt": "x"}', "the keys are 'txt'; a row has one of: text, messages, token_ids"),
    ('{"text": "x", "label": 1}', "the keys are 'label', 'text'"),
    ("{}", "the keys are none"),
    ('{"token_ids": [2, 3]}', "this row has token_ids, the rows before it have text"),
    ('{"messages": [{"role": "user", "content": "x"}]}', "this row has messages, the rows before it have text"),
    ('{"text": "\\ud800"}', "can't be tokenized"),
])  # fmt: skip
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, base_model: Path, line: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes((json.dumps(GOOD) + "\n\n").encode() + line.encode("latin-1") + b"\n")
    with pytest.raises(UsageError, match=r"rows\.jsonl line 3:? .*?" + re.escape(message)):
        load(path, base_model, samples=9)


@pytest.mark.parametrize("ids", [[2, 512], [2, -1]])
def test_an_id_beyond_the_vocabulary_is_named_by_its_line(tmp_path: Path, base_model: Path, ids: list[int]) -> None:
    path = rows(tmp_path / "ids.jsonl", [{"token_ids": [2, 511]}, {"token_ids": ids}])
    with pytest.raises(UsageError, match=rf"ids\.jsonl line 2: token 1 has id {ids[1]}, .*ids 0 to 511"):
        load(path, base_model, samples=9)


def test_a_tokenizer_with_more_ids_than_the_model_is_found(tmp_path: Path, base_model: Path) -> None:
    model = shutil.copytree(base_model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    with pytest.raises(UsageError, match=r"line 1: token \d+ has id \d+, .*ids 0 to 299"):
        load(rows(tmp_path / "texts.jsonl", [GOOD]), model, samples=1)


# ---- too little data, unusable requests


@pytest.mark.parametrize("content", [b"", b"\n\n", b'{"text": ""}\n', b'{"text": "short"}\n'])
def test_an_empty_set_is_an_error(tmp_path: Path, base_model: Path, content: bytes) -> None:
    (tmp_path / "few.jsonl").write_bytes(content)
    with pytest.raises(UsageError, match="gives no window" if content.strip() else "nothing but white space"):
        load(tmp_path / "few.jsonl", base_model)


def test_an_empty_text_file_is_an_error(tmp_path: Path, base_model: Path) -> None:
    (tmp_path / "few.txt").write_bytes(b"")
    with pytest.raises(UsageError, match="nothing but white space"):
        load(tmp_path / "few.txt", base_model)


def test_too_short_a_set_says_how_many_windows_there_were(tmp_path: Path, base_model: Path) -> None:
    path = rows(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS[:2]])
    with pytest.raises(UsageError, match="gives 2 windows of up to 200 tokens, --samples asks for 3") as raised:
        load(path, base_model, length=200)
    assert "--samples" in raised.value.next_step
    assert "--pack" in raised.value.next_step


@pytest.mark.parametrize(("options", "message"), [
    ({"samples": 0}, "--samples 0"), ({"samples": -3}, "--samples -3"), ({"length": 1}, "--length 1"),
    ({"length": 4097}, "takes 2 to 4096 tokens"),
])  # fmt: skip
def test_samples_and_lengths_that_can_not_be_are_refused(tmp_path: Path, base_model: Path, options: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load(rows(tmp_path / "texts.jsonl", [GOOD]), base_model, **options)


@pytest.mark.parametrize(("spec", "message"), [
    ("missing.txt", "no calibration file missing.txt"), ("./data/missing.jsonl", "no calibration file"),
    ("data/missing.jsonl", "no calibration file"), ("wikitext", "neither self, nor a file"),
    ("", "neither self"), ("a/b/c", "neither self"),
])  # fmt: skip
def test_a_spec_that_names_nothing_is_refused(base_model: Path, spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load(spec, base_model)


def test_a_file_of_an_unknown_ending_is_refused(tmp_path: Path, base_model: Path) -> None:
    (tmp_path / "data.csv").write_text("a,b\n")
    with pytest.raises(UsageError, match=r"data\.csv has an unknown ending"):
        load(tmp_path / "data.csv", base_model)


# ---- data sets, through `datasets`


@pytest.fixture
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of parquet and no Hub: two columns, splits train and test."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "mill"
    folder.mkdir()
    datasets.Dataset.from_dict({"text": TEXTS, "year": list(range(12))}).to_parquet(folder / "train.parquet")
    datasets.Dataset.from_dict({"text": TEXTS[:1], "year": [0]}).to_parquet(folder / "test.parquet")
    return folder


def test_a_data_set_is_shuffled_by_the_seed_and_by_nothing_else(data_folder: Path, base_model: Path) -> None:
    options = {"length": 200, "samples": 12}
    once, again = load(data_folder, base_model, **options), load(data_folder, base_model, **options)
    other = load(data_folder, base_model, seed=1, **options)
    tokenizer = load_tokenizer(base_model)
    assert once == again
    assert once.windows != other.windows
    assert sorted(once.windows) == sorted(other.windows)
    assert sorted(tokenizer.decode(window[1:]) for window in once.windows) == sorted(TEXTS)
    described = {key: once.description[key] for key in ("kind", "name", "revision", "split", "column", "seed")}
    assert described == {"kind": "dataset", "name": "mill", "revision": None, "split": "train", "column": None, "seed": 0}


def test_the_split_and_the_column_are_chosen(data_folder: Path, base_model: Path) -> None:
    made = load(data_folder, base_model, split="test", column="text", samples=1, length=200)
    assert load_tokenizer(base_model).decode(made.windows[0][1:]) == TEXTS[0]


def test_arguments_of_another_row_s_call_are_not_written_as_null(data_folder: Path, chat_model: Path, tmp_path: Path) -> None:
    """Arrow gives every row all keys that any row has."""
    import datasets

    model, folder = tmp_path / "model", tmp_path / "calls"
    shutil.copytree(chat_model, model)
    (model / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.role }} {{ message.content or '' }}"
        "{% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )

    def row(arguments: dict[str, Any]) -> list[dict[str, Any]]:
        call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
        return [{"role": "user", "content": "Cold?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]

    folder.mkdir()
    datasets.Dataset.from_list([{"messages": row({"city": "Oslo"})}, {"messages": row({"place": {"zip": 7}})}]).to_parquet(folder / "train.parquet")
    made = load(folder, model, samples=2, length=200)
    texts = sorted(load_tokenizer(model).decode(window[1:]) for window in made.windows)
    assert [text[text.index("{"):] for text in texts] == ['{"city": "Oslo"}', '{"place": {"zip": 7}}']


@pytest.mark.parametrize(("options", "message"), [
    ({"split": "valid"}, "split 'valid'"), ({"column": "body"}, "no column 'body'"), ({"column": "year"}, r"mill row \d+: 'year' is \d+"),
    ({"samples": 20, "length": 200}, "gives 12 windows"),
])  # fmt: skip
def test_what_a_data_set_lacks_is_said(data_folder: Path, base_model: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load(data_folder, base_model, **options)


def test_a_data_set_of_several_known_columns_needs_a_choice(tmp_path: Path, base_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "both"
    folder.mkdir()
    rows(folder / "train.jsonl", [{"text": TEXTS[0], "input_ids": [2, *range(20, 60)]}])
    with pytest.raises(UsageError, match="several columns that could be meant") as raised:
        load(folder, base_model)
    assert "text, input_ids" in raised.value.next_step
    assert load(folder, base_model, column="input_ids", samples=1, length=64).windows == ((2, *range(20, 60)),)


def test_an_empty_folder_is_no_data_set(tmp_path: Path, base_model: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="data set empty"):
        load(tmp_path / "empty", base_model)


LOAD = """
import sys
from pathlib import Path
from gemq.calibration.sets import load_calibration
from gemq.errors import UsageError
try:
    load_calibration(sys.argv[1], model_dir=Path(sys.argv[2]), samples=1, length=32, seed=0)
except UsageError as error:
    print(error.message, "|", error.next_step)
"""


@pytest.mark.parametrize(("spec", "environment", "message"), [
    ("org/absent", {"HF_HUB_OFFLINE": "1"}, r"data set org/absent can't be reached and is not cached .*\| go online"),
    pytest.param("org/absent:small@main", {"HF_HUB_OFFLINE": "1"}, r"HF_HUB_OFFLINE is set, and what 'main' means .*\| name the full commit",
                 marks=pytest.mark.slow),
    pytest.param("org/absent", {"HF_ENDPOINT": "http://127.0.0.1:9"}, r"data set org/absent can't be reached on the Hub .*\| go online",
                 marks=pytest.mark.slow),
], ids=["offline", "offline with a branch", "unreachable"])  # fmt: skip
def test_a_hub_that_can_not_be_reached_is_an_error_with_a_way_out(tmp_path: Path, base_model: Path, spec: str, environment: dict[str, str],
                                                                 message: str) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run([sys.executable, "-c", LOAD, spec, str(base_model)], capture_output=True, text=True, timeout=300, check=False,
                          env=clean | environment | {"HF_HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert re.match(message, done.stdout), done.stdout


# The Hub itself can't be here: `datasets` and HfApi are replaced at the call, by what they are documented to return and raise.
COMMIT, OTHER = "a" * 40, "b" * 40


class Builder:
    def __init__(self, loaded: str) -> None:
        import datasets

        self.hash, self.config = loaded, datasets.BuilderConfig("small")

    def download_and_prepare(self) -> None:
        pass

    def as_dataset(self, split: str) -> Any:
        import datasets

        return datasets.Dataset.from_dict({"text": TEXTS})


@pytest.mark.parametrize(("spec", "asked"), [("org/mill:small@v1", ("org/mill", "small", "v1")), ("org/mill", ("org/mill", None, None))])
def test_a_hub_data_set_is_loaded_at_the_commit_that_its_revision_means(base_model: Path, monkeypatch: pytest.MonkeyPatch, spec: str,
                                                                      asked: tuple[str, str | None, str | None]) -> None:
    calls = []

    def load_builder(name: str, config: str | None, revision: str | None) -> Builder:
        calls.append((name, config, revision))
        return Builder(COMMIT)

    monkeypatch.setattr("datasets.load_dataset_builder", load_builder)
    monkeypatch.setattr(hub, "_resolve", lambda name, revision, offline: COMMIT if (name, revision) == (asked[0], asked[2]) else OTHER)
    made = load(spec, base_model, length=200)
    assert calls == [(asked[0], asked[1], COMMIT)]
    assert (made.description["name"], made.description["config"], made.description["revision"]) == ("org/mill", "small", COMMIT)


def test_another_revision_from_the_cache_is_not_taken_for_the_one_asked_for(base_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.load_dataset_builder", lambda name, config, revision: Builder(OTHER))
    monkeypatch.setattr(hub, "_resolve", lambda name, revision, offline: COMMIT)
    with pytest.raises(UsageError, match=f"at {COMMIT} can't be had, only {OTHER} is cached"):
        load(f"org/mill@{COMMIT}", base_model)


def test_a_private_or_absent_data_set_points_to_the_token(base_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def refuse(*_: object, **__: object) -> None:
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'org/mill' is a gated dataset on the Hub.")

    monkeypatch.setattr("datasets.load_dataset_builder", refuse)
    monkeypatch.setattr(hub, "_resolve", lambda name, revision, offline: COMMIT)
    with pytest.raises(UsageError, match="not on the Hub or not open to you") as raised:
        load("org/mill", base_model)
    assert "HF_TOKEN" in raised.value.next_step

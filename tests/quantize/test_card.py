"""The model card: what was measured, of this checkpoint, and nothing else; and how a sealed checkpoint gets another one."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from huggingface_hub import ModelCard
from sealed_checkpoint import copy_of, replace_file
from tests.models.gemma3 import build_gemma3_text
from tests.quantize.small_jobs import make_job
from typer.testing import CliRunner

from gemq import atomic
from gemq.commands import card as command
from gemq.errors import GemqError, IntegrityError, UsageError
from gemq.quantize.card import card_bytes, inherited_fields, joined, read_measured, rebound, summary
from gemq.quantize.content import directory_digest
from gemq.quantize.provenance import PROVENANCE_FILE
from gemq.quantize.run import quantize
from gemq.quantize.seal import REPORTS, SealedFile, check_seal, content_digest, read_seal, seal_digest

Document = dict[str, Any]
SOURCE_CARD = """---
license: gemma
license_link: https://ai.google.dev/gemma/terms
language: [en, de]
pipeline_tag: text-generation
model-index: [{name: x, results: []}]
base_model: org/other
widget: [{text: hello}]
---
# The source's card, not the checkpoint's
"""


def result(**changed: Any) -> Document:
    """What eval-ppl writes, as far as a card reads it."""
    estimate = {"value": 5.60634321, "standard_error": 0.123456789, "upper_95": 5.9}
    return {"kind": "ppl", "target": "out", "data": "/home/somebody/text.txt", "data_sha256": "ab" * 32, "dtype": "float32", "tokens": 900,
            "records": 3, "reference": "/home/somebody/source", "ppl": estimate, "reference_ppl": {**estimate, "value": 5.5},
            "ratio": {"value": 1.02, "standard_error": None, "upper_95": None}, "kl_nats": {**estimate, "value": 0.02}, "per_record": [1],
            **changed}  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(2)  # as in the tests themselves: threads are among what a result depends on
    made = build_gemma3_text(
        tmp_path_factory.mktemp("card") / "small", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]
    )
    (made / "README.md").write_text(SOURCE_CARD)
    return made


@pytest.fixture(scope="module")
def unmeasured(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantize(make_job(source, tmp_path_factory.mktemp("card") / "out", "w4a16-g32")).directory


@pytest.fixture(scope="module")
def measured(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    def measure(directory: Path) -> list[Document]:
        assert (directory / "config.json").is_file()  # whole but for card and seal
        assert not (directory / "gemq.seal.json").exists()
        return [summary(result(target_digest=directory_digest(directory), reference_digest=directory_digest(source), device="cpu"))]

    return quantize(make_job(source, tmp_path_factory.mktemp("card") / "out", "w4a16-g32"), measure).directory


def text_of(checkpoint: Path) -> str:
    return (checkpoint / "README.md").read_text()


# --- what is on it


def test_the_numbers_on_it_are_those_measured_and_those_of_the_manifest(measured: Path) -> None:
    text = text_of(measured)
    manifest = json.loads((measured / "gemq.json").read_text())
    for wanted in ("| text.txt | Perplexity | 5.60634 | 0.123457 | 5.9 | 900 | 3 |",
                   "| text.txt | Perplexity of the source | 5.5 | 0.123457 | 5.9 | 900 | 3 |",
                   "| text.txt | Perplexity, times the source's | 1.02 | – | – | 900 | 3 |",
                   "| text.txt | KL from the source, nats a token | 0.02 | 0.123457 | 5.9 | 900 | 3 |", f"- text.txt: SHA-256 `{'ab' * 32}`",
                   manifest["calibration"]["sha256"], "8 windows, 256 tokens", f"{manifest['bytes']['bits_per_decoder_weight']:.2f} bits",
                   f"Content digest: `{content_digest(read_seal(measured))}`"):  # fmt: skip
        assert wanted in text
    assert "/home/somebody" not in text + (measured / "measured.json").read_text()


def test_every_number_in_its_tables_is_in_the_files_that_it_tells_of(measured: Path) -> None:
    told = {f"{number:.6g}" for entry in read_measured(measured) for value in entry.values() if isinstance(value, dict)
            for number in value.values() if number is not None} | {"900", "3"}  # fmt: skip
    rows = [line.split("|")[3:-1] for line in text_of(measured).splitlines() if line.startswith("| text.txt")]
    assert len(rows) == 4
    assert {cell.strip() for row in rows for cell in row} - {"–"} <= told


def test_the_model_index_is_the_measurements(measured: Path) -> None:
    results = ModelCard(text_of(measured)).data.eval_results
    found = {entry.metric_type: entry for entry in results}
    assert {kind: entry.metric_value for kind, entry in found.items()} == {
        "perplexity": 5.60634, "perplexity_ratio": 1.02, "kl_divergence": 0.02}  # fmt: skip
    entry = found["perplexity"]
    assert (entry.dataset_name, entry.dataset_args) == ("text.txt", {"sha256": "ab" * 32})
    assert entry.metric_args == {"standard_error": 0.123457, "upper_95": 5.9, "tokens": 900, "records": 3, "dtype": "float32"}


def test_what_was_not_measured_is_not_on_it(unmeasured: Path) -> None:
    text = text_of(unmeasured)
    assert "Not measured." in text
    assert "model-index" not in text
    assert not re.search(r"perplexity \|", text, re.IGNORECASE)
    assert not (unmeasured / "measured.json").exists()


def test_licence_and_language_are_the_sources_and_nothing_else_is(unmeasured: Path) -> None:
    data = ModelCard(text_of(unmeasured)).data.to_dict()
    assert data["license"] == "gemma"
    assert data["language"] == ["en", "de"]
    assert data["pipeline_tag"] == "text-generation"
    assert {"widget", "model-index", "base_model"}.isdisjoint(data)  # a local directory is no model on the Hub
    assert "The source's card" not in text_of(unmeasured)


def test_a_source_on_the_hub_is_the_base_model(measured: Path) -> None:
    manifest = json.loads((measured / "gemq.json").read_text())
    manifest["source"] |= {"model": "google/gemma-3-270m", "revision": "a1" * 20}
    made = ModelCard(card_bytes(manifest, {"summary": "Short."}, read_seal(measured), [], {}).decode())
    assert (made.data.base_model, made.data.base_model_relation) == ("google/gemma-3-270m", "quantized")
    assert "a1" * 20 in made.text


@pytest.mark.parametrize("raw", [b"", b"---\n: :\n---\n", b"---\n- a\n---\n", b"\xff\xfe", b"---\nlicense: {a: 1}\nlanguage: [1]\n---\n"])
def test_a_source_card_that_can_not_be_read_passes_nothing_on(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "README.md").write_bytes(raw)
    assert inherited_fields(tmp_path / "README.md") == inherited_fields(tmp_path / "none") == {}


# --- the card and the seal


def test_measured_or_not_the_content_is_the_same_and_the_seal_is_not(measured: Path, unmeasured: Path) -> None:
    assert check_seal(measured) == check_seal(unmeasured) == []
    assert content_digest(read_seal(measured)) == content_digest(read_seal(unmeasured))
    assert seal_digest(measured) != seal_digest(unmeasured)
    assert {file.path for file in read_seal(measured)} >= {*REPORTS, PROVENANCE_FILE}


def test_a_changed_card_breaks_the_seal(measured: Path, tmp_path: Path) -> None:
    copy = copy_of(measured, tmp_path / "copy")
    replace_file(copy / "README.md", text_of(copy).replace("5.60634", "2.60634").encode())
    assert [difference.path for difference in check_seal(copy)] == ["README.md"]


# --- gemq card


def run(*arguments: object) -> tuple[Any, str]:
    app = typer.Typer()
    app.callback()(lambda: None)
    command.register(app)
    outcome = CliRunner().invoke(app, ["card", *map(str, arguments)])
    command.output.mode.json = False
    return outcome.exception, outcome.stdout


def write_result(path: Path, checkpoint: Path, **changed: Any) -> Path:
    """A result of the weights in `checkpoint`, as far as its digest says."""
    path.write_text(json.dumps(result(**{"target": str(checkpoint), "target_digest": directory_digest(checkpoint), **changed})))
    return path


def test_it_prints_the_card_that_is_there(measured: Path) -> None:
    error, out = run(measured)
    assert error is None
    assert out == text_of(measured)


def test_a_new_measurement_makes_a_new_checkpoint_and_leaves_the_old_one(measured: Path, tmp_path: Path) -> None:
    before = seal_digest(measured)
    more = write_result(tmp_path / "kl.json", measured, kind="kl", data="other.jsonl", data_sha256="cd" * 32)
    new = tmp_path / "new"
    error, out = run(measured, "--measured", more, "--output", new)
    assert error is None
    assert f"content {content_digest(read_seal(measured))}" in out
    assert f"seal {seal_digest(new)}" in out
    assert check_seal(new) == check_seal(measured) == []
    assert seal_digest(measured) == before != seal_digest(new)
    assert [entry["data"] for entry in read_measured(new)] == ["text.txt", "other.jsonl"]
    assert "other.jsonl | KL from the reference" in text_of(new)  # nothing says what it was
    assert "text.txt | Perplexity |" in text_of(new)
    assert "license: gemma" in text_of(new)
    assert os.stat(new / "model.safetensors").st_ino == os.stat(measured / "model.safetensors").st_ino


def test_without_links_files_are_copied(measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    error, _ = run(measured, "--output", tmp_path / "new")
    assert error is None
    assert check_seal(tmp_path / "new") == []
    assert seal_digest(tmp_path / "new") == seal_digest(measured)  # the same card: the same checkpoint


def test_the_old_checkpoints_permissions_stay_as_they_are(measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = copy_of(measured, tmp_path / "copy")
    os.chmod(copy / "config.json", 0o644)  # as a download makes it; another one is read-only already
    before = {path: path.stat().st_mode for path in copy.rglob("*")}
    whole = os.chmod

    def refuse(path: Any, *arguments: Any, **options: Any) -> None:
        if os.stat(path).st_nlink > 1:  # one file with the old checkpoint's, which may be another user's
            raise PermissionError(1, "Operation not permitted", str(path))
        whole(path, *arguments, **options)

    monkeypatch.setattr(os, "chmod", refuse)
    error, _ = run(copy, "--output", tmp_path / "new")
    assert error is None
    assert {path: path.stat().st_mode for path in copy.rglob("*")} == before
    assert os.stat(tmp_path / "new" / "config.json").st_mode & 0o777 == 0o444
    assert check_seal(tmp_path / "new") == check_seal(copy) == []


def test_a_measurement_on_the_same_data_takes_the_earlier_ones_place() -> None:
    first, again = summary(result()), summary(result(ppl={"value": 6.0, "standard_error": None, "upper_95": None}))
    other, elsewhere = summary(result(records=4)), summary(result(device="cuda NVIDIA H200"))
    assert joined([first, other, elsewhere], [again]) == [again, other, elsewhere]


def test_killed_while_it_writes_there_is_no_new_checkpoint(measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(name: str) -> None:
        if name == "sealed":
            raise KeyboardInterrupt

    monkeypatch.setattr(atomic, "on_write_point", stop)
    run(measured, "--output", tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
    assert check_seal(measured) == []


def test_a_checkpoint_that_was_changed_gets_no_new_seal(measured: Path, tmp_path: Path) -> None:
    copy = copy_of(measured, tmp_path / "copy")
    raw = bytearray((copy / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    replace_file(copy / "model.safetensors", bytes(raw))
    error, _ = run(copy, "--output", tmp_path / "new")
    assert isinstance(error, IntegrityError)
    assert not (tmp_path / "new").exists()


@pytest.fixture(scope="module")
def other_weights(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantize(make_job(source, tmp_path_factory.mktemp("card") / "out", "w8a16")).directory


def test_a_measurement_of_other_weights_is_refused_at_the_measured_path_too(measured: Path, other_weights: Path, tmp_path: Path) -> None:
    for path in (write_result(tmp_path / "ppl.json", other_weights),
                 write_result(tmp_path / "ppl.json", measured, target_digest=directory_digest(other_weights))):  # fmt: skip
        error, _ = run(measured, "--measured", path, "--output", tmp_path / "new")
        assert isinstance(error, UsageError)
        assert not (tmp_path / "new").exists()


def test_the_same_weights_under_another_path_are_accepted(measured: Path, tmp_path: Path) -> None:
    moved = copy_of(measured, tmp_path / "moved")
    error, out = run(moved, "--measured", write_result(tmp_path / "ppl.json", measured, data="other.txt", target="/nowhere"))
    assert error is None
    own, _, rest = out.partition("### ")
    assert "| other.txt | Perplexity |" in own
    assert "Unbound" not in rest


@pytest.mark.parametrize("changed", [{}, {"target": "http://127.0.0.1:8000"}])
def test_a_measurement_without_digest_is_unbound_and_not_of_these_weights(measured: Path, tmp_path: Path, changed: Document) -> None:
    path = write_result(tmp_path / "ppl.json", measured, data="old.txt", target_digest=None, **changed)
    error, _ = run(measured, "--measured", path, "--output", tmp_path / "new")
    assert error is None
    own, _, rest = text_of(tmp_path / "new").partition("### Unbound")
    assert "old.txt" not in own  # neither in the table nor in the model index
    assert "| old.txt | Perplexity |" in rest
    assert "Measured on these weights" in own
    assert "target_digest" not in read_measured(tmp_path / "new")[-1]


def test_a_reference_that_is_not_the_source_is_not_called_the_source(measured: Path, tmp_path: Path) -> None:
    assert "Perplexity of the source" in text_of(measured)
    error, out = run(measured, "--measured", write_result(tmp_path / "ppl.json", measured, data="other.txt", reference_digest="5" * 64))
    assert error is None
    assert "| other.txt | Perplexity of the reference |" in out
    assert "| other.txt | Perplexity of the source |" not in out
    assert "5" * 64 in out
    index = [(entry.dataset_name, entry.metric_type) for entry in ModelCard(out).data.eval_results]
    assert sorted(index) == [("other.txt", "perplexity"), ("text.txt", "kl_divergence"), ("text.txt", "perplexity"), ("text.txt", "perplexity_ratio")]


def test_the_source_is_the_source_whatever_else_is_stored_in_its_directory(source: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(source, tmp_path / "source"))
    (folder / "additional_chat_templates").mkdir()
    for name in ("train.py", "training_config.json", "adapter_model.safetensors", "notes.bin", "chat_template.jinja", "LICENSE",
                 "additional_chat_templates/tools.jinja", "words.tiktoken", "tekken.json"):  # fmt: skip
        (folder / name).write_text("{}")
    seen = []

    def measure(directory: Path) -> list[Document]:
        seen.append(directory_digest(directory))
        return [summary(result(target_digest=seen[0], reference_digest=directory_digest(folder), device="cpu"))]

    made = quantize(make_job(folder, tmp_path / "out", "w4a16-g32"), measure).directory
    text = text_of(made)
    assert "Perplexity of the source" in text
    assert "a reference is not the source" not in text
    assert {entry.metric_type for entry in ModelCard(text).data.eval_results} == {"perplexity", "perplexity_ratio", "kl_divergence"}
    assert [one["target_digest"] for one in read_measured(made)] == [directory_digest(made)] != seen


def test_what_quantize_measures_before_the_seal_has_the_sealed_content_digest(measured: Path) -> None:
    (made,) = read_measured(measured)
    assert made["target_digest"] == content_digest(read_seal(measured)) == directory_digest(measured)
    assert f"Content digest: `{made['target_digest']}`" in text_of(measured)


def test_a_search_that_adds_its_account_keeps_the_measurement_bound(measured: Path) -> None:
    """gemq.json changes, and the content digest with it; the model files are those that were measured."""
    files = read_seal(measured)
    others = [SealedFile(False, "gemq.json", "0" * 64, 1) if file.path == "gemq.json" else file for file in files]
    made, strange = read_measured(measured)[0], {**read_measured(measured)[0], "target_digest": "6" * 64}
    assert [one["target_digest"] for one in rebound([made, strange], others, content_digest(files))] == [content_digest(others), "6" * 64]
    assert rebound([made], others)[0]["target_digest"] == made["target_digest"] != content_digest(others)  # nothing says that it is the same


@pytest.mark.parametrize("changed", [
    {"target_digest": "AB" * 32}, {"target_digest": 1}, {"reference_digest": "x"}, {"device": "a\nb"},
    {"kind": "accuracy"}, {"kind": ["ppl"]}, {"ppl": None}, {"ppl": {"value": 1}}, {"ppl": {"value": "5", "standard_error": None, "upper_95": 1}},
    {"ppl": {"value": None, "standard_error": None, "upper_95": None}}, {"tokens": 0}, {"tokens": True}, {"records": "3"}, {"data": ""},
    {"data": "a | b"}, {"data": "`x`"}, {"data": "a\nb"}, {"data_sha256": "AB" * 32}, {"data_sha256": 1}, {"dtype": None},
    {"kl_nats": {"value": 1e999, "standard_error": None, "upper_95": None}}])  # fmt: skip
def test_what_is_no_measurement_is_refused(changed: Document) -> None:
    with pytest.raises(UsageError) as refused:
        summary(result(**changed))
    assert "\n" not in refused.value.message


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"measurements": [1], "version": 1}', b'{"measurements": [], "version": 2}', b"NaN",
                                 b'{"measurements": [{"kind": "ppl"}], "version": 1}'])  # fmt: skip
def test_measurements_that_no_gemq_wrote_are_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "measured.json").write_bytes(raw)
    with pytest.raises(IntegrityError):
        read_measured(tmp_path)


@pytest.mark.parametrize("raw", [b"", b"[1]", b"{", b"\xff"])
def test_a_result_file_that_is_none_is_one_sentence(measured: Path, tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "x.json").write_bytes(raw)
    error, _ = run(measured, "--measured", tmp_path / "x.json")
    assert isinstance(error, GemqError)
    assert error.exit_code == 2

"""The provenance of a checkpoint: the published form, the truth about the files, and nothing that differs between two runs."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from google.protobuf import json_format
from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.statement import Statement
from sealed_checkpoint import copy_of, replace_file
from tests.models.gemma3 import build_gemma3_text
from tests.quantize.small_jobs import run_job
from typer.testing import CliRunner

from gemq.commands import verify as verify_command
from gemq.errors import IntegrityError
from gemq.quantize.companions import companion_files
from gemq.quantize.provenance import (
    PROVENANCE_FILE,
    parse_statement,
    provenance_differences,
    read_statement,
    statement,
    statement_bytes,
)
from gemq.quantize.seal import SEAL_FILE, SealedFile, read_seal, write_seal
from gemq.source import file_hashes

Document = dict[str, Any]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_gemma3_text(
        tmp_path_factory.mktemp("provenance") / "small", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]
    )


@pytest.fixture(scope="module")
def checkpoint(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_job(source, tmp_path_factory.mktemp("provenance") / "out", "w4a16-g32").directory


@pytest.fixture(scope="module")
def document(checkpoint: Path) -> Document:
    found = read_statement(checkpoint)
    assert found is not None
    return found


# --- the published form, checked by rules written from the specifications (in-toto Statement v1, SLSA provenance v1)

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:[A-Za-z0-9\-._~:/?#\[\]@!$&'()*+,;=%]+")
_DIGESTS = {"sha256": r"[0-9a-f]{64}", "gitCommit": r"[0-9a-f]{40}"}
_DESCRIPTOR = {"name", "uri", "digest", "content", "downloadLocation", "mediaType", "annotations"}


def require(condition: object, what: str) -> None:
    if not condition:
        raise ValueError(what)


def require_keys(found: object, needed: set[str], optional: set[str], what: str) -> None:
    require(isinstance(found, dict), f"{what} is no object")
    require(needed <= set(found) <= needed | optional, f"{what} has the keys {sorted(found)}")  # type: ignore[call-overload]


def check_descriptor(found: Any, what: str) -> None:
    require_keys(found, set(), _DESCRIPTOR, what)
    require(set(found) & {"uri", "digest", "content"}, f"{what} has neither uri nor digest nor content")
    require(isinstance(found.get("name", ""), str), f"{what} has a name that is no text")
    require("uri" not in found or _URI.fullmatch(found["uri"]), f"{what} has an unsound uri")
    for algorithm, value in found.get("digest", {}).items():
        require(algorithm in _DIGESTS and re.fullmatch(_DIGESTS[algorithm], value), f"{what} has an unsound digest")
    require(isinstance(found.get("annotations", {}), dict), f"{what} has annotations that are no object")


def check_published_form(found: Any) -> None:
    require_keys(found, {"_type", "subject", "predicateType", "predicate"}, set(), "the statement")
    require(found["_type"] == "https://in-toto.io/Statement/v1", "_type")
    require(found["predicateType"] == "https://slsa.dev/provenance/v1", "predicateType")
    require(isinstance(found["subject"], list) and found["subject"], "subject")
    for subject in found["subject"]:
        check_descriptor(subject, "a subject")
        require(subject.get("digest") and subject.get("name"), "a subject without digest or name")
    names = [subject["name"] for subject in found["subject"]]
    require(len(set(names)) == len(names), "two subjects of one name")
    predicate = found["predicate"]
    require_keys(predicate, {"buildDefinition", "runDetails"}, set(), "the predicate")
    definition, details = predicate["buildDefinition"], predicate["runDetails"]
    require_keys(definition, {"buildType", "externalParameters"}, {"internalParameters", "resolvedDependencies"}, "buildDefinition")
    require(_URI.fullmatch(definition["buildType"]), "buildType")
    for key in ("externalParameters", "internalParameters"):
        require(isinstance(definition.get(key, {}), dict), key)
    for dependency in definition.get("resolvedDependencies", []):
        check_descriptor(dependency, "a dependency")
    require_keys(details, {"builder"}, {"metadata", "byproducts"}, "runDetails")
    require_keys(details["builder"], {"id"}, {"builderDependencies", "version"}, "the builder")
    require(_URI.fullmatch(details["builder"]["id"]), "the builder's id")
    require(all(isinstance(text, str) for pair in details["builder"].get("version", {}).items() for text in pair), "version")


def test_it_has_the_form_that_in_toto_and_slsa_publish(document: Document) -> None:
    check_published_form(document)


def test_the_check_of_the_form_would_notice(document: Document) -> None:
    def broken(change: Callable[[Document], object]) -> Document:
        made = copy.deepcopy(document)
        change(made)
        return made

    definition = ("predicate", "buildDefinition")
    for change in (
        lambda d: d.pop("subject"), lambda d: d.update(more=1), lambda d: d.update(subject=[]), lambda d: d.update(_type="x"),
        lambda d: d["subject"][0].pop("digest"), lambda d: d["subject"][0]["digest"].update(sha256="0"),
        lambda d: d["subject"].append(d["subject"][0]),
        lambda d: d["predicate"].pop("runDetails"), lambda d: d[definition[0]][definition[1]].update(buildType="no uri"),
        lambda d: d[definition[0]][definition[1]]["resolvedDependencies"].append({"name": "x"}),
        lambda d: d["predicate"]["runDetails"]["builder"].update(version={"gemq": 1}),
    ):  # fmt: skip
        with pytest.raises(ValueError):
            check_published_form(broken(change))


def test_in_totos_own_library_reads_it_and_knows_every_field(checkpoint: Path, document: Document) -> None:
    read = json_format.Parse((checkpoint / PROVENANCE_FILE).read_text(), statement_pb2.Statement())
    Statement.copy_from_pb(read).validate()
    provenance = json_format.ParseDict(document["predicate"], provenance_pb2.Provenance())
    assert provenance.build_definition.build_type == "urn:gemq:quantize:v1"
    assert len(provenance.build_definition.resolved_dependencies) == len(document["predicate"]["buildDefinition"]["resolvedDependencies"])
    assert provenance.run_details.builder.version["gemq"]


# --- the truth


def test_subjects_are_all_files_but_seal_and_reports_and_itself(checkpoint: Path, document: Document) -> None:
    hashes = file_hashes(checkpoint)
    expected = {path: digest for path, digest in hashes.items() if path not in (SEAL_FILE, PROVENANCE_FILE, "README.md", "measured.json")}
    assert {subject["name"]: subject["digest"]["sha256"] for subject in document["subject"]} == expected
    assert "model.safetensors" in expected
    assert provenance_differences(checkpoint, read_seal(checkpoint)) == []


def test_it_names_what_went_in(source: Path, checkpoint: Path, document: Document) -> None:
    definition = document["predicate"]["buildDefinition"]
    told = {entry["name"]: entry["digest"]["sha256"] for entry in definition["resolvedDependencies"]}
    manifest = json.loads((checkpoint / "gemq.json").read_text())
    assert told == {**file_hashes(source), "calibration": manifest["calibration"]["sha256"]}
    given = definition["externalParameters"]
    assert (given["model"], given["seed"], given["device"], given["recipe"]["name"]) == (source.name, 0, "cpu", "w4a16-g32")
    assert given["calibration"] == {"kind": "test", "samples": 8, "tokens": 256}
    assert document["predicate"]["runDetails"]["builder"]["version"] == manifest["versions"]


def test_nothing_in_it_is_of_this_machine_or_this_hour(source: Path, checkpoint: Path) -> None:
    text = (checkpoint / PROVENANCE_FILE).read_text() + (checkpoint / "gemq.json").read_text() + (checkpoint / "README.md").read_text()
    assert str(source.parent) not in text
    assert str(checkpoint) not in text
    assert not re.search(r"\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d", text)


def test_a_source_on_the_hub_and_a_data_set_are_named_by_their_commits() -> None:
    commit, revision = "a1" * 20, "b2" * 20
    manifest = {
        "source": {"model": "google/gemma-4-E4B-it", "revision": commit, "files": {"model 1.safetensors": "0" * 64}},
        "calibration": {"sha256": "1" * 64, "kind": "dataset", "name": "org/set", "revision": revision, "samples": 1, "tokens": 2},
        "seed": 0, "device": "cuda", "threads": None, "versions": {"gemq": "1"},
    }  # fmt: skip
    made = statement([SealedFile(False, "config.json", "2" * 64, 1)], manifest, {"name": "w4a16"})
    check_published_form(made)
    dependencies = made["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert dependencies[0]["uri"] == f"pkg:huggingface/google/gemma-4-E4B-it@{commit}#model%201.safetensors"
    assert dependencies[-1] == {"name": "org/set", "digest": {"gitCommit": revision}}


# --- a reader that checks it


def resealed(checkpoint: Path, to: Path, change: Callable[[Document, Path], object]) -> list[str]:
    """What is wrong with a copy whose provenance was changed and that was sealed again, as a forger would."""
    directory = copy_of(checkpoint, to)
    document = json.loads((directory / PROVENANCE_FILE).read_text())
    change(document, directory)
    replace_file(directory / PROVENANCE_FILE, statement_bytes(document))
    write_seal(directory)
    return [str(difference) for difference in provenance_differences(directory, read_seal(directory))]


@pytest.mark.parametrize(("change", "said"), [
    (lambda d, _: d["subject"].pop(), "is not among the subjects"),
    (lambda d, _: d["subject"].append({"name": "x", "digest": {"sha256": "0" * 64}}), "lists x, which is not in the seal"),
    (lambda d, _: d["subject"].append(d["subject"][0]), "twice"),
    (lambda d, _: d["subject"][0]["digest"].update(sha256="0" * 64), "is not what provenance.intoto.json tells of"),
    (lambda d, directory: replace_file(directory / "config.json", b"{}"), "config.json: is not what"),
    (lambda d, _: d["predicate"]["buildDefinition"]["resolvedDependencies"].pop(0), "does not name chat_template.jinja as gemq.json does"),
    (lambda d, _: d["predicate"]["buildDefinition"]["resolvedDependencies"].pop(), "does not name calibration as"),
    (lambda d, _: d["predicate"]["buildDefinition"]["externalParameters"]["recipe"].update(name="w8a16"), "another recipe"),
    (lambda d, directory: replace_file(directory / "recipe.yaml", b"{"), "is no YAML"),
    (lambda d, directory: replace_file(directory / "gemq.json", b"{}"), "tells of a source"),
    (lambda d, directory: replace_file(directory / "gemq.json", b"{"), "can't be read as JSON"),
    (lambda d, _: d.update(predicateType="https://slsa.dev/provenance/v0.2"), "predicateType"),
    (lambda d, _: d["predicate"].pop("runDetails"), "is no provenance that gemq wrote"),
])  # fmt: skip
def test_what_is_not_true_is_named(checkpoint: Path, tmp_path: Path, change: Callable[[Document, Path], object], said: str) -> None:
    assert any(said in problem for problem in resealed(checkpoint, tmp_path / "copy", change))


def test_a_pipe_in_its_place_is_refused_and_not_waited_for(checkpoint: Path, tmp_path: Path) -> None:
    directory = copy_of(checkpoint, tmp_path / "copy")
    (directory / PROVENANCE_FILE).unlink()
    os.mkfifo(directory / PROVENANCE_FILE)
    assert "no regular file" in str(provenance_differences(directory, read_seal(directory))[0])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "gemq.json", PROVENANCE_FILE])
@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_verify_ends_whatever_lies_where_a_file_should(checkpoint: Path, source: Path, tmp_path: Path, name: str, kind: str) -> None:
    directory = copy_of(checkpoint, tmp_path / "copy")
    (directory / name).unlink()
    os.mkfifo(directory / name) if kind == "pipe" else (directory / name).symlink_to("/dev/zero")
    app = typer.Typer()
    app.callback()(lambda: None)
    verify_command.register(app)
    ended = CliRunner().invoke(app, ["verify", str(directory), "--source", str(source), "--json"])
    verify_command.output.mode.json = False
    assert isinstance(ended.exception, IntegrityError)
    assert name in {difference["path"] for difference in json.loads(ended.stdout)["differences"]}


@pytest.mark.parametrize("raw", [b"", b"null", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"_type":1,"_type":1}'])
def test_what_is_no_statement_is_refused(raw: bytes) -> None:
    with pytest.raises(IntegrityError):
        parse_statement(raw)


def test_a_sources_own_provenance_card_and_measurements_are_not_taken_over(source: Path, tmp_path: Path) -> None:
    for name in (PROVENANCE_FILE, "README.md", "measured.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    assert list(map(str, companion_files(tmp_path))) == ["tokenizer.json"]

"""Every command that reads a model refuses an output among that model's files, before it does any work, and leaves the files alone."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from tests.models.gemma3 import build_gemma3_text
from tests.quantize.small_jobs import run_job
from typer.testing import CliRunner

from gemq.cli import app
from gemq.errors import UsageError
from gemq.eval.decoded import DecodeRecord, ids_sha256, write_decoded
from gemq.source import default_name


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_gemma3_text(tmp_path_factory.mktemp("places") / "model", num_hidden_layers=1, layer_types=["full_attention"])


@pytest.fixture(scope="module")
def checkpoint(model: Path) -> Path:
    torch.set_num_threads(1)
    return run_job(model, model.parent / "checkpoint", "w8a16").directory


@pytest.fixture(scope="module")
def records(model: Path) -> Path:
    file = model.parent / "records.jsonl"
    file.write_text(json.dumps({"id": "a", "context_token_ids": [2], "target_token_ids": [9, 10, 11]}) + "\n")
    return file


@pytest.fixture(scope="module")
def decoded(model: Path) -> Path:
    file = model.parent / "decoded.jsonl"
    write_decoded(file, [DecodeRecord("a", ids_sha256((2, 5)), (2, 5), (7, 8), ids_sha256((7, 8)))])
    return file


COMMANDS = [
    ["quantize", "MODEL", "--recipe", "w8a16", "--eval-data", "none", "--output", "MODEL/out"],
    ["quantize", "MODEL", "--recipe", "w8a16", "--eval-data", "none", "--output", "MODEL/../model/out"],
    ["quantize", "MODEL", "--recipe", "w8a16", "--eval-data", "none", "--output", "LINK/out"],
    ["quantize", "MODEL", "--recipe", "w4a16-g32", "--kl-budget", "0.1", "--output", "OUTSIDE", "--search-state", "MODEL/state"],
    ["pareto", "MODEL", "--output", "MODEL/out"],
    ["pareto", "MODEL", "--output", "OUTSIDE", "--search-state", "MODEL/state"],
    ["eval-ppl", "MODEL", "--data", "RECORDS", "--output", "MODEL/out.json"],
    ["eval-ppl", "CHECKPOINT", "--reference", "MODEL", "--data", "RECORDS", "--output", "MODEL/out.json"],
    ["eval-kl", "CHECKPOINT", "--reference", "MODEL", "--data", "RECORDS", "--output", "CHECKPOINT/out.json"],
    ["eval-kl", "MODEL", "--record", "MODEL/out.jsonl", "--data", "RECORDS"],
    ["eval-greedy", "MODEL", "--reference", "MODEL", "--output", "MODEL/out"],
    ["eval-greedy", "DECODED", "--reference", "DECODED", "--output", "CHECKPOINT/out"],
    ["eval-greedy", "DECODED", "--reference", "MODEL", "--output", "MODEL/out"],
    ["eval-greedy", "CHECKPOINT", "--reference", "MODEL", "--output", "MODEL/out"],
    ["eval-accuracy", "http://127.0.0.1:9", "--data", "RECORDS", "--reference", "MODEL", "--output", "MODEL/out.json"],
    ["eval-accuracy", "http://127.0.0.1:9", "--data", "RECORDS", "--tokenizer", "MODEL", "--output", "MODEL/out.json"],
    ["rehearse", "CHECKPOINT", "--arena", "efficient-gemma", "--no-isolate", "--reference", "MODEL", "--output", "MODEL/out"],
    ["eval-kl", "CHECKPOINT", "--record", "MODEL/out.jsonl", "--tokenizer", "MODEL", "--data", "RECORDS"],
    ["serve", "CHECKPOINT", "--log", "CHECKPOINT/out.log"],
    ["sign", "CHECKPOINT", "--key", "RECORDS", "--output", "CHECKPOINT/out.sig"],
    ["bench", "MODEL", "--output", "MODEL/out"],
    ["card", "CHECKPOINT", "--output", "CHECKPOINT/out"],
    ["package", "CHECKPOINT", "--arena", "efficient-gemma", "--output", "CHECKPOINT/out"],
    ["report", "CHECKPOINT", "--output", "CHECKPOINT/out"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=[" ".join([line[0], line[-2], line[-1]]) for line in COMMANDS])
def test_it_is_refused(model, checkpoint, records, decoded, tmp_path, command):
    (tmp_path / "link").symlink_to(model)
    places = {"MODEL": model, "LINK": tmp_path / "link", "CHECKPOINT": checkpoint, "OUTSIDE": tmp_path / "out", "RECORDS": records,
              "DECODED": decoded}
    arguments = []
    for word in command:
        name, _, rest = word.partition("/")
        arguments.append(f"{places[name]}{'/' if rest else ''}{rest}" if name in places else word)
    before = {place: sorted(os.listdir(place)) for place in (model, checkpoint, model.parent)}
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, UsageError), (result.exception, result.output)
    assert "inside" in result.exception.message
    assert {place: sorted(os.listdir(place)) for place in (model, checkpoint, model.parent)} == before
    assert list(tmp_path.iterdir()) == [tmp_path / "link"]


def everything(root: Path) -> list[tuple[str, object]]:
    return sorted((str(path), path.is_file() and (path.read_bytes(), path.stat().st_mode)) for path in root.rglob("*"))


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_source_that_is_named_as_the_partial_directory_is_kept(model, tmp_path, resume):
    source = shutil.copytree(model, tmp_path / "x.partial")
    before = everything(tmp_path)
    for options in (["--resume", resume], ["--dry-run"]):
        refused = CliRunner().invoke(app, ["quantize", str(source), "--recipe", "w8a16", "--eval-data", "none", "-o", str(tmp_path / "x"), *options])
        assert isinstance(refused.exception, UsageError), refused.exception
    assert everything(tmp_path) == before


@pytest.mark.parametrize("resume", ["auto", "never", "required"])
@pytest.mark.parametrize("to", ["folder", "model", "file", "nowhere"])
def test_a_link_at_the_place_of_the_partial_directory_is_refused_and_kept(model, tmp_path, to, resume):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "out.partial").symlink_to(model if to == "model" else tmp_path / to)
    before = everything(tmp_path), everything(model)
    arguments = ["quantize", str(model), "--recipe", "w8a16", "--eval-data", "none", "-o", str(tmp_path / "out"), "--resume", resume]
    refused = CliRunner().invoke(app, arguments).exception
    assert isinstance(refused, UsageError), refused
    assert (everything(tmp_path), everything(model)) == before
    assert (tmp_path / "out.partial").is_symlink()


def test_without_an_output_in_the_model_s_directory_one_is_named_that_works(model, monkeypatch):
    monkeypatch.chdir(model)
    arguments = ["quantize", ".", "--recipe", "w8a16", "--eval-data", "none"]
    before = sorted(os.listdir(model))
    refused = CliRunner().invoke(app, arguments).exception
    assert isinstance(refused, UsageError)
    assert sorted(os.listdir(model)) == before
    option, place = refused.next_step.split()[-2:]
    assert (option, place) == ("--output", "../model-w8a16")
    assert CliRunner().invoke(app, [*arguments, option, place]).exit_code == 0
    assert (model.parent / "model-w8a16").is_dir()
    assert sorted(os.listdir(model)) == before


@pytest.mark.parametrize("named", [".", "", "../model", "./", "x/.."])
def test_the_default_name_is_the_directory_s(tmp_path, monkeypatch, named):
    (tmp_path / "model" / "x").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "model")
    assert default_name(named, "w8a16") == "model-w8a16"
    assert default_name("../..", "w8a16") == f"{tmp_path.parent.name}-w8a16"
    assert default_name("org/name", "w8a16") == "name-w8a16"

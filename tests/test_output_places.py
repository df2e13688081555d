"""Every command that reads a model refuses an output among that model's files, before it does any work, and leaves the files alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from tests.models.gemma3 import build_gemma3_text
from tests.quantize.small_jobs import run_job
from typer.testing import CliRunner

from gemq.cli import app
from gemq.errors import UsageError
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
    ["bench", "MODEL", "--output", "MODEL/out"],
    ["card", "CHECKPOINT", "--output", "CHECKPOINT/out"],
    ["package", "CHECKPOINT", "--arena", "efficient-gemma", "--output", "CHECKPOINT/out"],
    ["report", "CHECKPOINT", "--output", "CHECKPOINT/out"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=[" ".join([line[0], line[-2], line[-1]]) for line in COMMANDS])
def test_it_is_refused(model, checkpoint, records, tmp_path, command):
    (tmp_path / "link").symlink_to(model)
    places = {"MODEL": model, "LINK": tmp_path / "link", "CHECKPOINT": checkpoint, "OUTSIDE": tmp_path / "out", "RECORDS": records}
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

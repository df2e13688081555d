"""What a dry run says of memory on a GPU, beside what was measured there (docs/benchmarks.md)."""

from __future__ import annotations

import json

import pytest
from tests.models.real_configs import real_config
from typer.testing import CliRunner

from gemq import devices
from gemq.cli import app
from gemq.errors import UsageError
from gemq.quantize import estimate as room
from gemq.quantize.plan import make_plan
from gemq.quantize.skeleton import load_skeleton
from gemq.recipes.model import load_recipe

GIB = 1 << 30


@pytest.fixture(scope="module")
def e4b(tmp_path_factory):
    """E4B's text model as benchmarks/gpu.py makes it, its config alone."""
    folder = tmp_path_factory.mktemp("e4b")
    text = real_config("e4b")["text_config"] | {"architectures": ["Gemma4ForCausalLM"], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(text))
    return folder


@pytest.mark.parametrize(
    ("recipe", "given", "host", "card"),
    [
        ("w4a16", None, 3.53, 6.70), ("w4a16", 4, 5.01, 3.81), ("w4a16-fast", None, 3.83, 6.72), ("fp8", None, 1.67, 0.92),
        ("w4a16-best", None, 5.36, 8.04), ("w4a16-best", 60, 2.12, 20.94),
    ],
)  # fmt: skip
def test_memory_on_a_gpu_is_foretold_as_it_was_measured_on_an_h200(e4b, recipe, given, host, card):
    plan = make_plan(load_skeleton(e4b)[0], load_recipe(recipe))
    memory, taken = room.gpu_bytes(plan, 128 * 2048, 2048, None if given is None else given * GIB)
    assert memory / GIB == pytest.approx(host, rel=0.1)
    assert taken / GIB >= 0.99 * card
    assert taken <= max(GIB, (given or 8) * GIB)


def test_what_a_recipe_needs_that_keeps_both_models_within_layers_is_said(e4b):
    plan = make_plan(load_skeleton(e4b)[0], load_recipe("w4a16-tuned"))
    assert 36 * GIB < room.gpu_bytes(plan, 128 * 2048, 2048, None)[1] < 80 * GIB
    with pytest.raises(UsageError, match=r"2\.0GiB is too little"):
        room.gpu_bytes(plan, 128 * 2048, 2048, 2 * GIB)


def test_a_recipe_that_is_held_to_nothing_is_not_refused_for_the_default_s_sake(tmp_path):
    """The largest unit of 31B alone takes more than 8 GiB to solve: what is held to that is refused, what is not gets its forecast."""
    (tmp_path / "config.json").write_text(json.dumps(real_config("31b")))
    skeleton = load_skeleton(tmp_path)[0]
    with pytest.raises(UsageError, match=r"8\.0GiB is too little"):
        room.gpu_bytes(make_plan(skeleton, load_recipe("w4a16-best")), 65536, 512, None)
    assert room.gpu_bytes(make_plan(skeleton, load_recipe("w4a16-tuned")), 65536, 512, None)[1] > 8 * GIB


def test_a_dry_run_says_what_it_takes_of_a_gpu_and_what_of_memory(e4b, monkeypatch):
    monkeypatch.setattr(devices, "choose", lambda device: device)
    monkeypatch.setattr(room, "_matmul_rate", lambda device: 2e13)
    command = ["quantize", str(e4b), "--recipe", "w4a16", "--device", "cuda", "--length", "2048", "--dry-run"]
    ended = CliRunner().invoke(app, command)
    assert ended.exit_code == 0, ended.output
    assert "this machine     about 3.89 GB of memory and at most 8.59 GB of the GPU, " in ended.output
    found = json.loads(CliRunner().invoke(app, [*command, "--gpu-memory", "4GiB", "--json"]).stdout)["expected"]
    assert found["device_bytes"] == 4 * GIB
    assert found["memory_bytes"] == pytest.approx(5.0 * GIB, rel=0.02)
    refused = CliRunner().invoke(app, [*command, "--gpu-memory", "2GiB"])
    assert isinstance(refused.exception, UsageError)
    assert "give at least" in refused.exception.next_step

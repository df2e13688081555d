"""The same command gives the same seal: twice, and killed twice on the way, on real weights and on a Gemma 4 with its towers."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tests.models.first_layers import save_first_layers
from tests.models.gemma4 import build_gemma4
from tests.quantize.crash_child import Ended, run_command

from gemq.quantize.card import read_measured
from gemq.quantize.content import directory_digest
from gemq.quantize.provenance import provenance_differences
from gemq.quantize.seal import check_seal, content_digest, read_seal, seal_digest

VOCABULARY = {"first layers of the demo model": 4096, "small Gemma 4": 512}


@pytest.fixture(scope="module", params=[pytest.param("first layers of the demo model", marks=pytest.mark.slow), "small Gemma 4"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("determinism")
    if request.param == "small Gemma 4":
        made = build_gemma4(folder / "source")
    else:
        made = save_first_layers(request.getfixturevalue("demo_model"), folder / "source", layers=2, vocabulary=4096)
    draw = random.Random(11)
    ids = [[draw.randrange(20, VOCABULARY[request.param]) for _ in range(31)] for _ in range(12)]
    (folder / "calibration.jsonl").write_text("".join(json.dumps({"token_ids": [2, *row]}) + "\n" for row in ids[:8]))
    records = ({"id": f"r{number}", "context_token_ids": [2], "target_token_ids": row} for number, row in enumerate(ids[8:]))
    (folder / "held-out.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return made


def quantize(source: Path, out: Path, die_at: str = "", nth: int = 1) -> Ended:
    """One command, as a user gives it, card and measurements included."""
    return run_command(
        "quantize", source, "--recipe", "w4a16-g32", "--calibration", source.parent / "calibration.jsonl", "--samples", 8, "--length", 32,
        "--eval-data", source.parent / "held-out.jsonl", "--device", "cpu", "--output", out, "--json", die_at=die_at, nth=nth,
    )  # fmt: skip


@pytest.fixture(scope="module")
def first(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("first") / "out"
    ended = quantize(source, out)
    assert ended.code == 0, ended.stderr
    assert ended.seal == seal_digest(out)
    return out


def test_the_checkpoint_is_sealed_measured_and_tells_where_it_comes_from(source: Path, first: Path) -> None:
    assert check_seal(first) == []
    assert provenance_differences(first, read_seal(first)) == []
    assert [(made["kind"], made["data"], made["records"]) for made in read_measured(first)] == [("ppl", "held-out.jsonl", 4)]
    assert content_digest(read_seal(first)) in (first / "README.md").read_text()
    (made,) = read_measured(first)
    assert (made["target_digest"], made["reference_digest"]) == (content_digest(read_seal(first)), directory_digest(source))
    assert "Measured on these weights" in (first / "README.md").read_text()


def test_the_same_command_twice_gives_the_same_seal(source: Path, first: Path, tmp_path: Path) -> None:
    again = quantize(source, tmp_path / "again")
    assert again.code == 0, again.stderr
    assert read_seal(tmp_path / "again") == read_seal(first)
    assert again.seal == seal_digest(first)


def test_killed_in_a_layer_and_again_between_card_and_seal_it_gives_the_same_seal(source: Path, first: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for point, nth in (("written:layers.1.mlp.down_proj", 1), ("file-written:README.md", 1)):
        killed = quantize(source, out, point, nth)
        assert killed.code == -9, killed.stderr
        assert not out.exists()
    ended = quantize(source, out)
    assert ended.code == 0, ended.stderr
    assert "going on with" in ended.stderr
    assert read_seal(out) == read_seal(first)
    assert ended.seal == seal_digest(first)

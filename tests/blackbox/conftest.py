"""Small sources and data, made once a process, and the command that is tested."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tests.blackbox.command import Gemq
from tests.models.gemma3 import build_gemma3_text

VOCABULARY = 512


@pytest.fixture
def gemq(tmp_path: Path) -> Gemq:
    """The command, in an empty working folder and with an empty home."""
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    return Gemq(home, work)


@pytest.fixture
def work(gemq: Gemq) -> Path:
    """The folder that commands run in."""
    return gemq.cwd


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text-only Gemma 3 of two layers in bfloat16, one file, tied."""
    out = tmp_path_factory.mktemp("sources") / "plain"
    return build_gemma3_text(out, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])


@pytest.fixture(scope="session")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight windows of 32 token ids."""
    draw = random.Random(1)
    path = tmp_path_factory.mktemp("calibration") / "calibration.jsonl"
    rows = [{"token_ids": [2] + [draw.randrange(16, VOCABULARY) for _ in range(31)]} for _ in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen token records to measure on."""
    draw = random.Random(2)
    path = tmp_path_factory.mktemp("records") / "records.jsonl"
    rows = [
        {"id": f"r{number}", "context_token_ids": [2] + [draw.randrange(16, VOCABULARY) for _ in range(7)],
         "target_token_ids": [draw.randrange(16, VOCABULARY) for _ in range(24)]}
        for number in range(16)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def options(calibration: Path) -> list[str]:
    """What a fast `gemq quantize` needs: few windows, no measurement afterwards."""
    return ["--recipe", "w4a16-g32", "--calibration", str(calibration), "--samples", "8", "--length", "32", "--eval-data", "none"]

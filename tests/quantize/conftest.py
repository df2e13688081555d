"""Small models that the quantize room's tests share; each is built once a session and never written to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.models.gemma3 import build_gemma3_multimodal, build_gemma3_text


@pytest.fixture(autouse=True)
def _same_threads() -> None:
    torch.set_num_threads(2)


@pytest.fixture(scope="session")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_gemma3_text(tmp_path_factory.mktemp("models") / "gemma3")


@pytest.fixture(scope="session")
def gemma3_multimodal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_gemma3_multimodal(tmp_path_factory.mktemp("models") / "gemma3-multimodal", legacy_names=True, max_shard_bytes=200_000)

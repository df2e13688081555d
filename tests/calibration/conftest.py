"""Small models with random weights, built once: a base model, a chat model, a multimodal one."""

from __future__ import annotations

from pathlib import Path

import pytest
from models.gemma3 import build_gemma3_multimodal, build_gemma3_text


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text-only Gemma 3 with a chat template; its turns end with id 5."""
    return build_gemma3_text(tmp_path_factory.mktemp("models") / "chat")


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without a chat template."""
    made = build_gemma3_text(tmp_path_factory.mktemp("models") / "base")
    (made / "chat_template.jinja").unlink()
    return made


@pytest.fixture(scope="session")
def multimodal_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 3 with a vision tower and a chat template."""
    return build_gemma3_multimodal(tmp_path_factory.mktemp("models") / "multimodal")

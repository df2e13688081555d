"""A stand-in for vLLM that starts in a moment, and the real one where `make serve-env` has put it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_vllm import FAKE_ENGINE, GemqServe, seal
from recipe_texts import INT4_AND_INT8

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="session")
def fake_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH in which the stand-in is the package vllm, said to be built for CPUs."""
    site = tmp_path_factory.mktemp("site")
    package = site / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (package, *list(package.parents)[:2]):
        (folder / "__init__.py").write_text("")
    (package / "api_server.py").write_text(FAKE_ENGINE)
    (site / "vllm-0.0.dist-info").mkdir()
    (site / "vllm-0.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.0+cpu\n")
    for folder in (site.parent, site):
        folder.chmod(0o755)
    return site


@pytest.fixture
def fake_python(fake_site: Path, tmp_path: Path) -> Path:
    """An interpreter that finds the stand-in: what `--python` would point to."""
    folder = tmp_path / "fake-env" / "bin"
    folder.mkdir(parents=True)
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={fake_site} exec "{sys.executable}" "$@"\n')
    script.chmod(0o755)
    return script


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder that looks like a sealed checkpoint."""
    folder = tmp_path / "checkpoint"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text('{"text_config": {"max_position_embeddings": 4096}}')
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    (folder / "sub" / "extra.txt").write_text("x")
    seal(folder)
    return folder


@pytest.fixture
def gemq_serve(tmp_path: Path) -> Iterator[Callable[..., GemqServe]]:
    """Start `gemq serve`; whatever the test leaves running is killed."""
    started: list[GemqServe] = []

    def start(*arguments: str | Path, **options: dict[str, str]) -> GemqServe:
        started.append(GemqServe(*arguments, cwd=tmp_path, **options))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait(10)


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The Python of the environment with the real vLLM: GEMQ_VLLM_PYTHON, as for gemq serve, or what `make serve-env` made."""
    if os.environ.get("GEMQ_VLLM_PYTHON"):
        return Path(os.environ["GEMQ_VLLM_PYTHON"])
    python = ROOT / ".venv-vllm" / "bin" / "python"
    if not (ROOT / ".venv-vllm" / "gemq-serve-env.json").exists():
        if os.environ.get("CI") == "true":
            pytest.fail(".venv-vllm is missing, and CI must not pass without a real vLLM: run make serve-env")
        pytest.skip("no .venv-vllm here: run make serve-env")
    return python


@pytest.fixture(scope="session")
def small_gemma4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Gemma 4 with its three towers."""
    from models.gemma4 import build_gemma4

    return build_gemma4(tmp_path_factory.mktemp("models") / "gemma4-small")


@pytest.fixture(scope="session")
def gemq() -> Callable[..., None]:
    """The command line in this process, which has imported already what takes a new one many seconds; an error is raised as it is."""
    from gemq.cli import app

    return lambda *arguments: app([str(argument) for argument in arguments], standalone_mode=False)


@pytest.fixture(scope="session")
def quantized(gemq: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small trained Gemma 4 in int4, with its PLE linears in int8: every packed format that a recipe writes."""
    folder = tmp_path_factory.mktemp("quantized")
    (folder / "recipe.yaml").write_text(INT4_AND_INT8)
    tiny = ROOT / "tests" / "models" / "gemma4-tiny"
    gemq("quantize", tiny, "--recipe", folder / "recipe.yaml", "--eval-data", "none", "--output", folder / "gemma4-int4")
    return folder / "gemma4-int4"


def pytest_configure(config: pytest.Config) -> None:
    """Tests that start the real vLLM carry a mark, so that a quick run can leave them out."""
    config.addinivalue_line("markers", "vllm: starts the real vLLM of .venv-vllm (about a minute a start)")

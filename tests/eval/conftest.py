"""Small Gemma 3 models with random weights, their tokenizer, and token records."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest
import torch
import typer
from click.testing import Result
from small import random_records, save_fp8, save_gptq, save_int4, save_model, write_records
from typer.testing import CliRunner

from gemq import output

Run = Callable[..., Result]


class Registers(Protocol):
    """A module of commands."""

    def register(self, app: typer.Typer) -> None: ...


@pytest.fixture
def command_line() -> Iterator[Callable[..., Run]]:
    """A function that turns a module of commands into one that calls them, with `before` in front of the arguments.

    A gemq error comes back as the result's `exception`, as the program's main function sees it.
    """

    def made(commands: Registers, *before: object) -> Run:
        app = typer.Typer()
        app.callback()(lambda: None)
        commands.register(app)

        def call(*arguments: object) -> Result:
            output.mode.json = False
            return CliRunner().invoke(app, [str(argument) for argument in (*before, *arguments)])

        return call

    yield made
    output.mode.json = False


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Gemma 3 text model in bf16 with a byte-level tokenizer."""
    return save_model(tmp_path_factory.mktemp("source"), seed=0)


@pytest.fixture(scope="session")
def worse(tmp_path_factory: pytest.TempPathFactory, source: Path) -> Path:
    """The source with noise on its weights."""
    return save_model(tmp_path_factory.mktemp("worse"), seed=0, noise=0.03)


@pytest.fixture(scope="session")
def multimodal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Gemma 3 with a vision tower."""
    return save_model(tmp_path_factory.mktemp("multimodal"), seed=1, vision=True)


@pytest.fixture(scope="session")
def int4(tmp_path_factory: pytest.TempPathFactory, source: Path) -> Path:
    """The source as compressed-tensors pack-quantized int4, groups of 32."""
    return save_int4(source, tmp_path_factory.mktemp("int4"))


@pytest.fixture(scope="session")
def fp8(tmp_path_factory: pytest.TempPathFactory, source: Path) -> Path:
    """The source as compressed-tensors fp8 with dynamic per-token activations."""
    return save_fp8(source, tmp_path_factory.mktemp("fp8"))


@pytest.fixture(scope="session")
def gptq(tmp_path_factory: pytest.TempPathFactory, source: Path) -> Path:
    """The source in the AutoGPTQ format, int4, groups of 32, permuted groups."""
    return save_gptq(source, tmp_path_factory.mktemp("gptq"))


@pytest.fixture(scope="session")
def records_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve token records of the arena's kind."""
    return write_records(tmp_path_factory.mktemp("records") / "records.jsonl", random_records(12))


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """A few lines of text, about 700 bytes."""
    path = tmp_path / "text.txt"
    path.write_text("\n".join(f"Line {n}: the quick brown fox, {n * n} times over; ünïcode too." for n in range(12)), encoding="utf-8")
    return path


@pytest.fixture
def bad_line(tmp_path: Path):  # type: ignore[no-untyped-def]
    """A function that writes a file of two good records and a bad third line, and returns its path."""

    def write(third: str) -> Path:
        path = tmp_path / "bad.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in random_records(2)) + third + "\n", encoding="utf-8")
        return path

    return write


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # small matrices on a busy machine: two threads would wait for each other



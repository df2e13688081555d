"""The workflow in docs/ci.md does what it says, step by step, with a stand-in for gemq: its order, its exit codes, nothing left running."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
STAND_IN = """#!/bin/sh
echo "$@" >> called
if test "$1" = serve; then
  test -e codes/serve && exit "$(cat codes/serve)"
  trap 'echo ended >> called; exit 0' TERM
  echo '{"url": "http://127.0.0.1:8000/v1"}'
  while :; do sleep 0.1; done
fi
test -e "codes/$1" || exit 0
code=$(head -n 1 "codes/$1")
sed -i 1d "codes/$1"
exit "${code:-0}"
"""


def workflow() -> dict[str, Any]:
    text = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
    (found,) = re.findall(r"^```yaml\n(.*?)^```$", text, re.M | re.S)
    document: dict[str, Any] = yaml.safe_load(found)
    return document


STEPS = [step for step in workflow()["jobs"]["checkpoint"]["steps"] if "name" in step and "run" in step]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A folder with the Makefile and an environment that looks complete, in which gemq is the stand-in."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / "codes").mkdir()
    gemq = tmp_path / ".venv" / "bin" / "gemq"
    gemq.write_text(STAND_IN)
    gemq.chmod(0o755)
    (tmp_path / ".venv" / "ready").touch()
    return tmp_path


def run(repository: Path, name: str, **codes: str) -> tuple[int, list[str]]:
    """The exit code of the step whose name begins with `name`, run as GitHub does, and how it called gemq; `codes` are the calls' ends."""
    for command, ends in codes.items():
        (repository / "codes" / command.replace("_", "-")).write_text("\n".join(ends.split(",")) + "\n")
    (step,) = (step for step in STEPS if step["name"].startswith(name))
    document = workflow()
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", **{key: str(value) for key, value in document["env"].items()}}
    done = subprocess.run(["bash", "-e", "-c", step["run"]], cwd=repository, env=environment, capture_output=True, text=True, timeout=60)
    return done.returncode, (repository / "called").read_text().splitlines()


def test_every_step_calls_gemq_as_it_should_and_succeeds(repository: Path) -> None:
    ends = [run(repository, name)[0] for name in ("quantize", "hold it", "package", "serve")]
    assert ends == [0, 0, 0, 0]
    assert (repository / "called").read_text().splitlines() == [
        "quantize gemma-3-270m --recipe w4a16-g32 --output out/checkpoint",
        "eval-ppl out/checkpoint --reference out/cache/gemma-3-270m --data data/evaluation.txt --budget 5% --records 32 --output ppl.json",
        "package out/checkpoint --arena efficient-gemma --output out/package --force --measured ppl.json",
        "serve out/package --port 8000 --json",
        "check http://127.0.0.1:8000 --modality text",
        "ended",
    ]


def test_a_quantization_that_stopped_safely_goes_on(repository: Path) -> None:
    assert (code := run(repository, "quantize", quantize="75,75,0"))[0] == 0
    assert len(code[1]) == 3
    assert run(repository, "quantize", quantize="75,75,75")[0] == 75
    assert run(repository, "quantize", quantize="4,0")[0] == 4


def test_a_checkpoint_over_budget_ends_the_job_with_3(repository: Path) -> None:
    assert run(repository, "hold it", eval_ppl="3")[0] == 3


@pytest.mark.slow
def test_an_endpoint_that_breaks_the_contract_ends_the_job_with_4_and_the_server_too(repository: Path) -> None:
    code, called = run(repository, "serve", check="4")
    assert code == 4
    assert called[-1] == "ended"


def test_a_server_that_does_not_start_ends_the_job(repository: Path) -> None:
    code, called = run(repository, "serve", serve="4")
    assert code == 4
    assert called == ["serve out/package --port 8000 --json"]


def test_the_commands_take_the_options_of_the_workflow() -> None:
    from typer.testing import CliRunner

    from gemq.cli import app

    runner = CliRunner()
    for command, options in {"quantize": ("--recipe", "--output"), "eval-ppl": ("--reference", "--data", "--budget", "--records", "--output"),
                             "package": ("--arena", "--output", "--force", "--measured"), "serve": ("--port", "--json"),
                             "check": ("--modality",)}.items():  # fmt: skip
        text = runner.invoke(app, [command, "--help"], env={"COLUMNS": "200"}).stdout
        assert [option for option in options if option not in text] == []

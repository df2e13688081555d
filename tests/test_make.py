"""The targets for a user's CI call the commands that they name, fail where those fail, and keep the command's own exit code."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CALLS = {
    "quantize": (("MODEL=some/model", "RECIPE=fp8", "CHECKPOINT=c"), "quantize some/model --recipe fp8 --output c"),
    "eval-ppl": (("CHECKPOINT=c", "REFERENCE=s", "DATA=d.jsonl", "BUDGET=3%"), "eval-ppl c --reference s --data d.jsonl --budget 3%"),
    "package": (("CHECKPOINT=c", "ARENA=lowbarena", "OPTIONS=--repo a/b --revision 0123"),
                "package c --arena lowbarena --output c-lowbarena --repo a/b --revision 0123"),
    "check": (("URL=http://127.0.0.1:8123", "OPTIONS=--modality text"), "check http://127.0.0.1:8123 --modality text"),
}  # fmt: skip


def make(folder: Path, code: int, target: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a target with a stand-in for gemq that notes how it was called and exits with `code`."""
    stand_in = folder / "gemq"
    stand_in.write_text(f'#!/bin/sh\necho "$@" > "{folder}/called"\nexit {code}\n')
    stand_in.chmod(0o755)
    return subprocess.run(["make", "-s", "-C", ROOT, target, f"GEMQ={stand_in}", "READY=", *options], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("target", CALLS)
def test_a_target_calls_its_command_and_succeeds_with_it(target: str, tmp_path: Path) -> None:
    options, called = CALLS[target]
    done = make(tmp_path, 0, target, *options, f"EXIT_CODE={tmp_path / 'code'}")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "called").read_text().strip() == called
    assert (tmp_path / "code").read_text() == "0\n"


@pytest.mark.parametrize("target", CALLS)
@pytest.mark.parametrize("code", [1, 2, 3, 4, 75, 130])
def test_a_failure_fails_make_and_the_commands_own_code_is_kept(target: str, code: int, tmp_path: Path) -> None:
    """GNU make itself exits 2 for every failure; it prints the code, and EXIT_CODE keeps it."""
    kept = tmp_path / "code"
    kept.write_text("stale")
    done = make(tmp_path, code, target, *CALLS[target][0], f"EXIT_CODE={kept}")
    assert done.returncode == 2
    assert f"Error {code}" in done.stderr
    assert kept.read_text() == f"{code}\n"
    assert make(tmp_path, code, target, *CALLS[target][0]).returncode == 2


def test_a_make_that_never_reached_the_command_leaves_no_stale_code(tmp_path: Path) -> None:
    kept = tmp_path / "code"
    kept.write_text("0\n")
    done = subprocess.run(["make", "-s", "-C", ROOT, "package", f"VENV={tmp_path / 'none'}", "PYTHON=false", "GEMQ=false", f"EXIT_CODE={kept}"],
                          capture_output=True, text=True, timeout=60)  # fmt: skip
    assert done.returncode == 2
    assert "gemq needs Python 3.11 or newer" in done.stdout
    assert not kept.exists()

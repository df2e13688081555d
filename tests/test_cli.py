"""The command's exit code stays what was decided, whatever signal comes while the process ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys
from gemq import cli
sys.argv = ["gemq", *sys.argv[1:]]
code = cli.run()
os.kill(os.getpid(), getattr(signal, os.environ["SENT"]))
sys.exit(code)
"""


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["verify", "nowhere"], 2), (["no-such-command"], 2)])
def test_a_signal_after_the_end_changes_no_exit_code(number: str, arguments: list[str], code: int) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], env={"SENT": number}, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr

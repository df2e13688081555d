"""A child process that quantizes and kills itself at a named write point.

Children are forked from a server that has imported torch and transformers once: each is a process of its own, dies a real death, and starts
in milliseconds.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["transformers.models.gemma3.modeling_gemma3", "gemq.quantize.run", "tests.quantize.small_jobs"])


@dataclass(frozen=True)
class Ended:
    """How a child ended: its exit code (negative: the signal), the seal if it got that far, the points it passed, its stderr."""

    code: int | None
    seal: str
    points: list[str]
    stderr: str


def run_child(
    source: Path, out: Path, recipe: str, *, die_at: str = "", nth: int = 1, resume: str = "auto", before: Callable[[], None] | None = None
) -> Ended:
    """Quantize `source` into `out` in a child that dies at the `nth` passage of the write point `die_at`."""
    return _end_of(_quantize_job, (source, out, recipe, resume), die_at, nth, before)


def run_command(*arguments: object, die_at: str = "", nth: int = 1) -> Ended:
    """Run `gemq ARGUMENTS` in a child that dies at the `nth` passage of the write point `die_at`; its seal is what --json printed."""
    return _end_of(_command, tuple(map(str, arguments)), die_at, nth, None)


def _end_of(work: Callable[..., str], arguments: tuple[Any, ...], die_at: str, nth: int, before: Callable[[], None] | None) -> Ended:
    with tempfile.TemporaryDirectory() as folder:
        process = _CONTEXT.Process(target=_die_at, args=(folder, work, arguments, die_at, nth, before))
        process.start()
        process.join(240)
        if process.is_alive():
            process.kill()
            raise TimeoutError(f"the child hung; its stderr: {(Path(folder) / 'stderr').read_text()}")
        lines = (Path(folder) / "points").read_text().splitlines()
        seal = lines.pop().removeprefix("seal ") if lines and lines[-1].startswith("seal ") else ""
        return Ended(process.exitcode, seal, lines, (Path(folder) / "stderr").read_text())


def limit_file_size() -> None:
    """Make the kernel refuse every byte beyond 60,000 of a file."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))


def obey_modes() -> None:
    """Take root's powers over files from this process, so that it may write what any owner may: Linux's capset(2), all capabilities dropped."""
    import ctypes

    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None, use_errno=True).capset(header, none):
        raise OSError(ctypes.get_errno(), "capset")


def wait_in_the_middle(folder: str) -> None:
    """Make the run of this process stop in its first layer until there is a file `go` in `folder`; `waiting` tells that it does."""
    import time

    from gemq.quantize import run as quantize_run

    plain = quantize_run._Run._solve_unit

    def waiting(*arguments: Any) -> Any:
        Path(folder, "waiting").touch()
        while not Path(folder, "go").exists():
            time.sleep(0.02)
        return plain(*arguments)

    quantize_run._Run._solve_unit = waiting  # type: ignore[method-assign]


def _die_at(
    folder: str, work: Callable[..., str], arguments: tuple[Any, ...], die_at: str, nth: int, before: Callable[[], None] | None
) -> None:
    import torch

    from gemq import atomic, output
    from gemq.errors import GemqError

    torch.set_num_threads(1)
    os.dup2(os.open(f"{folder}/stderr", os.O_WRONLY | os.O_CREAT), 2)
    output.mode.quiet = False
    points = open(f"{folder}/points", "w", buffering=1)  # noqa: SIM115 - closed by the death of the process
    seen: list[str] = []

    def pass_point(name: str) -> None:
        seen.append(name)
        points.write(name + "\n")
        if name == die_at and seen.count(name) == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    if before is not None:
        before()
    atomic.on_write_point = pass_point
    try:
        seal = work(*arguments)
    except GemqError as error:
        sys.stderr.write(f"{type(error).__name__}: {error.message}\n")
        sys.stderr.flush()
        os._exit(error.exit_code)
    points.write(f"seal {seal}\n")


def _quantize_job(source: Path, out: Path, recipe: str, resume: str) -> str:
    from tests.quantize.small_jobs import run_job

    return run_job(source, out, recipe, measured=True, resume=resume).seal


def _command(*arguments: str) -> str:
    from gemq.cli import app

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        app(list(arguments), standalone_mode=False)
    return str(json.loads(printed.getvalue())["seal"])

"""A child process that quantizes and kills itself at a named write point.

Children are forked from a server that has imported torch and transformers once: each is a process of its own, dies a real death, and starts
in milliseconds.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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
    with tempfile.TemporaryDirectory() as folder:
        process = _CONTEXT.Process(target=_quantize, args=(folder, source, out, recipe, die_at, nth, resume, before))
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


def _quantize(
    folder: str, source: Path, out: Path, recipe: str, die_at: str, nth: int, resume: str, before: Callable[[], None] | None
) -> None:
    import torch
    from tests.quantize.small_jobs import run_job

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
        outcome = run_job(source, out, recipe, resume=resume)
    except GemqError as error:
        sys.stderr.write(f"{type(error).__name__}: {error.message}\n")
        sys.stderr.flush()
        os._exit(error.exit_code)
    points.write(f"seal {outcome.seal}\n")

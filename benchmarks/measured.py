"""A whole command, measured from outside: wall time and the largest resident memory of its process."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from datetime import date
from pathlib import Path


@dataclass(frozen=True)
class Run:
    """Seconds of wall time, peak resident bytes."""

    seconds: float
    peak_bytes: int


def ended(command: list[str], log: Path, cores: Collection[int] | None = None) -> tuple[int, Run]:
    """Run `command` to whatever end it comes to, its output into `log`: its exit code, and what it took. It keeps to `cores` if some are given."""
    environment, pin = None, list[str]()
    if cores:
        environment = os.environ | {"OMP_NUM_THREADS": str(len(cores)), "MKL_NUM_THREADS": str(len(cores))}
        pin = ["taskset", "--cpu-list", ",".join(map(str, sorted(cores)))]
    started = time.monotonic()
    with open(log, "ab") as file:
        process = subprocess.Popen([*pin, *command], stdout=file, stderr=file, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, Run(time.monotonic() - started, usage.ru_maxrss * 1024)


def run(command: list[str], log: Path, cores: Collection[int] | None = None) -> Run:
    """Run `command` to its end, its output into `log`; raises RuntimeError if it fails."""
    code, taken = ended(command, log, cores)
    if code:
        raise RuntimeError(f"{' '.join(command)} ended with {code}; the end of {log}:\n{log.read_text()[-2000:]}")
    return taken


def machine() -> str:
    """One line: date, processor, cores, memory, versions."""
    from importlib.metadata import PackageNotFoundError, version

    def named(package: str) -> str:
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            return f"no {package}"

    model = next(
        (line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "?"
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    flags = Path("/proc/cpuinfo").read_text()
    width = "AVX-512" if "avx512f" in flags else "AVX2"
    packages = ", ".join(map(named, ("gemq", "llmcompressor", "compressed-tensors", "transformers", "torch")))
    return (
        f"{date.today().isoformat()}, {model} ({width}{', AMX' if 'amx_bf16' in flags else ''}), {os.cpu_count()} cores, {memory:.0f} GiB, "
        f"Python {platform.python_version()}, {packages}"
    )


def gemq(*arguments: object) -> list[str]:
    """A gemq command line of this environment."""
    return [sys.executable, "-m", "gemq", *map(str, arguments)]


def peer(*arguments: object) -> list[str]:
    """A llm-compressor run of this environment."""
    return [sys.executable, "-m", "benchmarks.llmcompressor_oneshot", *map(str, arguments)]


def autoround(*arguments: object) -> list[str]:
    """An AutoRound run of this environment."""
    return [sys.executable, "-m", "benchmarks.autoround_peer", *map(str, arguments)]

"""A whole command, measured from outside: wall time and the largest resident memory of its process."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path


@dataclass(frozen=True)
class Run:
    """Seconds of wall time, peak resident bytes."""

    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Place:
    """Where a command runs: on `cores`, such as 0-3 (all of them if None), and on the GPU of the number `gpu` or on none."""

    cores: str | None = None
    gpu: str | None = None

    @classmethod
    def parse(cls, text: str) -> Place:
        """CORES, or CORES@GPU. Raises ValueError for anything else."""
        found = re.fullmatch(r"((\d+)(?:-(\d+))?)(?:@(\d+))?", text)
        if found is None or int(found[3] or found[2]) < int(found[2]):
            raise ValueError(f"{text!r} is not CORES or CORES@GPU, such as 0-3 or 0-3@0")
        return cls(found[1], found[4])

    def command(self, command: list[str]) -> list[str]:
        """`command`, kept to the cores."""
        return command if self.cores is None else ["taskset", "--cpu-list", self.cores, *command]

    def environment(self) -> dict[str, str]:
        """This process's environment with as many threads as there are cores, and with that GPU in sight alone."""
        made = {**os.environ, "CUDA_VISIBLE_DEVICES": self.gpu or ""}
        if self.cores is not None:
            first, _, last = self.cores.partition("-")
            count = str(int(last or first) - int(first) + 1)
            made |= {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count}
        return made


def ended(command: list[str], log: Path, place: Place | None = None) -> tuple[int, Run]:
    """Run `command` to whatever end it comes to, its output into `log`: its exit code, and what it took. It keeps to `place` if one is given."""
    environment = None
    if place is not None:
        command, environment = place.command(command), place.environment()
    started = time.monotonic()
    with open(log, "ab") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, Run(time.monotonic() - started, usage.ru_maxrss * 1024)


def run(command: list[str], log: Path, place: Place | None = None) -> Run:
    """Run `command` to its end, its output into `log`; raises RuntimeError if it fails."""
    code, taken = ended(command, log, place)
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

"""Memory of a server's processes over time, polled beside a measurement: on its GPUs through NVML, or resident where there is none."""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.5  # LowBArena's


def processes_below(pid: int) -> set[int]:
    """`pid` and every process that descends from it, as far as /proc shows them."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while True:
        more = {child for child, parent in parents.items() if parent in found} - found
        if not more:
            return found
        found |= more


def resident_bytes(pids: set[int]) -> int:
    """Proportional set size of `pids`, summed (shared pages count once), or their resident size where the kernel hides the former."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError, StopIteration):
            try:
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                total += 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])
            except OSError:
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                total += 1024 * int(next(line for line in lines if line.startswith("VmRSS:")).split()[1])
    return total


class MemoryWatch:
    """Samples [(seconds, bytes)] of what `pid` and its descendants hold, every half second while the block runs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.samples: list[tuple[float, int]] = []
        self._nvml, self._devices = _nvml()
        self.kind = "GPU memory of the server's processes" if self._devices else "resident memory of the server's processes"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._started = time.monotonic()

    @property
    def peak_bytes(self) -> int | None:
        return max((count for _, count in self.samples), default=None)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            pids = processes_below(self.pid)
            held = self._gpu_bytes(pids) if self._devices else resident_bytes(pids)
            self.samples.append((time.monotonic() - self._started, held))
            if self._stop.wait(POLL_SECONDS):
                return

    def _gpu_bytes(self, pids: set[int]) -> int:
        total = 0
        for device in self._devices:
            for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(device):
                # in a container of its own the driver may show other ids: then nothing matches, and all of the device counts
                if process.pid in pids and process.usedGpuMemory:
                    total += process.usedGpuMemory
        return total or sum(self._nvml.nvmlDeviceGetMemoryInfo(device).used for device in self._devices)


def _nvml() -> tuple[Any, list[Any]]:
    try:
        pynvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None, []
    try:
        pynvml.nvmlInit()
        return pynvml, [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return None, []

"""Memory of a server's processes over time, polled beside a measurement: on its GPUs through NVML, or resident where there is none.

LowBArena counts weights, reservations, and the KV blocks that requests held; not those that vLLM preallocated and never used. On a GPU the unused
ones are taken off, by what vLLM's /metrics says of its cache; in a host's resident memory they never were, since no page of them was touched.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import signal
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from gemq.http_client import open_client

POLL_SECONDS = 0.5  # LowBArena's
CAP_SHARE, CAP_ROOM_BYTES = 1.02, 512 * 1024**2  # a second serving may hold 2% more, and a CUDA context (or what three interpreters differ by)
_GIB = 1024**3
_WEIGHTS = re.compile(r"Model loading took ([0-9.]+) GiB")
_KV_CACHE = re.compile(r"Available KV cache memory: ([0-9.]+) GiB")


@dataclass(frozen=True)
class Holdings:
    """What a server held at its most, in bytes; None where this machine or this server doesn't tell.

    `peak_bytes` leaves out the KV blocks that were never used, `with_preallocated_bytes` does not; `reservations_bytes` is the latter less
    weights and preallocated KV cache.
    """

    kind: str
    peak_bytes: int
    with_preallocated_bytes: int
    weights_bytes: int | None
    reservations_bytes: int | None
    kv_preallocated_bytes: int | None
    kv_used_bytes: int | None
    kv_used_share: float | None
    preemptions: int | None

    def to_json(self) -> dict[str, Any]:
        """The holdings as JSON types."""
        return asdict(self)


def read_metrics(text: str) -> tuple[float | None, int | None, int | None]:
    """What vLLM's /metrics says: the KV cache's share in use, its bytes, preemptions so far; None for what is not there."""
    def values(name: str) -> list[float]:
        return [float(found) for found in re.findall(rf"^{name}(?:{{[^}}]*}})? ([0-9.eE+-]+)$", text, re.MULTILINE)]

    used, stopped = values("vllm:kv_cache_usage_perc"), values("vllm:num_preemptions_total")
    told = [int(found) for found in re.findall(r'^vllm:cache_config_info{[^}]*kv_cache_memory_bytes="(\d+)"', text, re.MULTILINE)]
    return max(used, default=None), sum(told) or None, int(sum(stopped)) if stopped else None


def kv_cache_tokens(base_url: str) -> int | None:
    """How many tokens the KV cache of the endpoint at `base_url` holds; None where it doesn't tell."""
    try:
        with open_client(base_url.removesuffix("/v1"), timeout=10) as client:
            answer = client.get("/metrics")
    except httpx.HTTPError:
        return None
    told = re.findall(r'^vllm:cache_config_info{[^}]*kv_cache_size_tokens="(\d+)"', answer.text, re.MULTILINE)
    return sum(map(int, told)) or None


def cap_of(peak_bytes: float) -> int:
    """The hard cap under which a solution that peaked at `peak_bytes` is served again."""
    return int(peak_bytes * CAP_SHARE) + CAP_ROOM_BYTES


def gpu_total_bytes() -> int | None:
    """The memory of this machine's first GPU; None where NVML shows none."""
    nvml, devices = _nvml()
    return int(nvml.nvmlDeviceGetMemoryInfo(devices[0]).total) if devices else None


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


def _logged(log: Path) -> tuple[int | None, int | None]:
    """Bytes of weights and of preallocated KV cache, which vLLM logs in GiB once it is up, summed over its workers; None where it doesn't."""
    text = ""
    with contextlib.suppress(OSError):
        text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    weights, cache = (sum(map(float, what.findall(text))) for what in (_WEIGHTS, _KV_CACHE))
    return int(weights * _GIB) or None, int(cache * _GIB) or None


class MemoryWatch:
    """Samples [(seconds, bytes)] of what `pid` and its descendants hold, every half second while the block runs.

    `base_url` is where its /metrics are; its log is what its standard output goes to. With `limit_bytes` the processes are killed as soon as a
    sample is above it, and `exceeded` is that sample.
    """

    def __init__(self, pid: int, base_url: str | None = None, limit_bytes: int | None = None) -> None:
        self.pid = pid
        self.samples: list[tuple[float, int]] = []
        self.exceeded: tuple[float, int] | None = None
        self._metrics = None if base_url is None else base_url.removesuffix("/v1") + "/metrics"
        self._limit = limit_bytes
        self._weights, self._kv_logged = _logged(Path(f"/proc/{pid}/fd/1"))
        self._kv_share: float | None = None
        self._kv_bytes: int | None = None
        self._preemptions: list[int] = []
        self._nvml, self._devices = _nvml()
        self.kind = "GPU memory of the server's processes" if self._devices else "resident memory of the server's processes"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._started = time.monotonic()

    @property
    def peak_bytes(self) -> int | None:
        """The most that was held, without KV blocks that were never used; None before the first sample."""
        return max((count - self._unused(count) for _, count in self.samples), default=None)

    def _unused(self, held: int) -> int:
        if not self._devices or self._kv_bytes is None or self._kv_share is None:
            return 0
        return min(held, int(self._kv_bytes * (1 - self._kv_share)))

    @property
    def holdings(self) -> Holdings | None:
        """What was held at the most, by kind; None before the first sample."""
        peak = self.peak_bytes
        if peak is None:
            return None
        most = max(count for _, count in self.samples)
        weights = self._weights
        kept = None if weights is None or self._kv_bytes is None or not self._devices else max(0, most - weights - self._kv_bytes)
        used = None if self._kv_bytes is None or self._kv_share is None else int(self._kv_bytes * self._kv_share)
        stops = self._preemptions[-1] - self._preemptions[0] if self._preemptions else None
        return Holdings(self.kind, peak, most, weights, kept, self._kv_bytes, used, self._kv_share, stops)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        with open_client(self._metrics or "http://127.0.0.1", timeout=POLL_SECONDS) as client:
            while True:
                pids = processes_below(self.pid)
                held = self._gpu_bytes(pids) if self._devices else resident_bytes(pids)
                self._ask(client)
                self.samples.append((time.monotonic() - self._started, held))
                if self._limit is not None and held - self._unused(held) > self._limit:
                    self.exceeded = self.samples[-1]
                    for pid in pids:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                    return
                if self._stop.wait(POLL_SECONDS):
                    return

    def _ask(self, client: httpx.Client) -> None:
        if self._metrics is None:
            return
        try:
            answer = client.get(self._metrics)
        except httpx.HTTPError:
            return  # it is busy, or about to end: the next look tells
        if answer.status_code != 200:
            self._metrics = None  # no vLLM's
            return
        share, size, stops = read_metrics(answer.text)
        if share is not None:
            self._kv_share = max(self._kv_share or 0.0, share)
        self._kv_bytes = self._kv_bytes or size or self._kv_logged
        if stops is not None:
            self._preemptions.append(stops)

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

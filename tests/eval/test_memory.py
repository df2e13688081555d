"""Memory of a server over time: what vLLM's metrics say, unused KV blocks left out on a GPU, a cap that is enforced."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmarks.stub_server import Engine, StubServer

from gemq.eval import memory
from gemq.eval.memory import MemoryWatch, cap_of, processes_below, read_metrics, resident_bytes

MIB = 1024**2
METRICS = """
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
vllm:kv_cache_usage_perc{engine="0",model_name="small"} 0.125
vllm:kv_cache_usage_perc{engine="1",model_name="small"} 0.25
vllm:num_preemptions_total{engine="0",model_name="small"} 2.0
vllm:num_preemptions_total{engine="1",model_name="small"} 1.0
vllm:num_preemptions_created{engine="0",model_name="small"} 1.796e+09
vllm:cache_config_info{block_size="16",engine="0",kv_cache_memory_bytes="1000",num_gpu_blocks="7"} 1.0
vllm:cache_config_info{block_size="16",engine="1",kv_cache_memory_bytes="1000",num_gpu_blocks="7"} 1.0
"""


def test_what_metrics_say() -> None:
    assert read_metrics(METRICS) == (0.25, 2000, 3)
    assert read_metrics("") == (None, None, None)
    assert read_metrics('vllm:cache_config_info{kv_cache_memory_bytes="None"} 1.0\n') == (None, None, None)


class Nvml:
    """A GPU of 1,000 MiB whose server holds 800, 100 of them weights and 500 of them a KV cache."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def nvmlDeviceGetComputeRunningProcesses(self, device: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=self.pid, usedGpuMemory=800 * MIB), SimpleNamespace(pid=1, usedGpuMemory=100 * MIB)]


def test_unused_kv_blocks_are_left_out_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    log.write_text("INFO Model loading took 0.1 GiB memory and 3.2 seconds\nINFO Available KV cache memory: 0.5 GiB\n")
    with open(log, "a") as sink, subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE, stdout=sink) as process:
        monkeypatch.setattr(memory, "_nvml", lambda: (Nvml(process.pid), ["GPU 0"]))
        with StubServer(Engine()) as server:
            server.completions = 200  # the stub says that a fifth of its cache is in use
            with MemoryWatch(process.pid, f"{server.url}/v1") as watch:
                time.sleep(0.2)
        process.communicate(b"\n")
    held = watch.holdings
    assert held is not None
    kv, weights = 512 * MIB, int(0.1 * 1024 * MIB)
    assert held.kind.startswith("GPU")
    assert (held.with_preallocated_bytes, held.weights_bytes, held.kv_preallocated_bytes) == (800 * MIB, weights, kv)
    assert held.kv_used_share == 0.2
    assert held.peak_bytes == pytest.approx(800 * MIB - 0.8 * kv, abs=2)
    assert held.reservations_bytes == 800 * MIB - weights - kv
    assert (held.kv_used_bytes, held.preemptions) == (int(0.2 * kv), 0)


def test_who_holds_more_than_the_cap_is_killed() -> None:
    grow = "import os, time; held = []\nwhile True: held.append(bytearray(20_000_000)); time.sleep(0.05)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {grow!r}])"
    with subprocess.Popen([sys.executable, "-S", "-c", parent]) as process, MemoryWatch(process.pid, limit_bytes=150 * MIB) as watch:
        assert process.wait(60) != 0
    assert watch.exceeded is not None
    assert watch.exceeded[1] > 150 * MIB
    held = watch.holdings
    assert held is not None
    assert held.peak_bytes == watch.exceeded[1]  # of a host's memory nothing is taken off
    assert (held.kv_used_share, held.preemptions) == (None, None)


def test_a_process_and_its_descendants_are_counted() -> None:
    code = "import subprocess, sys; held = bytearray(60_000_000); subprocess.run([sys.executable, '-S', '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE) as process:
        deadline = time.monotonic() + 30
        while len(found := processes_below(process.pid)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert 60e6 < resident_bytes(found) < 140e6
        process.communicate(b"\n")


def test_the_cap() -> None:
    assert cap_of(1e9) == 1_020_000_000 + 512 * MIB

"""Where the seconds of a quantization go, by phase: for tables and --json, never for what is sealed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch


class Phases:
    """Seconds by phase. A phase within another is taken out of it, so that those of the main thread add up to its time.

    What a GPU is asked to do counts where it was asked: a phase waits for the device when it ends. Other threads `add` their seconds, which
    then overlap with the rest.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.seconds: dict[str, float] = {}
        self._device = torch.device(device)
        self._stack: list[float] = []  # seconds of phases within each open one
        self._events: list[tuple[str, Any, Any]] = []
        self._lock = Lock()

    def add(self, name: str, seconds: float) -> None:
        """Count `seconds` for `name`; from any thread."""
        with self._lock:
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the block for `name`; of the main thread."""
        started = time.perf_counter()
        self._stack.append(0.0)
        try:
            yield
        finally:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
                for inner, first, last in self._events:
                    taken = first.elapsed_time(last) / 1000
                    self.add(inner, taken)
                    self._stack[-1] += taken
                self._events.clear()
            total = time.perf_counter() - started
            self.add(name, total - self._stack.pop())
            if self._stack:
                self._stack[-1] += total

    @contextmanager
    def on_device(self, name: str) -> Iterator[None]:
        """Count the block for `name` within an open phase, without waiting for a GPU."""
        if self._device.type != "cuda":
            with self(name):
                yield
            return
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        yield
        last.record()
        self._events.append((name, first, last))

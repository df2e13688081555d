"""What paused batches hold: on the device while it fits there, else in pinned host memory, fetched again before its batch goes on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from gemq.errors import UsageError


def host_bytes(nbytes: int, device: torch.device) -> torch.Tensor:
    """`nbytes` of host memory, uint8, pinned for `device` if that is a GPU.

    Registered with the driver rather than taken from torch's pool of pinned memory, which rounds up to powers of two.
    """
    made = torch.empty(nbytes, dtype=torch.uint8)
    if device.type == "cuda" and nbytes:
        runtime: Any = torch.cuda.cudart()
        if code := int(runtime.cudaHostRegister(made.data_ptr(), nbytes, 0)):
            raise UsageError(
                f"CUDA can't pin {nbytes / 2**20:.0f} MiB of host memory for activations (error {code})",
                "free some memory, or give more --gpu-memory so that they stay on the device",
            )
    return made


def free_host_bytes(held: torch.Tensor, device: torch.device) -> None:
    """Unpin what `host_bytes` gave, so that its memory can go."""
    if device.type == "cuda" and held.numel():
        runtime: Any = torch.cuda.cudart()
        runtime.cudaHostUnregister(held.data_ptr())


@dataclass
class _Held:
    storage: torch.UntypedStorage
    nbytes: int
    host: torch.Tensor | None = None  # None: it stays on the device
    counted: bool = False
    here: bool = True
    arrival: Any = None  # the event after which a prefetched copy can be read

    def view(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)


class Activations:
    """The tensors that each of `batches` paused batches holds, at most `quota` bytes of them on `device`; `reserved` of these for `hold`."""

    def __init__(self, device: torch.device, quota: int, batches: int, reserved: int = 0) -> None:
        self._device, self._quota, self._used, self._reserved = device, quota, 0, reserved
        self._held: list[dict[int, _Held]] = [{} for _ in range(batches)]
        self._spare: dict[int, list[torch.Tensor]] = {}
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.spilled_bytes = 0  # the most that lay in host memory at a time
        self._spilled = 0

    def room_for(self, nbytes: int) -> bool:
        """Take `nbytes` of the quota for good, if that much is left beside what is reserved."""
        if self._used + nbytes > self._quota - self._reserved:
            return False
        self._used += nbytes
        return True

    def hold(self, position: int, tensors: Iterable[torch.Tensor]) -> None:
        """From now on batch `position` holds `tensors` and nothing else; those that don't fit leave the device."""
        before = self._held[position]
        now: dict[int, _Held] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in before:
                now[key] = before.pop(key)
            elif storage.nbytes() and key not in now:
                now[key] = _Held(storage, storage.nbytes())
        for left in before.values():
            self._forget(left)
        self._held[position] = now
        for held in now.values():
            if held.host is None and not held.counted:
                if self._used + held.nbytes <= self._quota:
                    self._used += held.nbytes
                    held.counted = True
                else:
                    self._spill(held)
        self.release(position)

    def fetch(self, position: int) -> None:
        """Bring back what batch `position` holds, and begin with that of the next."""
        for held in self._held[position].values():
            self._begin(held)
            if held.arrival is not None:
                torch.cuda.current_stream(self._device).wait_event(held.arrival)
                held.arrival = None
        if position + 1 < len(self._held):
            for held in self._held[position + 1].values():
                self._begin(held)

    def release(self, position: int) -> None:
        """Let the device's copy go of what has one in host memory."""
        for held in self._held[position].values():
            if held.host is not None and held.here:
                held.storage.resize_(0)
                held.here = False

    def close(self) -> None:
        """Let all host memory go."""
        for batch in self._held:
            for held in batch.values():
                if held.host is not None:
                    self._spare.setdefault(held.nbytes, []).append(held.host)
            batch.clear()
        if self._copies is not None:
            self._copies.synchronize()
        for buffers in self._spare.values():
            for buffer in buffers:
                free_host_bytes(buffer, self._device)
        self._spare.clear()

    def _spill(self, held: _Held) -> None:
        spare = self._spare.get(held.nbytes)
        held.host = spare.pop() if spare else host_bytes(held.nbytes, self._device)
        held.host.copy_(held.view(), non_blocking=True)
        self._spilled += held.nbytes
        self.spilled_bytes = max(self.spilled_bytes, self._spilled)

    def _begin(self, held: _Held) -> None:
        if held.here:
            return
        assert held.host is not None
        held.storage.resize_(held.nbytes)
        held.here = True
        if self._copies is None:
            held.view().copy_(held.host)
            return
        # the memory may have been another tensor's, which work that is queued still reads
        self._copies.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._copies):
            held.view().copy_(held.host, non_blocking=True)
            held.arrival = self._copies.record_event()

    def _forget(self, held: _Held) -> None:
        if held.host is None:
            self._used -= held.nbytes
        else:
            if held.arrival is not None:
                torch.cuda.current_stream(self._device).wait_event(held.arrival)
            self._spare.setdefault(held.nbytes, []).append(held.host)
            self._spilled -= held.nbytes

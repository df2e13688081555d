"""What a walk reads again only now and then, and what takes the most room: per-layer inputs that a GPU has no room for lie in a file.

Of E4B they are 21 kB a token, more than everything else that waits, and each layer reads a forty-second of them once. The kernel keeps the
file in its page cache while memory is free, and sends it to the disk where it isn't.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Semaphore
from typing import Any

import torch

from gemq.positioned import bytes_of, read_at, write_at
from gemq.quantize.activations import Activations

_PIECE_BYTES = 16 << 20
_PIECES = 8  # that may lie in memory before they are written


class Scratch:
    """A file without a name in `folder`, gone with this process however that ends. What it can't take raises OSError, here or where it is read."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._file: Any = None
        self._end = 0
        self._room = Semaphore(_PIECES)
        self._pool = ThreadPoolExecutor(2, "scratch")

    def put(self, tensor: torch.Tensor) -> Callable[[int, torch.Tensor], None]:
        """Keep `tensor`; returns what reads the bytes from a place in it into a contiguous host tensor, as many as that has."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 - closed by close()
        flat, start = tensor.detach().reshape(-1).view(torch.uint8), self._end
        self._end += flat.numel()
        os.posix_fallocate(self._file.fileno(), start, max(1, flat.numel()))
        writes = [
            self._write(flat[first : first + _PIECE_BYTES], start + first) for first in range(0, flat.numel(), _PIECE_BYTES)
        ]  # fmt: skip

        def read(place: int, into: torch.Tensor) -> None:
            for write in writes:
                write.result()
            raw = bytes_of(into.reshape(-1).view(torch.uint8))
            done = read_at(self._file.fileno(), start + place, raw)
            if done < len(raw):
                raise OSError(f"the scratch file of activations ends at {start + place + done} bytes")

        return read

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Do `work` in a thread, after what was given before."""
        return self._pool.submit(work)

    def close(self) -> None:
        """Let the file go."""
        self._pool.shutdown(cancel_futures=True)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, piece: torch.Tensor, place: int) -> Future[None]:
        self._room.acquire()
        held, ready = piece, None
        if piece.is_cuda:
            held = piece.to("cpu", non_blocking=True)
            ready = torch.cuda.current_stream(piece.device).record_event()

        def write() -> None:
            try:
                if ready is not None:
                    ready.synchronize()
                write_at(self._file.fileno(), place, bytes_of(held))
            finally:
                self._room.release()

        return self._pool.submit(write)


class ByLayer:
    """Per-layer inputs [batch, length, layers, dim], laid out by layers; `[:, :, i, :]` gives layer i's on the device.

    What has no room there lies in `scratch`, whence each layer's is read ahead as soon as that of the layer before it was taken.
    """

    def __init__(self, inputs: torch.Tensor, activations: Activations, scratch: Scratch) -> None:
        self._device, self._scratch = inputs.device, scratch
        by_layer = inputs.permute(2, 0, 1, 3).contiguous()
        self._kept: torch.Tensor | None = None
        if activations.room_for(by_layer.nbytes):
            self._kept = by_layer
            return
        self._layers = by_layer.shape[0]
        self._read = scratch.put(by_layer)
        self._buffer = torch.empty(by_layer.shape[1:], dtype=inputs.dtype, pin_memory=self._device.type == "cuda")
        self._taken: Any = None  # the event after which the buffer has been copied
        self._ahead: Future[None] | None = None
        self._next = -1
        self._fetch_ahead(0)

    def __getitem__(self, place: tuple[slice, slice, int, slice]) -> torch.Tensor:
        layer = place[2]
        if self._kept is not None:
            return self._kept[layer]
        if self._ahead is not None:
            self._ahead.result()
        if layer != self._next:
            self._fetch(layer)
        if self._device.type == "cuda":
            made = self._buffer.to(self._device, non_blocking=True)
            self._taken = torch.cuda.current_stream(self._device).record_event()
        else:
            made = self._buffer.clone()
        self._fetch_ahead(layer + 1)
        return made

    def _fetch_ahead(self, layer: int) -> None:
        self._next = layer if layer < self._layers else -1
        self._ahead = None if self._next < 0 else self._scratch.submit(lambda: self._fetch(layer))

    def _fetch(self, layer: int) -> None:
        if self._taken is not None:
            self._taken.synchronize()
        self._read(layer * self._buffer.nbytes, self._buffer)

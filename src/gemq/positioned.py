"""Whole reads and writes at a place in an open file, and a tensor's memory as bytes: the system may do less in one call than it is asked for."""

from __future__ import annotations

import os
from typing import Any

import torch

COPY_BYTES = 32 << 20


def bytes_of(flat: torch.Tensor) -> memoryview:
    """The memory of a contiguous uint8 tensor on the CPU."""
    array: Any = flat.numpy()
    return memoryview(array).cast("B")


def read_at(descriptor: int, offset: int, view: memoryview) -> int:
    """Fill `view` from byte `offset` on; returns how many bytes there were, fewer than asked for only where the file ends."""
    done = 0
    while done < len(view) and (count := os.preadv(descriptor, [view[done:]], offset + done)):
        done += count
    return done


def write_at(descriptor: int, offset: int, view: memoryview) -> None:
    """Write all of `view` from byte `offset` on."""
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done : done + COPY_BYTES], offset + done)

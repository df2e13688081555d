"""Reading and writing files: whole reads and writes at a place, since the system may do less in one call than it is asked for; a file in pieces of
one buffer; a tensor's memory as bytes; and telling the kernel to begin with what was written."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from io import FileIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

COPY_BYTES = 32 << 20
IN_CACHE_BYTES = 128 << 10  # of a piece that stays in a core's cache between being read and being looked at
# a thread that asks for the interpreter again waits up to 5 ms for it while another computes: a piece must keep it busy for longer
BESIDE_BYTES = 16 << 20
_WRITEBACK_BYTES = 1 << 20  # less than that the kernel may gather
_SYNC_FILE_RANGE_WRITE = 2


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


def pieces(file: FileIO, nbytes: int, length: int | None = None) -> Iterator[memoryview]:
    """The rest of a file, or at most `length` bytes of it, `nbytes` at a time, each piece in the memory of the one before it."""
    left = sys.maxsize if length is None else length
    view = memoryview(bytearray(min(nbytes, left)))
    while left and (count := file.readinto(view[: min(len(view), left)])):
        yield view[:count]
        left -= count


def begin_writeback(descriptor: int, offset: int, length: int) -> None:
    """Let the kernel begin to send a range that was just written to the disk, which else it does once a good deal of memory is dirty.

    That a later fdatasync has less to wait for is all it is good for, so where there is no such call, or it fails, nothing happens.
    """
    if _sync_file_range is not None and length >= _WRITEBACK_BYTES:
        _sync_file_range(descriptor, offset, length, _SYNC_FILE_RANGE_WRITE)


def _find_sync_file_range() -> Any:
    found = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if found is not None:
        found.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return found


_sync_file_range = _find_sync_file_range()

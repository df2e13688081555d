"""How this process holds and gives back memory."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from pathlib import Path

_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD_BYTES = 1 << 20


def available_bytes() -> int | None:
    """Memory that this machine can still give, by the kernel's own estimate; None where it doesn't tell."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8"))
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def prefer_large_pages() -> None:
    """Let torch ask for 2 MiB pages for large tensors; call before torch is imported.

    A walk maps and unmaps its tensors all the time (see `return_freed_memory`), and with 4 KiB pages a sixth of the processor time went into faults.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def let_segments_grow() -> None:
    """Let torch grow its segments of a GPU's memory instead of adding new ones; call before torch is imported.

    A walk asks for tensors of many sizes, and a segment of a fixed size keeps what no tensor that comes fits into.
    """
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def import_transformers_alone() -> None:
    """Keep scikit-learn, and pandas and pyarrow with it, out of this process; call before transformers is imported.

    Where it is installed, transformers imports it for one way of assisted generation: 130 MB that a walk has no use for.
    """
    sys.modules.setdefault("sklearn", None)  # type: ignore[arg-type]


def return_freed_memory() -> None:
    """Let glibc give every freed tensor of a megabyte or more back at once.

    By default its threshold rises to 32 MiB with the first such tensor that is freed, and the heap then keeps what a walk no longer needs:
    about 400 MB on Gemma 3 270M. A libc without these calls is left as it is.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)

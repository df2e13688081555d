"""How work on the CPU is spread: torch's own threads for large operations, one thread or whole pieces a thread for small ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

Piece = TypeVar("Piece")
Made = TypeVar("Made")


@contextmanager
def single_thread() -> Iterator[None]:
    """Let torch compute in the calling thread alone."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def over_threads(work: Callable[[Piece], Made], pieces: Iterable[Piece]) -> Iterator[Made]:
    """`work` of each piece, in order, as many at a time as torch has threads."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield from map(work, pieces)
        return
    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(work, pieces)

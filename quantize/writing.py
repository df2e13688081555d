"""The way of a checkpoint's tensors to the disk: at once, or in threads beside the solving.

Either way a part counts as finished only once its bytes lie on the disk and the journal says so, in the order in which parts were finished.
In threads, a shard is hashed for the seal as soon as its last tensor is there; its digest holds while size and time of change are the same.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Condition
from typing import Any

import torch

from gemq.quantize.journal import Journal, digest_of
from gemq.quantize.phases import Phases
from gemq.quantize.seal import Hashed, sha256_of
from gemq.shards import ShardReader, ShardWriter

_WAITING_BYTES = 384 << 20  # that may lie in memory before they are written; pinned memory comes in powers of two, so up to twice that
_PIECE_BYTES = 64 << 20
_LONG_BYTES = 1 << 30  # of a tensor that is alone in its shard, or as good as
_DEPTH = 6
Request = tuple[str, int, int]


@dataclass(frozen=True)
class _Part:
    """A part on its way: the writes of its tensors, the digest that follows them, and what is called right before it is recorded."""

    name: str
    writes: list[Future[None]]
    digest: Future[str]
    begin: Callable[[], None]

    def is_written(self) -> bool:
        return all(write.done() and not write.cancelled() and write.exception() is None for write in self.writes)


@dataclass(frozen=True)
class _Span:
    """What of a tensor a write changes: so many rows, columns or bytes from `first` on; all of it without an `axis`."""

    axis: str = ""
    first: int = 0
    count: int = 0

    def overlaps(self, other: _Span) -> bool:
        apart = self.first + self.count <= other.first or other.first + other.count <= self.first
        return not (self.axis and self.axis == other.axis and apart)


class Writing:
    """Writes tensors by `writer` and records finished parts in `journal`, in `threads` threads, or at once with 0 of them.

    `before_records` is called once, before the first record. What fails in a thread is raised by the next call here, `drain` at the latest.
    """

    def __init__(
        self, writer: ShardWriter, journal: Journal, phases: Phases, threads: int = 0, before_records: Callable[[], None] | None = None
    ) -> None:
        self.writer, self.journal, self._phases = writer, journal, phases
        self._before_records = before_records
        self._pool = ThreadPoolExecutor(threads, "write") if threads else None
        self._recorder = ThreadPoolExecutor(1, "record")
        self._watcher = ThreadPoolExecutor(1, "written")
        self._hashers = ThreadPoolExecutor(max(1, threads), "hash")
        self._digests = ThreadPoolExecutor(max(1, threads), "digest")
        self._digested = ThreadPoolExecutor(max(1, threads), "part")
        self._open: list[Future[None]] = []  # writes of the part at hand
        self._unfinished: dict[str, list[tuple[_Span, Future[None]]]] = {}  # by tensor, in the order in which they were asked for
        self._records: list[Future[None]] = []
        self._parts: deque[_Part] = deque()
        self._room, self._waiting_bytes = Condition(), 0
        self._missing: dict[Path, set[str]] = {}
        for name, info in writer.tensors.items():
            self._missing.setdefault(info.path, set()).add(name)
        self._hashes: dict[Path, Future[Hashed | str]] = {}

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Put `tensor` in its place. Of writes that overlap, in this call or the next ones, the later one stays."""
        self._put(name, _Span(), tensor, lambda held: self.writer.write(name, held))

    def write_rows(self, name: str, first: int, rows: torch.Tensor) -> None:
        """Put `rows` at row `first` of `name`."""
        self._put(name, _Span("rows", first, rows.shape[0]), rows, lambda held: self.writer.write_rows(name, first, held))

    def write_columns(self, name: str, first: int, columns: torch.Tensor) -> None:
        """Put `columns` at column `first` of `name`."""
        self._put(name, _Span("columns", first, columns.shape[1]), columns, lambda held: self.writer.write_columns(name, first, held))

    def copy(self, reader: ShardReader, name: str, done: Callable[[], None]) -> None:
        """Copy a tensor byte for byte from `reader`."""
        if self._pool is None:
            self.writer.copy(reader, name)
            done()
            return
        mine = [
            self._in_order(name, _Span("bytes", start, length),
                           lambda start=start, length=length: self.writer.copy_bytes(reader, name, start, length))  # type: ignore[misc]
            for start, length in _pieces(reader.info(name).nbytes)
        ]  # fmt: skip
        if reader.info(name).nbytes >= _LONG_BYTES:  # it need not wait for the rest
            self._records.append(self._watcher.submit(self._hash_written, [name], mine))

    def finish(self, part: str, names: list[str], begin: Callable[[], None]) -> None:
        """Record `part`, whose tensors are `names`, when all that was written before is on the disk; `begin` is called right before."""
        if self._pool is None:
            begin()
            with self._phases("record"):
                self.journal.finish(part, self.writer, names)
            return
        self._raise_failed()
        writes, self._open = self._open, []
        self._parts.append(_Part(part, writes, self._digested.submit(self._digest_written, names, writes), begin))
        self._records.append(self._watcher.submit(self._hash_written, names, writes))
        self._records.append(self._recorder.submit(self._record))

    def held(self, names: Iterable[str]) -> None:
        """An earlier run wrote `names`."""
        self._hash_whole(names)

    def drain(self) -> None:
        """Wait until everything is recorded."""
        for future in [*self._open, *self._records]:
            future.result()
        self._open, self._records = [], []

    def hashes(self) -> dict[str, Hashed]:
        """What is known of whole shards by now, by file name; call after `drain`."""
        found = {path.name: future.result() for path, future in self._hashes.items()}
        return {name: hashed for name, hashed in found.items() if not isinstance(hashed, str)}

    def close(self) -> None:
        """Stop: what is being written ends, what waits is left out."""
        for pool in (self._pool, self._recorder, self._watcher, self._hashers, self._digested, self._digests):
            if pool is not None:
                pool.shutdown(cancel_futures=True)

    def _put(self, name: str, span: _Span, tensor: torch.Tensor, write: Callable[[torch.Tensor], None]) -> None:
        if self._pool is None:
            with self._phases("write"):
                write(tensor)
            return
        held, ready = tensor.detach(), None
        if tensor.is_cuda:
            held = held.contiguous().to("cpu", non_blocking=True)
            ready = torch.cuda.current_stream(tensor.device).record_event()
        with self._room:
            self._room.wait_for(lambda: self._waiting_bytes < _WAITING_BYTES)
            self._waiting_bytes += held.nbytes

        def work() -> None:
            if ready is not None:
                ready.synchronize()
            write(held)

        def release() -> None:
            with self._room:
                self._waiting_bytes -= held.nbytes
                self._room.notify_all()

        self._in_order(name, span, work, release)

    def _in_order(self, name: str, span: _Span, work: Callable[[], None], release: Callable[[], None] | None = None) -> Future[None]:
        """Do `work`, which writes to `span` of the tensor `name`, after all writes that overlap it and were asked for before; then `release`."""
        unfinished = [(other, write) for other, write in self._unfinished.get(name, []) if not write.done()]
        before = [write for other, write in unfinished if other.overlaps(span)]

        def after_those() -> None:
            try:
                _wait(before)  # they were submitted first, so threads have them already
                work()
            finally:
                if release is not None:
                    release()

        future = self._submit(after_those)
        self._unfinished[name] = [*unfinished, (span, future)]
        return future

    def _submit(self, work: Callable[[], None]) -> Future[None]:
        assert self._pool is not None
        self._raise_failed()
        self._open.append(self._pool.submit(self._timed, "write, beside", work))
        return self._open[-1]

    def _timed(self, phase: str, work: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        made = work()
        self._phases.add(phase, time.perf_counter() - started)
        return made

    def _raise_failed(self) -> None:
        for future in [*self._open, *self._records]:
            if future.done() and (future.cancelled() or future.exception() is not None):
                future.result()

    def _record(self) -> None:
        """Record the first part that waits, and those behind it that are written by then: one wait for the disk serves them all."""
        if not self._parts:
            return
        parts = [self._parts.popleft()]
        _wait(parts[0].writes)
        while self._parts and self._parts[0].is_written():
            parts.append(self._parts.popleft())
        for part in parts:
            part.begin()
        self._timed("sync, beside", self.writer.sync)
        digests = {part.name: part.digest.result() for part in parts}
        if self._before_records is not None:
            self._before_records()
            self._before_records = None
        self.journal.parts.update(digests)
        self.journal.save()

    def _digest_written(self, names: list[str], writes: list[Future[None]]) -> str:
        _wait(writes)
        made: str = self._timed("record, beside", lambda: digest_of(self.writer, names, self._digests.map))
        return made

    def _hash_written(self, names: list[str], writes: list[Future[None]]) -> None:
        _wait(writes)
        self._hash_whole(names)

    def _hash_whole(self, names: Iterable[str]) -> None:
        """Begin to hash the shards of which nothing is missing once `names` are there."""
        if self._pool is None:
            return
        for name in names:
            path = self.writer.tensors[name].path
            missing = self._missing[path]
            missing.discard(name)
            if not missing and path not in self._hashes:
                self._hashes[path] = self._hashers.submit(self._timed, "hash, beside", lambda path=path: sha256_of(path))  # type: ignore[misc]


class ReadAhead:
    """Rows of tensors, read by threads in the order of `requests` (tensor, first row, rows), some pieces ahead of whoever takes them.

    With `threads` 0 each is read when it is taken.
    """

    def __init__(self, reader: ShardReader, requests: Iterable[Request], phases: Phases, threads: int, *, pinned: bool) -> None:
        self._reader, self._requests, self._pinned, self._phases = reader, iter(requests), pinned, phases
        self._pool = ThreadPoolExecutor(threads, "read") if threads else None
        self._ahead: list[tuple[Request, Future[torch.Tensor]]] = []
        self._fill()

    def take(self, *request: Any) -> torch.Tensor:
        """The rows of the next request, which must be `request`."""
        if self._pool is None:
            with self._phases("read"):
                return self._read(request)
        expected, future = self._ahead.pop(0)
        if expected != request:
            raise AssertionError(f"{request} was taken, {expected} is next")
        with self._phases("read"):
            found = future.result()
        self._fill()
        return found

    def close(self) -> None:
        """Stop reading."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _fill(self) -> None:
        while self._pool is not None and len(self._ahead) < _DEPTH and (request := next(self._requests, None)) is not None:
            self._ahead.append((request, self._pool.submit(self._read, request)))

    def _read(self, request: Request) -> torch.Tensor:
        started = time.perf_counter()
        found = self._reader.read_slice(*request, pinned=self._pinned)
        if self._pool is not None:
            self._phases.add("read, beside", time.perf_counter() - started)
        return found


def threads_for(device: str) -> int:
    """Threads that read and write beside a GPU; none beside a CPU, whose cores solve."""
    return min(6, len(os.sched_getaffinity(0))) if torch.device(device).type == "cuda" else 0


def _wait(writes: Iterable[Future[None]]) -> None:
    """Until all are done; raises what one of them raised."""
    for write in writes:
        write.result()


def _pieces(nbytes: int) -> Iterator[tuple[int, int]]:
    for start in range(0, nbytes, _PIECE_BYTES):
        yield start, min(_PIECE_BYTES, nbytes - start)

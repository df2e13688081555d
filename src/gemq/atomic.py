"""Write files and directories so that a reader, or the next run, never meets half of one.

`write_point(name)` marks each instant at which a kill leaves a different state on disk; tests set `on_write_point` to die there.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gemq.errors import StoppedSafely, UsageError

on_write_point: Callable[[str], None] | None = None


def write_point(name: str) -> None:
    """Mark a named instant between two changes on disk."""
    if on_write_point is not None:
        on_write_point(name)


def partial_of(final: Path) -> Path:
    """The sibling directory in which `final` is built."""
    return final.with_name(final.name + ".partial")


def require_absent(final: Path) -> None:
    """Refuse an output that exists, so that nothing of the user's is overwritten."""
    if final.exists() or final.is_symlink():
        raise UsageError(f"output {final} exists already", "choose another --output, or move that one away")


def make_parent(final: Path) -> None:
    """Make the directory that `final` will lie in; raises UsageError naming it where that can't be."""
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "a file is in its place or above it" if isinstance(error, (FileExistsError, NotADirectoryError)) else error.strerror
        raise UsageError(f"output {final} can't be made: no directory {final.parent} ({why})", "choose an --output that you may write to") from None


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold `directory` against a second gemq that would build the same output; the lock goes with the process.

    Raises UsageError where another holds it, or nothing can be written beside it.
    """
    lock = directory.with_name(directory.name + ".lock")
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UsageError(f"nothing can be written into {directory.parent} ({error.strerror})", "choose a place that you may write to") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            raise UsageError(f"another gemq is building {directory}", "wait for it, stop it, or choose another --output") from None
        yield
    finally:
        os.close(descriptor)
        lock.unlink(missing_ok=True)


def sync_path(path: Path) -> None:
    """Make a file's bytes, or a directory's names, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, data: bytes | str) -> None:
    """Replace `path` by `data` in one step: old content or new, never a mixture."""
    raw = data.encode() if isinstance(data, str) else data
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        write_point(f"file-staged:{path.name}")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_path(path.parent)
    write_point(f"file-written:{path.name}")


def publish(partial: Path, final: Path) -> None:
    """Give a finished directory its name; until then there is no `final` at all."""
    for path in sorted(partial.rglob("*")):
        if path.is_file():
            sync_path(path)
    sync_path(partial)
    write_point("before-publish")
    require_absent(final)
    os.rename(partial, final)
    write_point("published")
    sync_path(final.parent)


@contextmanager
def staged_directory(final: Path) -> Iterator[Path]:
    """Yield an empty directory that becomes `final` when the block ends well and vanishes when it doesn't.

    For work that is short enough to start again; `quantize` keeps its own partial directory to resume from.
    """
    require_absent(final)
    make_parent(final)
    partial = partial_of(final)
    with locked(partial):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            with disk_errors(partial):
                yield partial
                publish(partial, final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


@contextmanager
def disk_errors(where: Path) -> Iterator[None]:
    """Turn a full or read-only disk into gemq's own error."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StoppedSafely(
                f"no space left on the disk that holds {where} ({error.strerror})", "free some space and run the same command again"
            ) from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise UsageError(
                f"can't write to {error.filename or where}: {error.strerror}", "choose an --output that you may write to"
            ) from error
        raise


def require_space(where: Path, needed_bytes: int) -> None:
    """Refuse work whose output can't fit, before any of it is done."""
    probe = where
    while not probe.exists():
        probe = probe.parent
    free = shutil.disk_usage(probe).free
    if free < needed_bytes:
        raise UsageError(
            f"{where} needs {needed_bytes / 1e9:.2f} GB of disk, and {free / 1e9:.2f} GB are free",
            "free some space, or choose an --output on another disk",
        )

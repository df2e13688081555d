"""Write files and directories so that a reader, or the next run, never meets half of one, and nobody else's file is lost.

An output OUT is built in the sibling directory OUT.partial and gets its name by one rename, after everything in it is on the disk. One lock file,
OUT.partial.lock, excludes a second process. OUT.partial is used or deleted only if a record in it proves that gemq made it.
`write_point(name)` marks each instant at which a kill leaves a different state on disk; tests set `on_write_point` to die there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gemq import output
from gemq.errors import StoppedSafely, UsageError

RECORD = "gemq-partial.json"  # in a partial directory: gemq made it
_STAGED = "output"  # in a partial directory: what `staged_directory` builds
_LOCK_MARK = b"gemq "  # and the process that holds it: how a lock file of gemq's begins

_TEMPORARY = re.compile(r"\.(.+)\.\d+\.tmp", re.DOTALL)  # the names that `staged_file` gives

on_write_point: Callable[[str], None] | None = None


def write_point(name: str) -> None:
    """Mark a named instant between two changes on disk."""
    if on_write_point is not None:
        on_write_point(name)


def partial_of(final: Path) -> Path:
    """The sibling in which `final` is built."""
    return final.with_name(final.name + ".partial")


def require_absent(final: Path) -> None:
    """Refuse an output that exists, so that nothing of the user's is overwritten."""
    if final.exists() or final.is_symlink():
        raise UsageError(f"output {final} exists already", "choose another --output, or move that one away")


def make_parent(final: Path) -> None:
    """Make the directory of `final`, so that it survives a power cut; raises UsageError naming it where that can't be."""
    try:
        make_directories(final.parent)
    except OSError as error:
        why = why_no_directory(final.parent, error)
        raise UsageError(f"output {final} can't be made: no directory {final.parent} ({why})", "choose an --output that you may write to") from None


def why_no_directory(path: Path, error: OSError) -> str:
    """Why `path` could not be made or written into, for a message."""
    for place in (path, *path.parents):
        if place.is_symlink() and not place.exists():
            return f"{place} is a link to {os.readlink(place)}, which is not there"
        if os.path.lexists(place) and not place.is_dir():
            return "a file is in its place or above it" if place == path else f"a file is in its place or above it: {place}"
    return error.strerror or str(error)


def make_directories(path: Path) -> None:
    """Make `path` and the directories above it that are missing, and make their names survive a power cut. Raises OSError."""
    missing = list(itertools.takewhile(lambda directory: not directory.is_dir(), [path, *path.parents]))
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        sync_path(directory.parent)


def make_cache(folder: Path, what: str, next_step: str) -> None:
    """Make the directory `folder` of a cache where it is missing; raises UsageError with `next_step` where no file can be made in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"{what} {folder} can't be used: {why_no_directory(folder, error)}", next_step) from None


# --- the lock


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold `directory`, which need not exist, against a second gemq; the lock ends with the process, however that ends.

    The lock is flock(2) on DIRECTORY.lock beside the real directory, whichever way it is spelled. The holder alone deletes the file, and
    only one that gemq made; whoever opened it before that finds that the name is another file's, and tries again.
    Raises UsageError where another process holds it, or no lock file can be there.
    """
    real = Path(os.path.realpath(directory))
    lock = real.with_name(real.name + ".lock")
    descriptor = _acquire(directory, lock)
    try:
        yield
    finally:
        if _is_marked(descriptor) and _is_at(lock, descriptor):
            with contextlib.suppress(OSError):
                lock.unlink()
        os.close(descriptor)


def _acquire(directory: Path, lock: Path) -> int:
    while True:
        descriptor, made = _open_lock(lock)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(descriptor, 64, 0)
            no_locks = error.errno not in (errno.EACCES, errno.EAGAIN)
            if no_locks and made and _is_at(lock, descriptor):
                with contextlib.suppress(OSError):
                    lock.unlink()
            os.close(descriptor)
            if no_locks:
                raise UsageError(f"{lock} can't be locked ({error.strerror})", "choose a place on a file system with locks") from None
            who = holder.removeprefix(_LOCK_MARK).decode("ascii", "replace").strip()
            raise UsageError(f"another gemq is building {directory}" + (f" (process {who})" if who.isdigit() else ""),
                             "wait for it, stop it, or choose another --output") from None  # fmt: skip
        if _is_at(lock, descriptor):
            if _is_marked(descriptor):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, _mark(), 0)
            return descriptor
        os.close(descriptor)  # its holder deleted it in between


def _mark() -> bytes:
    return _LOCK_MARK + f"{os.getpid()}\n".encode()


def _is_marked(descriptor: int) -> bool:
    return os.pread(descriptor, len(_LOCK_MARK), 0) == _LOCK_MARK


def _open_lock(lock: Path) -> tuple[int, bool]:
    """A descriptor of the lock file, and whether this call made the file, with gemq's mark, because there was none."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        while True:
            with contextlib.suppress(FileExistsError):
                descriptor = os.open(lock, flags | os.O_CREAT | os.O_EXCL, 0o644)
                try:
                    os.pwrite(descriptor, _mark(), 0)
                except OSError:
                    os.close(descriptor)
                    lock.unlink()
                    raise
                return descriptor, True
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(lock, flags)
                if stat.S_ISREG(os.fstat(descriptor).st_mode):
                    return descriptor, False
                os.close(descriptor)
                raise OSError(errno.EINVAL, f"{lock.name} is there and is not a file", str(lock))
    except OSError as error:
        why = f"{lock.name} is a link" if error.errno == errno.ELOOP else error.strerror
        raise UsageError(f"nothing can be written into {lock.parent} ({why})", "choose a place that you may write to") from None


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


# --- files


def sync_path(path: Path) -> None:
    """Make a file's bytes, or a directory's names, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def staged_file(path: Path) -> Iterator[Path]:
    """Yield a new file beside `path`, which replaces `path` in one step when the block ends well and vanishes when it doesn't."""
    for number in itertools.count(os.getpid()):
        temporary = path.with_name(f".{path.name}.{number}.tmp")
        with contextlib.suppress(FileExistsError):
            os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
            break
    try:
        yield temporary
        sync_path(temporary)
        write_point(f"file-staged:{path.name}")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_path(path.parent)
    write_point(f"file-written:{path.name}")


def write_file(path: Path, data: bytes | str) -> None:
    """Replace `path` by `data` in one step: old content or new, never a mixture."""
    with staged_file(path) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)


def write_new_file(path: Path, data: bytes | str) -> None:
    """Write the output `path` in one step; raises UsageError where one was put there since the command began."""
    require_absent(path)
    write_file(path, data)


def left_over_of(path: Path) -> str | None:
    """The name of the file whose replacement `path` would have become, by a killed `staged_file`; None where `path` is anything else."""
    found = _TEMPORARY.fullmatch(path.name)
    return found[1] if found and path.is_file() and not path.is_symlink() else None


# --- directories


def publish(partial: Path, final: Path) -> None:
    """Give a finished file or directory its name, once all of it is on the disk; until then there is no `final` at all."""
    for path in sorted(partial.rglob("*")):
        if path.is_file() or path.is_dir():
            sync_path(path)
    sync_path(partial)
    write_point("before-publish")
    require_absent(final)
    os.rename(partial, final)
    write_point("published")
    sync_path(final.parent)


def publish_resumable(partial: Path, final: Path, *private: str) -> None:
    """Publish the directory of `resumable_directory` as `final`, without its record and the files `private`, which only a resumed run needs."""
    publish(partial, final)
    with _warns_only(final):  # not before: without its record nobody could go on with it
        for name in (*private, RECORD):
            (final / name).unlink(missing_ok=True)


def claim(partial: Path, kind: str) -> None:
    """Make the directory `partial` with the record that gemq made it for outputs of `kind`, both on the disk before anything else is in it."""
    partial.mkdir(exist_ok=True)
    sync_path(partial.parent)
    write_file(partial / RECORD, json.dumps({"gemq_partial": kind}) + "\n")


def claimed_as(partial: Path) -> str | None:
    """The kind of output for which gemq made `partial`, by its record; None where there is no record."""
    try:
        document = json.loads((partial / RECORD).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    kind = document.get("gemq_partial") if isinstance(document, dict) else None
    return kind if isinstance(kind, str) else None


def require_own(partial: Path, kind: str, *, proven: bool = False) -> None:
    """Refuse what is at `partial` unless gemq made it for outputs of `kind` (by its record, or `proven`), or it is an empty directory.

    A directory in which nothing but the record's temporary file is counts as empty.
    """
    if not partial.exists() and not partial.is_symlink():
        return
    if partial.is_dir() and not partial.is_symlink():
        found = claimed_as(partial)
        if proven or found == kind or all(left_over_of(path) == RECORD for path in partial.iterdir()):
            return
        if found is not None:
            raise UsageError(f"{partial} holds unfinished work of another kind: {found}",
                             "finish it with the command that began it, move it away, or choose another --output")  # fmt: skip
    raise UsageError(f"{partial} is where the output is built, and nothing shows that gemq made what is there; it is left as it is",
                     "move it away, or choose another --output")  # fmt: skip


def discard(partial: Path, *inner: str) -> None:
    """Delete what gemq made in its own directory `partial` (`inner`, and its record last); what else is there stays, and the directory with it.

    So do temporary files of any other name. Raises OSError; after the output is published, `discard_after` is what to call.
    """
    if not partial.is_dir():
        return
    for name in inner:
        path = partial / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for path in list(partial.iterdir()):
        if left_over_of(path) in (RECORD, *inner):
            path.unlink()
    if set(os.listdir(partial)) - {RECORD}:
        output.note(f"{partial} holds files that gemq did not write: they are left there")
        return
    (partial / RECORD).unlink(missing_ok=True)
    partial.rmdir()


def discard_after(partial: Path, *inner: str) -> None:
    """As `discard`, once the output is published: what can't be deleted is a warning, for the work itself is done."""
    with _warns_only(partial):
        discard(partial, *inner)


@contextmanager
def _warns_only(where: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        output.warn(f"the output is complete, but {error.filename or where} can't be deleted ({error.strerror}); delete it yourself")


@contextmanager
def resumable_directory(final: Path, kind: str) -> Iterator[Path]:
    """Hold and yield OUT.partial, in which a command keeps what it finished until it publishes it as `final` (`publish_resumable`).

    kind: what the record in it says that the directory is for; one that has files and no such record is refused.
    """
    require_absent(final)
    make_parent(final)
    partial = partial_of(final)
    with locked(partial):
        require_absent(final)  # another process may have published it before it let go of the lock
        require_own(partial, kind)
        with disk_errors(partial):
            claim(partial, kind)
        yield partial


@contextmanager
def held_output(final: Path | None) -> Iterator[None]:
    """Hold the output file `final`, if there is one, against a second gemq that would write it too."""
    if final is None:
        yield
        return
    require_absent(final)
    if not final.parent.is_dir():
        raise UsageError(f"the directory of the output {final} does not exist", "create it, or choose another place")
    with locked(partial_of(final)):
        require_absent(final)
        yield


@contextmanager
def staged_directory(final: Path) -> Iterator[Path]:
    """Yield an empty directory that becomes `final` when the block ends well and vanishes when it doesn't.

    For work that is short enough to start again; `quantize` keeps its own partial directory to resume from.
    """
    require_absent(final)
    make_parent(final)
    partial = partial_of(final)
    with locked(partial), disk_errors(partial):
        require_absent(final)
        require_own(partial, _STAGED)
        discard_staged(final)
        claim(partial, _STAGED)
        staged = partial / _STAGED
        staged.mkdir()
        try:
            yield staged
            publish(staged, final)
        finally:
            with contextlib.suppress(OSError):
                discard_staged(final)


def discard_staged(final: Path) -> None:
    """Delete what a killed `staged_directory` left of `final`; whoever calls this holds the lock, or one that excludes the same processes."""
    if claimed_as(partial_of(final)) == _STAGED:
        discard(partial_of(final), _STAGED)


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

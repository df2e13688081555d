"""Locks between processes, partial directories that gemq did not make, and where an output may be."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gemq import atomic
from gemq.errors import GemqError, StoppedSafely, UsageError
from gemq.output_paths import require_separate

HOLD = """
import sys, time
from pathlib import Path
from gemq import atomic
from gemq.errors import UsageError
try:
    with atomic.locked(Path(sys.argv[1])):
        print("held", flush=True)
        sys.stdin.readline()
except UsageError as error:
    print("refused", error.message, flush=True)
"""


class Process:
    """Another process that asks for the lock on a directory."""

    def __init__(self, directory: Path | str, cwd: Path | None = None) -> None:
        command = [sys.executable, "-c", HOLD, str(directory)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=cwd)
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline()

    @property
    def holds(self) -> bool:
        return self.said == "held\n"

    def end(self) -> None:
        assert self.process.stdin is not None
        if not self.process.stdin.closed:
            self.process.stdin.close()
        self.process.wait(60)


def try_lock(directory: Path | str, cwd: Path | None = None) -> bool:
    """Whether a further process gets the lock; it lets go of it again."""
    process = Process(directory, cwd)
    process.end()
    return process.holds


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Process]:
    process = Process(tmp_path / "out.partial")
    assert process.holds
    yield process
    process.end()


def test_refused_attempts_leave_the_holders_lock_to_it(holder, tmp_path):
    assert [try_lock(tmp_path / "out.partial") for _ in range(3)] == [False, False, False]
    holder.end()
    assert try_lock(tmp_path / "out.partial")
    assert list(tmp_path.iterdir()) == []


def test_the_refusal_names_the_process(holder, tmp_path):
    other = Process(tmp_path / "out.partial")
    other.end()
    assert f"(process {holder.process.pid})" in other.said


def test_one_directory_has_one_lock_however_it_is_spelled(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real" / "state").mkdir()
    (tmp_path / "other").symlink_to("real/state")
    holder = Process(tmp_path / "real" / "state")
    spelled = ["state", "./state", "../real/state", tmp_path / "link" / "state", tmp_path / "other"]
    assert [try_lock(directory, tmp_path / "real") for directory in spelled] == [False] * len(spelled)
    holder.end()


def test_a_killed_holder_does_not_keep_the_lock(tmp_path):
    holder = Process(tmp_path / "out.partial")
    os.kill(holder.process.pid, signal.SIGKILL)
    holder.process.wait()
    assert try_lock(tmp_path / "out.partial")
    assert list(tmp_path.iterdir()) == []


def test_a_lock_file_that_gemq_did_not_make_is_left_there(tmp_path):
    (tmp_path / "out.partial.lock").write_text("notes")
    assert try_lock(tmp_path / "out.partial")
    assert (tmp_path / "out.partial.lock").read_text() == "notes"


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: path.symlink_to("nowhere"), lambda path: os.mkfifo(path)],
                         ids=["a directory", "a link", "a pipe"])  # fmt: skip
def test_what_is_no_lock_file_is_refused(tmp_path, make):
    make(tmp_path / "out.partial.lock")
    with pytest.raises(UsageError), atomic.locked(tmp_path / "out.partial"):
        pass
    assert os.path.lexists(tmp_path / "out.partial.lock")


def test_many_processes_never_hold_one_lock_together(tmp_path):
    """Each adds a line when it gets the lock and one when it lets go: they must alternate, though the file comes and goes."""
    program = """
import os, sys
from pathlib import Path
from gemq import atomic
from gemq.errors import UsageError
log = os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
got = 0
while got < 200:
    try:
        with atomic.locked(Path(sys.argv[1])):
            os.write(log, b"in\\n")
            os.write(log, b"out\\n")
            got += 1
    except UsageError:
        pass
"""
    running = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "state"), str(tmp_path / "log")]) for _ in range(4)]
    assert [process.wait(timeout=120) for process in running] == [0] * 4
    assert (tmp_path / "log").read_text().split() == ["in", "out"] * 800
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log"]


def staged(final: Path) -> None:
    with atomic.staged_directory(final) as folder:
        (folder / "file").write_text("made")


@pytest.mark.parametrize("make", [
    lambda path: (path.mkdir(), (path / "thesis.txt").write_text("years of work")),
    lambda path: path.write_text("years of work"),
    lambda path: (path.mkdir(), (path / atomic.RECORD).write_text("{}")),
    lambda path: (path.mkdir(), (path / "key.json").write_text("{}")),
    lambda path: (path.mkdir(), (path / ".notes.1.tmp").write_text("years of work")),
    lambda path: (path.mkdir(), (path / f".{atomic.RECORD}.1.tmp").mkdir()),
    lambda path: (path.mkdir(), (path / "output").mkdir(), (path / "output" / "thesis.txt").write_text("years of work")),
    lambda path: (path.with_name("elsewhere").mkdir(), path.symlink_to("elsewhere")),
], ids=["a folder", "a file", "a record of something else", "a file named as a command names its own",
        "a hidden file", "a hidden folder", "a folder named as gemq names it", "a link"])  # fmt: skip
@pytest.mark.parametrize("use", [staged, lambda final: atomic.resumable_directory(final, "key.json").__enter__()], ids=["staged", "resumable"])
def test_a_partial_directory_that_gemq_did_not_make_is_refused_and_kept(tmp_path, make, use):
    make(tmp_path / "out.partial")
    before = sorted((path, path.is_file() and path.read_bytes()) for path in tmp_path.rglob("*"))
    with pytest.raises(UsageError):
        use(tmp_path / "out")
    assert sorted((path, path.is_file() and path.read_bytes()) for path in tmp_path.rglob("*")) == before


def test_a_command_goes_on_in_its_own_directory_and_publishes_no_record(tmp_path):
    for _ in range(2):
        with atomic.resumable_directory(tmp_path / "out", "bench") as partial, open(partial / "journal", "a") as file:
            file.write("x")
    with atomic.resumable_directory(tmp_path / "out", "bench") as partial:
        (partial / "key.json").write_text("{}")
        atomic.publish_resumable(partial, tmp_path / "out", "key.json")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [(path.name, path.read_text()) for path in (tmp_path / "out").iterdir()] == [("journal", "xx")]


def test_work_of_another_command_is_not_continued(tmp_path):
    with atomic.resumable_directory(tmp_path / "out", "bench"):
        pass
    with pytest.raises(UsageError, match="bench"), atomic.resumable_directory(tmp_path / "out", "tune"):
        pass


def test_only_temporary_files_of_gemqs_own_names_are_deleted(tmp_path):
    partial = tmp_path / "out.partial"
    atomic.claim(partial, "quantize")
    for name in ("journal.json", ".journal.json.12.tmp", f".{atomic.RECORD}.3.tmp", ".notes.1.tmp", ".journal.json.x.tmp"):
        (partial / name).write_text("text")
    (partial / ".journal.json.7.tmp").mkdir()
    (partial / ".journal.json.8.tmp").symlink_to(tmp_path)
    atomic.discard(partial, "journal.json")
    assert {path.name for path in partial.iterdir()} == {atomic.RECORD, ".notes.1.tmp", ".journal.json.x.tmp", ".journal.json.7.tmp",
                                                         ".journal.json.8.tmp"}  # fmt: skip


@pytest.mark.parametrize("was_there", [False, True])
def test_without_locks_no_lock_file_is_left(tmp_path, monkeypatch, was_there):
    lock = tmp_path / "out.partial.lock"
    if was_there:
        lock.write_text("notes")

    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(UsageError, match="can't be locked"), atomic.locked(tmp_path / "out.partial"):
        pass
    assert lock.exists() == was_there


def test_without_space_for_its_content_no_lock_file_is_left(tmp_path, monkeypatch):
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(UsageError), atomic.locked(tmp_path / "out.partial"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_an_empty_directory_at_its_place_is_used(tmp_path):
    (tmp_path / "out.partial").mkdir()
    staged(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_file_that_a_user_put_into_gemqs_directory_stays(tmp_path):
    with atomic.staged_directory(tmp_path / "out") as folder:
        (folder / "file").write_text("made")
        (folder.parent / "notes.txt").write_text("mine")
    (tmp_path / "out" / "file").unlink()
    (tmp_path / "out").rmdir()
    staged(tmp_path / "out")
    assert (tmp_path / "out.partial" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "out" / "file").read_text() == "made"


def test_unfinished_work_of_another_command_is_kept(tmp_path):
    atomic.claim(tmp_path / "out.partial", "quantize")
    (tmp_path / "out.partial" / "checkpoint").mkdir()
    for use in (staged, lambda final: atomic.resumable_directory(final, "key.json").__enter__()):
        with pytest.raises(UsageError, match="quantize"):
            use(tmp_path / "out")
    assert (tmp_path / "out.partial" / "checkpoint").is_dir()


def test_an_output_that_appeared_meanwhile_is_kept(tmp_path):
    with pytest.raises(UsageError, match="exists already"), atomic.staged_directory(tmp_path / "out"):
        (tmp_path / "out").mkdir()
    with atomic.held_output(tmp_path / "result.json"):
        (tmp_path / "result.json").write_text("mine")
        with pytest.raises(UsageError, match="exists already"):
            atomic.write_new_file(tmp_path / "result.json", "gemq's")
    assert (tmp_path / "result.json").read_text() == "mine"


def test_a_temporary_name_that_is_taken_is_left_alone(tmp_path):
    taken = tmp_path / f".file.{os.getpid()}.tmp"
    taken.write_text("mine")
    atomic.write_file(tmp_path / "file", "gemq's")
    assert (taken.read_text(), (tmp_path / "file").read_text()) == ("mine", "gemq's")


def test_a_file_is_replaced_or_left_as_it_was(tmp_path, monkeypatch):
    atomic.write_file(tmp_path / "file", "old")

    def full(path: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(atomic, "sync_path", full)
    with pytest.raises(StoppedSafely), atomic.disk_errors(tmp_path):
        atomic.write_file(tmp_path / "file", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]


# --- where an output may be


@pytest.fixture
def model(tmp_path: Path) -> Path:
    made = tmp_path / "models" / "model"
    made.mkdir(parents=True)
    (made / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to(made)
    (tmp_path / "around.partial").symlink_to(tmp_path / "models")
    return made


INSIDE: list[Callable[[Path, Path], Path]] = [
    lambda root, model: model / "out",
    lambda root, model: model,
    lambda root, model: model / "deep" / "out",
    lambda root, model: root / "link" / "out",
    lambda root, model: root / "nowhere" / ".." / "models" / "model" / "out",
    lambda root, model: root / "models",
    lambda root, model: root / "around",
    lambda root, model: Path(os.path.relpath(model)) / "out",
]


@pytest.mark.parametrize("place", INSIDE)
def test_an_output_among_the_models_files_or_around_them_is_refused(tmp_path, model, place):
    with pytest.raises(UsageError) as refused:
        require_separate(place(tmp_path, model), None, model)
    assert "--output" in refused.value.next_step


def test_an_output_in_a_sealed_checkpoint_is_refused(tmp_path, model):
    (tmp_path / "sealed" / "deep").mkdir(parents=True)
    (tmp_path / "sealed" / "gemq.seal.json").write_text("{}")
    for place in (tmp_path / "sealed" / "out", tmp_path / "sealed" / "deep" / "out"):
        with pytest.raises(UsageError, match="seal"):
            require_separate(place, model)


@pytest.mark.parametrize("name", ["out", "model-2", "mode", "model.partial"])
def test_an_output_beside_the_model_is_taken(model, name):
    require_separate(model.with_name(name), model)


def test_a_model_that_is_where_an_output_would_be_built_is_refused(tmp_path):
    model = tmp_path / "new.partial"
    model.mkdir()
    with pytest.raises(GemqError):
        require_separate(tmp_path / "new", model)

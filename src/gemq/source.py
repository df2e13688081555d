"""Where the model comes from: a local directory, a commit on the Hub, or the demo model; and the SHA-256 of its files."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Literal

from gemq import output
from gemq.errors import IntegrityError, UsageError
from gemq.positioned import BESIDE_BYTES, pieces

DEFAULT_MODEL = "google/gemma-4-E4B-it"
DEMO_MODEL = "gemma-3-270m"
VALID = ("a directory with config.json and safetensors (./my-model), a model on the Hugging Face Hub (org/name, as in "
         f"{DEFAULT_MODEL}), or the demo model {DEMO_MODEL}")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
_MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Source:
    """A model that can be read now.

    model: as the user named it. directory: where its files are, absolute. revision: the commit, 40 hex digits, for `hub`, else None.
    """

    model: str
    kind: Literal["local", "hub", "demo"]
    directory: Path
    revision: str | None


def default_name(model: str, recipe: str) -> str:
    """What the outputs for `model` and `recipe` are called where no name is given."""
    name = Path(model).name
    if name in ("", ".."):  # ".", "..", "../..": the directory's own name
        name = Path(model).resolve().name
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name) or 'model'}-{recipe}"


def default_search_state(model: str, recipe: str) -> Path:
    """Where a search of `model` with `recipe` keeps what it measured unless told otherwise: in the current directory, whatever the output is."""
    return Path(f"{default_name(model, recipe)}.search")


def resolve(model: str = DEFAULT_MODEL, revision: str | None = None) -> Source:
    """The source that `model` names: what is not here yet is fetched from the Hub, or made (the demo model).

    revision: a branch, a tag or a commit of a model on the Hub. Raises UsageError where there is no such model or it can't be had.
    """
    if model == DEMO_MODEL:
        _no_revision(model, revision, "the demo model")
        if Path(model).is_dir():
            output.warn(f"{model} means the demo model, not the directory of that name here: for that one type ./{model}")
        from gemq.demo import build_demo

        return Source(model, "demo", build_demo().resolve(), None)
    path = Path(model).expanduser()
    if model and path.exists():
        _no_revision(model, revision, "a local directory")
        return Source(model, "local", local_directory(path), None)
    if not _HUB_ID.fullmatch(model):
        raise UsageError(f"there is no directory {model!r}, and it is no name of a model on the Hub either", f"MODEL is {VALID}")
    from gemq.hub import fetch

    directory, commit = fetch(model, revision)
    return Source(model, "hub", directory, commit)


def _no_revision(model: str, revision: str | None, what: str) -> None:
    if revision is not None:
        raise UsageError(f"--revision {revision} makes no sense with {model}, which is {what} and has no commits", "leave --revision out")


def local_directory(path: Path) -> Path:
    """`path`, absolute, if it is a directory with a config.json; raises UsageError otherwise."""
    if not path.is_dir():
        raise UsageError(f"{path} is a file, not a model's directory", f"MODEL is {VALID}")
    if not (path / "config.json").is_file():
        raise UsageError(f"{path} has no config.json, so it is no model", f"MODEL is {VALID}")
    return path.resolve()


def _unseen(done: int = 1, detail: str = "") -> None:
    pass


def _visible_files(directory: Path) -> list[str]:
    found = (path.relative_to(directory) for path in directory.rglob("*") if path.is_file())
    return [name.as_posix() for name in found if not any(part.startswith(".") for part in name.parts)]


def files_as_they_lie(directory: Path) -> str:
    """SHA-256, in hex, over the names, sizes and times of the files below `directory` but hidden ones: another where one was made anew.

    For what is kept between two runs of one command, where reading gigabytes to hash them would cost more than what was kept.
    """
    told = [[name, (status := (directory / name).stat()).st_size, status.st_mtime_ns] for name in sorted(_visible_files(directory))]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def file_hashes(directory: Path, files: Iterable[str] | None = None, *, beside: threading.Event | None = None) -> dict[str, str]:
    """SHA-256, in hex, of files by their name relative to `directory`, sorted by name.

    files: the names; by default every file below the directory but hidden ones. beside: given where other threads work meanwhile; then there is no
    progress bar, and once it is set CancelledError ends the hashing. Raises IntegrityError for a file that can't be read.
    """
    names = sorted(set(_visible_files(directory) if files is None else files))
    try:
        megabytes = sum((directory / name).stat().st_size // _MEGABYTE for name in names)
        with (
            nullcontext(_unseen) if beside is not None else output.progress(f"hashing {directory.name}", megabytes, "MB") as advance,
            ThreadPoolExecutor(max_workers=max(1, min(8, os.cpu_count() or 1, len(names)))) as pool,
        ):
            lock = threading.Lock()

            def digest(name: str) -> str:
                made = hashlib.sha256()
                with FileIO(directory / name) as file:
                    for piece in pieces(file, 4 * _MEGABYTE if beside is None else BESIDE_BYTES):
                        if beside is not None and beside.is_set():
                            raise CancelledError
                        made.update(piece)
                        with lock:
                            advance(len(piece) // _MEGABYTE)
                return made.hexdigest()

            return dict(zip(names, pool.map(digest, names), strict=True))
    except OSError as error:
        raise IntegrityError(f"{error.filename or directory} can't be read: {error.strerror or error}",
                             "check that file and its disk, or fetch the model again") from error

"""The directory in which searches keep what they measured, and the record in it of what gemq made there.

`gemq-search.json` lists every file and folder that gemq made in the directory, each before it is made. What is not listed is the user's: it is
never overwritten and never deleted. The same file counts the looks at each file of records (`looks`): they are spent for good, whatever becomes
of the logs. What is kept is named by a digest of all that determines it, so that searches of several recipes,
calibrations or sources can share a directory without meeting each other's results.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from gemq import atomic, output
from gemq.errors import IntegrityError, UsageError
from gemq.output_paths import require_separate
from gemq.quantize.journal import canonical, discard
from gemq.quantize.seal import SEAL_FILE, read_seal, seal_digest

RECORD_FILE = "gemq-search.json"
_EARLIER = ("sensitivities.json", "trials.json")  # of gemq up to 0.1.0, which did not record all that determined them
_LOG = re.compile(r"trials-[0-9a-f]{12}\.json")
_NOT_OURS = "{} is not what gemq made there: it is left alone"
_ELSEWHERE = "give another --search-state"


class Made(BaseModel):
    """A file or folder that gemq made: the digest of the search's identity that it belongs to and, of a finished checkpoint, its seal."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    identity: str
    seal: str | None = None


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid")
    version: Literal[1] = 1
    made: dict[str, Made] = {}
    looks: dict[str, list[str]] = {}  # digest of a source and its records -> every checkpoint measured on them, in order


def short_digest(identity: Any) -> str:
    """The first 12 hexadecimal digits of the SHA-256 of a JSON value."""
    return hashlib.sha256(canonical(identity)).hexdigest()[:12]


class SearchState:
    """A search's directory; the caller holds its lock while anything is added."""

    def __init__(self, directory: Path, record: _Record) -> None:
        self.directory, self._record = directory, record

    @classmethod
    def open(cls, directory: Path) -> SearchState:
        """What is recorded in `directory`, which need not exist yet. Raises IntegrityError for a record that can't be read."""
        path = directory / RECORD_FILE
        try:
            record = _Record.model_validate_json(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            record = _Record()
        except (OSError, ValidationError) as error:
            raise IntegrityError(f"{path} is not a record that gemq wrote ({type(error).__name__})", _ELSEWHERE) from None
        return cls(directory, record)

    def make(self) -> None:
        """Create the directory; raises UsageError where that is not possible, IntegrityError where logs are there and the record is not."""
        atomic.make_parent(self.directory)
        try:
            self.directory.mkdir(exist_ok=True)
        except OSError as error:
            why = "a file has that name" if isinstance(error, FileExistsError) else error.strerror
            raise UsageError(f"--search-state {self.directory} can't be created ({why})", "choose a directory that you may write to") from None
        if not (self.directory / RECORD_FILE).exists() and any(_LOG.fullmatch(path.name) for path in self.directory.iterdir()):
            raise IntegrityError(f"{self.directory} holds logs of searches and no {RECORD_FILE}, so the looks at their records are not known",
                                 f"restore that file, or {_ELSEWHERE}")  # fmt: skip
        for name in _EARLIER:
            if (self.directory / name).exists() and name not in self._record.made:
                output.note(f"{self.directory / name} is not used: an earlier gemq, or somebody else, wrote it")

    def claim(self, name: str, identity: str) -> Path:
        """The path of `name`, recorded as gemq's; raises UsageError where something has that name that gemq did not make."""
        path = self.directory / name
        if name not in self._record.made:
            for found in (path, atomic.partial_of(path)):
                if found.exists() or found.is_symlink():
                    raise UsageError(f"{found} exists, and gemq has no record that it made it", f"move it away, or {_ELSEWHERE}")
            self._record.made[name] = Made(identity=identity)
            self._save()
        return path

    def finished(self, name: str, seal: str) -> None:
        """Record the seal of the checkpoint `name`."""
        self._record.made[name] = Made(identity=self._record.made[name].identity, seal=seal)
        self._save()

    def seal_of(self, name: str) -> str | None:
        """The recorded seal of a checkpoint, None where it was not finished."""
        made = self._record.made.get(name)
        return None if made is None else made.seal

    def looks(self, key: str) -> tuple[str, ...]:
        """Every checkpoint that was measured on the records `key`, in order."""
        return tuple(self._record.looks.get(key, ()))

    def add_looks(self, key: str, names: Sequence[str]) -> None:
        """Record, on the disk too, that the checkpoints `names` are measured on the records `key`; those that are there keep their place."""
        found = self._record.looks.get(key, [])
        new = [name for name in names if name not in found]
        if new:
            self._record.looks[key] = [*found, *new]
            self._save()

    def names(self, identity: str, prefix: str) -> list[str]:
        """What gemq made for `identity` whose name starts with `prefix`."""
        return sorted(name for name, made in self._record.made.items() if made.identity == identity and name.startswith(prefix))

    def remove(self, name: str) -> None:
        """Delete what gemq made under `name`, an unfinished checkpoint too.

        What is not recorded, or is no longer what gemq made, stays; and so do files that were added to a checkpoint.
        """
        made = self._record.made.get(name)
        if made is None:
            return
        path = self.directory / name
        for found in (path, atomic.partial_of(path)):
            if found.is_symlink():
                output.warn(_NOT_OURS.format(found))
            elif not found.is_dir():
                found.unlink(missing_ok=True)
            elif found == path:
                _remove_checkpoint(found, made.seal)
            else:
                discard(found)
        del self._record.made[name]
        self._save()

    def _save(self) -> None:
        atomic.write_file(self.directory / RECORD_FILE, canonical(self._record.model_dump(mode="json")))


def _remove_checkpoint(directory: Path, seal: str | None) -> None:
    """Delete the files that the seal in `directory` lists, the seal last; nothing where it is not the recorded one (None: any sound seal)."""
    try:
        listed = [file.path for file in read_seal(directory)]
        as_made = seal is None or seal_digest(directory) == seal
    except (IntegrityError, OSError):
        as_made, listed = not any(directory.iterdir()), []  # empty: a removal was interrupted after the seal
    if not as_made:
        output.warn(_NOT_OURS.format(directory))
        return
    folders = sorted({folder for path in listed for folder in PurePosixPath(path).parents if folder.name}, reverse=True)
    links = {folder for folder in folders if (directory / folder).is_symlink()}
    there = [path for path in listed if links.isdisjoint(PurePosixPath(path).parents) and not _is_folder(directory / path)]
    for path in there:
        (directory / path).unlink(missing_ok=True)
    for folder in folders:
        with contextlib.suppress(OSError):  # it is a link, or something of the user's is in it
            (directory / folder).rmdir()
    atomic.discard(directory, SEAL_FILE)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def require_state_apart(state: Path, source: Path, output_directory: Path) -> None:
    """Refuse a state directory inside the source or a sealed checkpoint, whose files it would change, or inside the output to be made."""
    require_separate(state, source, option="--search-state")
    resolved, target = state.resolve(), output_directory.resolve()
    if target in (resolved, *resolved.parents):
        raise UsageError(f"--search-state {state} is the --output {output_directory}, or inside it",
                         "give --search-state a directory outside of it")  # fmt: skip

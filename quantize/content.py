"""The digest of what was measured: a checkpoint's content, whatever its directory is called.

A sealed checkpoint has the content digest that its card names and `gemq verify` prints: the SHA-256 of its seal over every file but card and
measurements. Its files are hashed and compared with the seal first, so that the digest is of the bytes that are read. An unsealed directory has the
SHA-256 of the canonical JSON {name: SHA-256} of the files that a loader reads (`companions.loaded_files`). A manifest lists the same files of a
source, so that a source has one digest, whatever else is stored in its directory.

Times and sizes of files decide nothing between two processes: both can be preserved by a copy. Within one process a digest is computed once and
used again while no file's inode, size, time or time of status change (which no copy can set) differs.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from gemq.errors import IntegrityError
from gemq.quantize.companions import is_loaded, loaded_files
from gemq.quantize.seal import SEAL_FILE, SealedFile, content_digest, read_seal
from gemq.source import file_hashes

_Status = tuple[tuple[str, int, int, int, int, int], ...]
_KNOWN: dict[Path, tuple[_Status, str]] = {}


def files_digest(sha256s: Mapping[str, str]) -> str:
    """The digest of an unsealed directory whose files have these SHA-256 (name -> hex); files that no loader reads don't count."""
    counted = {name: digest for name, digest in sha256s.items() if is_loaded(name)}
    return hashlib.sha256(json.dumps(counted, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def directory_digest(directory: Path) -> str:
    """The digest of the checkpoint in `directory`, sealed or not.

    Raises IntegrityError where a sealed checkpoint's files are not what was sealed, or one can't be read.
    """
    sealed = {file.path: file for file in read_seal(directory)} if (directory / SEAL_FILE).exists() else None
    names = _visible_files(directory) if sealed is not None else loaded_files(directory)
    status = _status(directory, [*names, *([SEAL_FILE] if sealed is not None else [])])
    known = _KNOWN.get(directory.resolve())
    if known is not None and known[0] == status:
        return known[1]
    made = files_digest(file_hashes(directory, names)) if sealed is None else _sealed_digest(directory, sealed, names)
    if _status(directory, [name for name, *_ in status]) != status:
        raise IntegrityError(f"{directory} changed while it was read", "see what writes there, and run the same command again")
    _KNOWN[directory.resolve()] = status, made
    return made


def _sealed_digest(directory: Path, sealed: Mapping[str, SealedFile], names: list[str]) -> str:
    for problem, found in (("is missing", sorted(sealed.keys() - set(names))), ("is not in the seal", sorted(set(names) - sealed.keys()))):
        if found:
            raise IntegrityError(f"{directory} is not what was sealed: {found[0]} {problem}", f"see all of it with gemq verify {directory}")
    for name, digest in file_hashes(directory, names).items():
        if digest != sealed[name].sha256:
            raise IntegrityError(f"{directory} is not what was sealed: {name} has SHA-256 {digest[:16]}…, sealed was {sealed[name].sha256[:16]}…",
                                 "fetch or quantize it again, or remove the seal to measure it as an unsealed model")  # fmt: skip
    return content_digest(sealed.values())


def require_unchanged(directory: Path, digest: str) -> None:
    """Raise IntegrityError where the checkpoint in `directory` is not the one that `digest` was computed of any more."""
    if directory_digest(directory) != digest:
        raise IntegrityError(f"{directory} changed while it was measured", "measure it again, and leave it alone meanwhile")


def _visible_files(directory: Path) -> list[str]:
    """Every file of a sealed checkpoint but the seal; hidden ones, which the Hub's client leaves and no loader reads, are passed over."""
    found = (path.relative_to(directory) for path in directory.rglob("*") if not path.is_dir() or path.is_symlink())
    return sorted(path.as_posix() for path in found if path.as_posix() != SEAL_FILE and not any(part.startswith(".") for part in path.parts))


def _status(directory: Path, names: list[str]) -> _Status:
    def one(name: str) -> tuple[str, int, int, int, int, int]:
        try:
            status = os.stat(directory / name)
        except OSError as error:
            raise IntegrityError(f"{directory / name} can't be read: {error.strerror}", "check that file, or fetch the model again") from None
        if not stat.S_ISREG(status.st_mode):
            raise IntegrityError(f"{directory / name} is not a regular file", "a checkpoint consists of regular files: fetch the model again")
        return name, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns

    return tuple(map(one, names))

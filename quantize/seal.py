"""The seal of a checkpoint: what every file of the folder is, to the byte, in one file written last.

`gemq.seal.json` is canonical JSON: UTF-8, keys sorted, no spaces, files sorted by path. A given folder has one seal, so the SHA-256 of
its bytes (`seal_digest`) names the whole checkpoint, and a reader refuses every other form. The world is closed: what the seal does not
list must not be there. Permissions are sealed as git and the Hub know them (executable or not): a download that makes files
writable for their owner is still the same checkpoint, set-uid bits, a write bit for everybody or an executable bit too many is not.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from threading import Lock

from gemq import output
from gemq.atomic import disk_errors, left_over_of, write_file, write_point
from gemq.errors import IntegrityError, UsageError
from gemq.positioned import BESIDE_BYTES, IN_CACHE_BYTES, pieces

SEAL_FILE = "gemq.seal.json"
CARD_FILE, MEASURED_FILE = "README.md", "measured.json"
REPORTS = (CARD_FILE, MEASURED_FILE)  # what may be written anew about the same content
PROVENANCE_FILE = "provenance.intoto.json"
WRITTEN_LAST = (SEAL_FILE, PROVENANCE_FILE, *REPORTS)  # of the other files
VERSION = 1
_MAX_SEAL_BYTES = 64 << 20
_WORTH_THREADS_BYTES = 8 << 20
_MAX_SIZE = 2**63 - 1
_FETCH_AGAIN = "fetch or copy the checkpoint again; don't use this one"


@dataclass(frozen=True)
class SealedFile:
    """One file as sealed; `size` in bytes, `sha256` in hex, `path` relative with forward slashes."""

    executable: bool
    path: str
    sha256: str
    size: int


@dataclass(frozen=True)
class Difference:
    """One thing that is not as it was sealed or promised: a path or a tensor's name, and what is wrong with it."""

    path: str
    what: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what}"


@dataclass(frozen=True)
class _Found:
    path: str
    full: str
    status: os.stat_result


@dataclass(frozen=True)
class Hashed:
    """The SHA-256 of a file, and its size and time of change (nanoseconds) when it was read."""

    sha256: bytes
    size: int
    changed_ns: int

    def still(self, path: Path) -> bool:
        """Whether the file is what was read, as far as size and time of change tell."""
        status = os.lstat(path)
        return stat.S_ISREG(status.st_mode) and (status.st_size, status.st_mtime_ns) == (self.size, self.changed_ns)


def sha256_of(path: Path) -> Hashed | str:
    """The digest of a file that nobody writes to any more, made while other threads work; or why there is none."""
    status = os.lstat(path)
    digest = _sha256(str(path), status.st_size, lambda count: None, BESIDE_BYTES)
    return digest if isinstance(digest, str) else Hashed(digest, status.st_size, status.st_mtime_ns)


def seal_bytes(files: Iterable[SealedFile]) -> bytes:
    """The one byte form of a seal over `files`."""
    listed = [asdict(file) for file in sorted(files, key=lambda file: file.path)]
    return json.dumps({"files": listed, "version": VERSION}, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def parse_seal(raw: bytes, where: str = SEAL_FILE) -> list[SealedFile]:
    """The files that a seal lists; raises IntegrityError on anything but the canonical form of a sound list."""

    def broken(why: str) -> IntegrityError:
        return IntegrityError(f"{where} is no seal that gemq wrote: {why}", _FETCH_AGAIN)

    if len(raw) > _MAX_SEAL_BYTES:
        raise broken(f"it has {len(raw)} bytes, at most {_MAX_SEAL_BYTES} are valid")
    try:
        document = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise broken(f"it can't be read as JSON ({str(error)[:100]})") from None
    if not isinstance(document, dict) or set(document) != {"files", "version"} or not isinstance(document["files"], list):
        raise broken("it must have a version and a list of files, and nothing else")
    if type(document["version"]) is not int or document["version"] != VERSION:
        raise broken(f"its version is {str(document['version'])[:40]!r}, this gemq knows {VERSION}")
    files = []
    for position, entry in enumerate(document["files"]):
        problem = _entry_problem(entry)
        if problem:
            raise broken(f"file number {position + 1} {problem}")
        files.append(SealedFile(**entry))
    paths = [file.path for file in files]
    if sorted(set(paths)) != paths:
        raise broken("its paths are not sorted, or one stands there twice")
    folders = {parent for path in paths for parent in _parents(path)}
    clash = folders.intersection(paths)
    if clash:
        raise broken(f"{min(clash)!r} is a file and a folder in it")
    if seal_bytes(files) != raw:
        raise broken("it is not in the canonical form")
    return files


def _entry_problem(entry: object) -> str:
    if not isinstance(entry, dict) or set(entry) != {"executable", "path", "sha256", "size"}:
        return "must have executable, path, sha256 and size, and nothing else"
    if not isinstance(entry["path"], str) or path_problem(entry["path"]):
        return f"has the path {str(entry['path'])[:200]!r}: {path_problem(str(entry['path'])) or 'must be text'}"
    if type(entry["executable"]) is not bool:
        return "must say true or false for executable"
    if type(entry["size"]) is not int or not 0 <= entry["size"] <= _MAX_SIZE:
        return "must have a size in bytes"
    if not isinstance(entry["sha256"], str) or not re.fullmatch(r"[0-9a-f]{64}", entry["sha256"]):
        return "must have a SHA-256 of 64 lower-case hex digits"
    return ""


def path_problem(path: str) -> str:
    """Why `path` can't be sealed ("" if it can): it must be relative, stay in the folder, and hide nothing."""
    parts = path.split("/")
    if path == SEAL_FILE:
        return "the seal can't list itself"
    if any(part in ("", ".", "..") for part in parts) or "\\" in path:
        return "it leaves the folder or is not in its plain form"
    if any(part.startswith(".") for part in parts):
        return "hidden files have no place in a checkpoint"
    if any(ord(char) < 32 or ord(char) == 127 or 0xD800 <= ord(char) <= 0xDFFF for char in path):
        return "it is not plain UTF-8 text"
    return ""


def content_digest(files: Iterable[SealedFile]) -> str:
    """SHA-256 of the seal over all of `files` but the reports: how a model card, one of them, can name its checkpoint."""
    return hashlib.sha256(seal_bytes(file for file in files if file.path not in REPORTS)).hexdigest()


def write_seal(
    directory: Path, describe: Callable[[list[SealedFile]], dict[str, bytes]] | None = None, known: Mapping[str, Hashed] | None = None
) -> str:
    """Seal a finished directory, make its files read-only, and return the seal's digest.

    `known` has digests by path, each of which counts while its file has not changed since it was hashed. The last step before the rename.
    `describe` gets the files that are there and gives those that tell of them (name -> bytes): they are written and sealed too. Raises
    IntegrityError where the folder holds anything but regular files with plain names.
    """
    with disk_errors(directory):
        _delete_left_overs(directory)
        found, differences = _scan(directory)
        empty = _unlisted_folders(directory, [file.path for file in found])
        differences += [Difference(folder, "an empty folder can't be sealed") for folder in empty]
        differences += [Difference(file.path, path_problem(file.path)) for file in found if path_problem(file.path)]
        if differences:
            raise IntegrityError(f"{directory} can't be sealed: {differences[0]}", "remove what does not belong in a checkpoint")
        for file in found:
            os.chmod(file.full, 0o555 if file.status.st_mode & 0o111 else 0o444)
        write_point("modes-set")
        kept = {path: hashed for path, hashed in (known or {}).items() if hashed.still(directory / path)}
        others = [file for file in found if file.path not in kept]
        made = dict(zip((file.path for file in others), hash_files([(f.full, f.status.st_size) for f in others], "sealing"), strict=True))
        digests = [kept[file.path].sha256 if file.path in kept else made[file.path] for file in found]
        sealed = []
        for file, digest in zip(found, digests, strict=True):
            if isinstance(digest, str):
                raise IntegrityError(f"{directory} can't be sealed: {file.path} {digest}", "see what else writes there, and try again")
            sealed.append(SealedFile(bool(file.status.st_mode & 0o111), file.path, digest.hex(), file.status.st_size))
        return put_seal(directory, sealed, {} if describe is None else describe(sealed))


def _delete_left_overs(directory: Path) -> None:
    """Delete what a killed run left of the seal, of a report, or of a file that is there; any other hidden file stays, and can't be sealed."""
    for path in list(directory.rglob(".*.tmp")):
        name = left_over_of(path)
        if name is not None and (path.with_name(name).is_file() or (path.parent == directory and name in WRITTEN_LAST)):
            path.unlink()


def put_seal(directory: Path, files: list[SealedFile], more: dict[str, bytes]) -> str:
    """Write the files `more` (name -> bytes) and the seal over them and `files`, which are there and hashed; returns the seal's digest."""
    sealed = [file for file in files if file.path not in more]
    for name, content in more.items():
        write_file(directory / name, content)
        os.chmod(directory / name, 0o444)
        sealed.append(SealedFile(False, name, hashlib.sha256(content).hexdigest(), len(content)))
    raw = seal_bytes(sealed)
    write_file(directory / SEAL_FILE, raw)
    os.chmod(directory / SEAL_FILE, 0o444)
    write_point("sealed")
    return hashlib.sha256(raw).hexdigest()


def read_seal(directory: Path) -> list[SealedFile]:
    """The files that a checkpoint's seal lists; raises IntegrityError if there is no sound seal."""
    return parse_seal(_seal_raw(directory), str(directory / SEAL_FILE))


def seal_digest(directory: Path) -> str:
    """SHA-256 of the seal's bytes: the checkpoint's name. Says nothing of the files; `check_seal` does."""
    return hashlib.sha256(_seal_raw(directory)).hexdigest()


def _seal_raw(directory: Path) -> bytes:
    path = directory / SEAL_FILE
    if not directory.is_dir():
        raise UsageError(f"{directory} is no directory", "give the directory of a checkpoint that gemq wrote")
    raw = read_regular(path, _MAX_SEAL_BYTES + 1)
    if raw is None:
        raise IntegrityError(f"{directory} has no {SEAL_FILE}",
                             "give a checkpoint that gemq wrote (a source has no seal); if this is one, fetch all of its files again")  # fmt: skip
    return raw


def read_regular(path: Path, at_most: int) -> bytes | None:
    """The first `at_most` bytes of a file that may be a stranger's, None where there is none.

    Raises IntegrityError for a link, a pipe or anything else that is no regular file, without waiting for what it might have to say.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise IntegrityError(f"{path} can't be read: {error.strerror}", _FETCH_AGAIN) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise IntegrityError(f"{path} is no regular file", _FETCH_AGAIN)
    with os.fdopen(descriptor, "rb") as file:
        return file.read(at_most)


def check_seal(directory: Path, *, fast: bool = False) -> list[Difference]:
    """Every difference between a folder and its seal, sorted by path; empty when there is none.

    `fast` compares names, kinds, modes, sizes and the shards' headers, and hashes nothing. Raises IntegrityError if there is no sound seal.
    """
    sealed = {file.path: file for file in read_seal(directory)}
    found, differences = _scan(directory)
    present = {file.path: file for file in found}
    odd = {difference.path for difference in differences}
    differences += [Difference(path, "is missing") for path in sealed if path not in present and path not in odd]
    differences += [Difference(path, "is not in the seal") for path in present if path not in sealed]
    differences += [Difference(path, "is a folder that the seal does not know") for path in _unlisted_folders(directory, list(sealed))]
    seal_mode = _mode_problem(os.lstat(directory / SEAL_FILE).st_mode, executable=False)
    differences += [Difference(SEAL_FILE, seal_mode)] if seal_mode else []
    same_size = []
    for path in sorted(sealed.keys() & present.keys()):
        status, expected = present[path].status, sealed[path]
        problem = _mode_problem(status.st_mode, executable=expected.executable)
        if problem:
            differences.append(Difference(path, problem))
        if status.st_size != expected.size:
            differences.append(Difference(path, f"has {status.st_size} bytes, sealed were {expected.size}"))
        else:
            same_size.append(present[path])
    differences += _header_differences(same_size) if fast else _content_differences(same_size, sealed)
    return sorted(differences, key=lambda difference: (difference.path, difference.what))


def _content_differences(files: list[_Found], sealed: dict[str, SealedFile]) -> list[Difference]:
    differences = []
    for file, digest in zip(files, hash_files([(file.full, file.status.st_size) for file in files], "hashing"), strict=True):
        if isinstance(digest, str):
            differences.append(Difference(file.path, digest))
        elif digest.hex() != sealed[file.path].sha256:
            expected = sealed[file.path].sha256
            differences.append(Difference(file.path, f"has other bytes: SHA-256 {digest.hex()[:16]}…, sealed was {expected[:16]}…"))
    return differences


def _header_differences(files: list[_Found]) -> list[Difference]:
    from gemq.quantize.audit import read_shard

    differences = []
    for file in files:
        if file.path.endswith(".safetensors"):
            try:
                read_shard(Path(file.full))
            except IntegrityError as error:
                differences.append(Difference(file.path, error.message))
    return differences


def _mode_problem(mode: int, *, executable: bool) -> str:
    bits = stat.S_IMODE(mode)
    if bits & (stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX):
        return f"has a special mode bit: {bits:04o}"
    if bits & stat.S_IWOTH:
        return f"can be written by everybody: mode {bits:04o}"
    # whoever may read an executable may run it, and nobody may run anything else; a umask takes both away together
    wanted = (bits >> 2) & 0o111 if executable else 0
    if (bits & 0o111) != wanted or not bits & stat.S_IRUSR:
        return f"has mode {bits:04o}, sealed was {'an executable' if executable else 'a file that is not executable'}"
    return ""


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts))]


def _unlisted_folders(directory: Path, paths: list[str]) -> list[str]:
    known = {parent for path in paths for parent in _parents(path)}
    folders = []
    for root, names, _ in os.walk(directory):
        for name in names:
            full = os.path.join(root, name)
            if not os.path.islink(full):
                folders.append(_readable(os.path.relpath(full, directory)))
    return sorted(folder for folder in folders if folder not in known)


def _scan(directory: Path) -> tuple[list[_Found], list[Difference]]:
    """The regular files of a folder but the seal, sorted by path, and everything that is neither a file nor a folder."""
    found, differences, waiting = [], [], [("", str(directory))]
    while waiting:
        prefix, folder = waiting.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError as error:
            differences.append(Difference(prefix.rstrip("/") or ".", f"can't be listed: {error.strerror}"))
            continue
        for entry in entries:
            path = prefix + _readable(entry.name)
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISLNK(status.st_mode):
                differences.append(Difference(path, f"is a symbolic link to {_readable(os.readlink(entry.path))}"))
            elif stat.S_ISDIR(status.st_mode):
                waiting.append((path + "/", entry.path))
            elif not stat.S_ISREG(status.st_mode):
                differences.append(Difference(path, "is neither a regular file nor a folder"))
            elif path != SEAL_FILE:
                found.append(_Found(path, entry.path, status))
    return sorted(found, key=lambda file: file.path), differences


def only_regular(directory: Path) -> bool:
    """Whether a folder holds regular files and folders and nothing else, so that it can be read without surprises."""
    return not _scan(directory)[1]


def _readable(name: str) -> str:
    # bytes that are no UTF-8, and control characters, become text that can be printed and that no seal can list
    text = os.fsencode(name).decode("utf-8", "backslashreplace")
    return "".join(char if char.isprintable() or char == " " else char.encode("unicode_escape").decode() for char in text)


def hash_files(files: list[tuple[str, int]], label: str) -> list[bytes | str]:
    """The SHA-256 of each (path, size in bytes), or why there is none; largest first on all cores, with a progress bar."""
    total_mb = sum(size for _, size in files) // 1_000_000
    lock, rest = Lock(), [0]
    results: list[bytes | str] = [""] * len(files)
    with output.progress(label, total_mb, "MB") as advance:

        def tell(count: int) -> None:
            with lock:
                whole, rest[0] = divmod(rest[0] + count, 1_000_000)
                if whole:
                    advance(whole)

        def one(position: int) -> None:
            results[position] = _sha256(*files[position], tell)

        order = sorted(range(len(files)), key=lambda position: -files[position][1])
        if sum(size for _, size in files) < _WORTH_THREADS_BYTES:
            for position in order:
                one(position)
            return results
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(one, order))
    return results


def _sha256(path: str, size: int, tell: Callable[[int], None], piece_bytes: int = IN_CACHE_BYTES) -> bytes | str:
    digest, done = hashlib.sha256(), 0
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with FileIO(descriptor) as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return "is no regular file any more"
            for piece in pieces(file, min(piece_bytes, size + 1)):
                digest.update(piece)
                done += len(piece)
                tell(len(piece))
    except OSError as error:
        return f"can't be read: {error.strerror}"
    return digest.digest() if done == size else f"changed while it was read: {done} bytes instead of {size}"

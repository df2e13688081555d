"""The seal: one byte form, a closed world, and no edit that it does not find."""

from __future__ import annotations

import hashlib
import json
import os
import random
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from sealed_checkpoint import copy_of, replace_file, write_checkpoint

from gemq.errors import IntegrityError, UsageError
from gemq.quantize import seal
from gemq.quantize.audit import Tensor, read_tensors
from gemq.quantize.seal import SEAL_FILE, SealedFile, check_seal, hash_files, parse_seal, read_seal, seal_bytes, seal_digest, write_seal

EDITS = 2000


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("sealed") / "checkpoint")


@pytest.fixture
def copy(sealed: Path, tmp_path: Path) -> Path:
    return copy_of(sealed, tmp_path / "copy")


def found(directory: Path, **how: bool) -> list[str]:
    return [difference.path for difference in check_seal(directory, **how)]


def test_the_seal_lists_every_file_but_itself_in_canonical_json(sealed: Path) -> None:
    raw = (sealed / SEAL_FILE).read_bytes()
    document = json.loads(raw)
    paths = sorted(str(path.relative_to(sealed)) for path in sealed.rglob("*") if path.is_file() and path.name != SEAL_FILE)
    assert [entry["path"] for entry in document["files"]] == paths
    for entry in document["files"]:
        content = (sealed / entry["path"]).read_bytes()
        assert entry == {"executable": False, "path": entry["path"], "sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    assert raw == json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    assert seal_digest(sealed) == hashlib.sha256(raw).hexdigest()


def test_an_unedited_copy_has_no_difference(copy: Path) -> None:
    assert check_seal(copy) == check_seal(copy, fast=True) == []


def test_files_are_read_only_after_sealing(sealed: Path) -> None:
    assert {stat.S_IMODE(path.stat().st_mode) for path in sealed.rglob("*") if path.is_file()} == {0o444}


@pytest.mark.parametrize("mode", [0o644, 0o600, 0o664, 0o400])
def test_a_download_that_its_owner_may_write_is_the_same_checkpoint(copy: Path, mode: int) -> None:
    for path in copy.rglob("*"):
        if path.is_file():
            path.chmod(mode)
    assert check_seal(copy) == []


@pytest.mark.parametrize("mode", [0o555, 0o544, 0o445, 0o454, 0o646, 0o4444, 0o2444, 0o1444, 0o044])
def test_a_changed_mode_is_a_difference(copy: Path, mode: int) -> None:
    (copy / "config.json").chmod(mode)
    assert found(copy) == ["config.json"]
    assert found(copy, fast=True) == ["config.json"]


def test_the_seal_itself_must_not_be_executable(copy: Path) -> None:
    (copy / SEAL_FILE).chmod(0o555)
    assert found(copy) == [SEAL_FILE]


def test_executables_stay_executable(tmp_path: Path) -> None:
    (tmp_path / "launch.sh").write_text("#!/bin/sh\n")
    (tmp_path / "launch.sh").chmod(0o755)
    write_seal(tmp_path)
    assert read_seal(tmp_path)[0].executable
    assert stat.S_IMODE((tmp_path / "launch.sh").stat().st_mode) == 0o555
    assert check_seal(tmp_path) == []
    for mode in (0o444, 0o545, 0o455, 0o511):
        (tmp_path / "launch.sh").chmod(mode)
        assert found(tmp_path) == ["launch.sh"], oct(mode)


def add_file(copy: Path) -> str:
    (copy / "notes.txt").write_text("x")
    return "notes.txt"


def add_dotfile(copy: Path) -> str:
    (copy / ".hidden").write_text("")
    return ".hidden"


def add_empty_folder(copy: Path) -> str:
    (copy / "tokens" / "deep").mkdir()
    return "tokens/deep"


def add_file_link(copy: Path) -> str:
    (copy / "tokens" / "link").symlink_to(copy / "config.json")
    return "tokens/link"


def add_folder_link(copy: Path) -> str:
    (copy / "folder").symlink_to(copy / "tokens", target_is_directory=True)
    return "folder"


def link_instead_of_file(copy: Path) -> str:
    (copy / "config.json").rename(copy.parent / "config.json")
    (copy / "config.json").symlink_to(copy.parent / "config.json")
    return "config.json"


def link_instead_of_folder(copy: Path) -> str:
    (copy / "tokens").rename(copy.parent / "tokens")
    (copy / "tokens").symlink_to(copy.parent / "tokens")
    return "tokens"


def add_pipe(copy: Path) -> str:
    os.mkfifo(copy / "pipe")
    return "pipe"


def pipe_instead_of_file(copy: Path) -> str:
    (copy / "config.json").unlink()
    os.mkfifo(copy / "config.json")
    return "config.json"


def folder_instead_of_file(copy: Path) -> str:
    (copy / "config.json").unlink()
    (copy / "config.json").mkdir()
    return "config.json"


def remove_file(copy: Path) -> str:
    (copy / "tokens" / "vocabulary.txt").unlink()
    return "tokens/vocabulary.txt"


def add_name_that_is_no_text(copy: Path) -> str:
    (copy / os.fsdecode(b"bad\xff\x1b[31m")).write_text("")
    return "bad\\xff\\x1b[31m"


@pytest.mark.parametrize("edit", [
    add_file, add_dotfile, add_empty_folder, add_file_link, add_folder_link, link_instead_of_file, link_instead_of_folder, add_pipe,
    pipe_instead_of_file, folder_instead_of_file, remove_file, add_name_that_is_no_text])  # fmt: skip
@pytest.mark.parametrize("fast", [False, True])
def test_the_world_is_closed(copy: Path, edit: Callable[[Path], str], fast: bool) -> None:
    path = edit(copy)
    assert path in found(copy, fast=fast)


def test_fast_reads_no_content_but_finds_sizes_and_headers(copy: Path) -> None:
    replace_file(copy / "tokens" / "vocabulary.txt", "größen\n".encode())
    assert found(copy, fast=True) == []
    assert found(copy) == ["tokens/vocabulary.txt"]
    shard = sorted(copy.glob("*.safetensors"))[0]
    raw = shard.read_bytes()
    replace_file(shard, raw.replace(b'"BF16"', b'"BF17"', 1))
    assert found(copy, fast=True) == [shard.name]


@pytest.mark.parametrize("make", [add_dotfile, add_empty_folder, add_file_link, add_folder_link, add_pipe, add_name_that_is_no_text])
def test_what_does_not_belong_is_not_sealed(tmp_path: Path, make: Callable[[Path], str]) -> None:
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "a").write_text("a")
    (tmp_path / "config.json").write_text("{}")
    make(tmp_path)
    with pytest.raises(IntegrityError):
        write_seal(tmp_path)
    assert not (tmp_path / SEAL_FILE).exists()


def test_sealing_again_after_a_kill_gives_the_same_digest(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    first = write_seal(tmp_path)
    (tmp_path / f".{SEAL_FILE}.123.tmp").write_text("half of a se")
    assert write_seal(tmp_path) == first
    assert check_seal(tmp_path) == []


@pytest.mark.parametrize("name", [".notes.1.tmp", ".config.json.x.tmp", f".{SEAL_FILE}.1.tmp/"])
def test_a_hidden_file_of_the_user_is_not_deleted_and_not_sealed(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / ".config.json.7.tmp").write_text("{")  # a kill left it
    mine = tmp_path / name
    if name.endswith("/"):
        mine.mkdir()
    else:
        mine.write_text("mine")
    with pytest.raises(IntegrityError):
        write_seal(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", mine.name}


def entry(path: str, **changed: object) -> dict[str, object]:
    return {"executable": False, "path": path, "sha256": "0" * 64, "size": 1, **changed}


def test_a_seal_can_be_read_back() -> None:
    files = [SealedFile(False, "größe/b", "0" * 64, 3), SealedFile(True, "a", "f" * 64, 0)]
    assert parse_seal(seal_bytes(files)) == sorted(files, key=lambda file: file.path)


@pytest.mark.parametrize("entries", [
    [entry("../config.json")], [entry("/etc/passwd")], [entry("a/../b")], [entry("a//b")], [entry("./a")], [entry("a/")], [entry("")],
    [entry("a\\b")], [entry(".gitattributes")], [entry("a/.b")], [entry(SEAL_FILE)], [entry("a\n")], [entry("b"), entry("a")],
    [entry("a"), entry("a")],
    [entry("a"), entry("a/b")], [entry("a", size=-1)], [entry("a", size=1.0)], [entry("a", size=True)], [entry("a", size=2**63)],
    [entry("a", executable=0)], [entry("a", sha256="F" * 64)], [entry("a", sha256="0" * 63)], [entry("a", more=1)], [{"path": "a"}], ["a"],
    [entry(1)]])  # fmt: skip
def test_an_unsound_seal_is_refused(entries: list[object]) -> None:
    raw = json.dumps({"files": entries, "version": 1}, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    with pytest.raises(IntegrityError):
        parse_seal(raw)


def test_every_other_byte_form_is_refused() -> None:
    raw = seal_bytes([SealedFile(False, "größe", "0" * 64, 1)])
    document = json.loads(raw)
    others = [raw + b"\n", b" " + raw, json.dumps(document).encode(), json.dumps(document, separators=(",", ":")).encode(),
              raw.replace(b'"version":1', b'"version":1.0'), raw.replace(b'"version":1', b'"version":true'),
              raw.replace(b'"version":1', b'"version":2'), raw.replace(b'"size":1', b'"size":1,"size":1'), b"\xef\xbb\xbf" + raw,
              raw.decode().encode("utf-16"), b"", b"null", b"[" * 100_000, b'{"files":[],"version":' + b"9" * 5000 + b"}"]  # fmt: skip
    assert parse_seal(raw)
    for other in others:
        with pytest.raises(IntegrityError):
            parse_seal(other)


def test_no_seal_a_linked_seal_and_no_directory_are_named(copy: Path, tmp_path: Path) -> None:
    (copy / SEAL_FILE).rename(tmp_path / "seal")
    with pytest.raises(IntegrityError, match=r"has no gemq\.seal\.json"):
        check_seal(copy)
    (copy / SEAL_FILE).symlink_to(tmp_path / "seal")
    with pytest.raises(IntegrityError, match="can't be read"):
        check_seal(copy)
    (copy / SEAL_FILE).unlink()
    os.mkfifo(copy / SEAL_FILE)
    with pytest.raises(IntegrityError, match="no regular file"):
        check_seal(copy)
    with pytest.raises(UsageError, match="no directory"):
        check_seal(tmp_path / "nowhere")


class Editor:
    """Random edits of a sealed checkpoint; each changes something."""

    def __init__(self, directory: Path, chance: random.Random) -> None:
        self.directory, self.chance = directory, chance
        self.files = sorted(path for path in directory.rglob("*") if path.is_file())
        self.contents = sorted(path for path in self.files if path.name != SEAL_FILE)

    def flip(self) -> None:
        path = self.chance.choice(self.files)
        raw = bytearray(path.read_bytes())
        bit = self.chance.randrange(8 * len(raw))
        raw[bit // 8] ^= 1 << bit % 8
        replace_file(path, bytes(raw))

    def truncate(self) -> None:
        path = self.chance.choice(self.files)
        raw = path.read_bytes()
        replace_file(path, raw[: self.chance.randrange(len(raw))])

    def append(self) -> None:
        path = self.chance.choice(self.files)
        replace_file(path, path.read_bytes() + self.chance.randbytes(self.chance.randint(1, 9)))

    def rename(self) -> None:
        path = self.chance.choice(self.files)
        path.rename(path.with_name(path.name + self.chance.choice(["x", ".bak", "~", " "])))

    def add(self) -> None:
        name = self.chance.choice([".x", "x.py", "model-x.safetensors", "tokens/y", "new/z"])
        (self.directory / name).parent.mkdir(exist_ok=True)
        (self.directory / name).write_bytes(self.chance.randbytes(self.chance.randrange(4)))

    def link(self) -> None:
        path = self.chance.choice(self.files)
        target = self.directory.parent / "elsewhere"
        target.unlink(missing_ok=True)
        path.rename(target)
        path.symlink_to(target)

    def remove(self) -> None:
        self.chance.choice(self.files).unlink()

    def mode(self) -> None:
        self.chance.choice(self.files).chmod(self.chance.choice([0o555, 0o544, 0o446, 0o4444]))

    def swap_files(self) -> None:
        one, other = self.chance.sample(self.contents, 2)
        first, second = one.read_bytes(), other.read_bytes()
        replace_file(one, second)
        replace_file(other, first)

    def swap_tensors(self) -> None:
        tensors = list(read_tensors(self.directory)[0].values())
        one = self.chance.choice(tensors)
        same = [tensor for tensor in tensors if (tensor.dtype, tensor.shape) == (one.dtype, one.shape)
                and self.bytes_of(tensor) != self.bytes_of(one)]
        if not same:
            return self.swap_tensors()
        other = self.chance.choice(same)
        first, second = self.bytes_of(one), self.bytes_of(other)
        self.put(one, second)
        self.put(other, first)

    def edit_scale(self) -> None:
        scales = [tensor for name, tensor in read_tensors(self.directory)[0].items() if name.endswith("weight_scale")]
        scale = self.chance.choice(scales)
        raw = bytearray(self.bytes_of(scale))
        at = 2 * self.chance.randrange(len(raw) // 2)
        raw[at] ^= self.chance.randint(1, 255)  # the low byte of a bfloat16: less than one part in a hundred
        self.put(scale, bytes(raw))

    @staticmethod
    def bytes_of(tensor: Tensor) -> bytes:
        return tensor.file.read_bytes()[tensor.start : tensor.start + tensor.nbytes]

    @staticmethod
    def put(tensor: Tensor, raw: bytes) -> None:
        whole = bytearray(tensor.file.read_bytes())
        whole[tensor.start : tensor.start + tensor.nbytes] = raw
        replace_file(tensor.file, bytes(whole))


EDIT_NAMES = ["flip", "flip", "flip", "truncate", "append", "rename", "add", "link", "remove", "mode", "swap_files", "swap_tensors",
              "edit_scale"]  # fmt: skip


@pytest.mark.slow
def test_two_thousand_random_edits_are_all_found_and_no_copy_is_accused(sealed: Path, tmp_path: Path) -> None:
    chance, missed, accused = random.Random(20261129), [], 0
    for number in range(EDITS):
        directory = copy_of(sealed, tmp_path / str(number))
        if number % 20 == 0:
            accused += len(check_seal(directory))
        name = EDIT_NAMES[number % len(EDIT_NAMES)]
        getattr(Editor(directory, chance), name)()
        try:
            if not check_seal(directory):
                missed.append((number, name))
        except IntegrityError:
            pass
        for path in sorted(directory.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        directory.rmdir()
    assert missed == []
    assert accused == 0


def test_large_files_are_hashed_at_the_same_time_and_the_largest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [5_000_000, 30_000_000, 20_000_000, 40_000_000]
    files = []
    for number, size in enumerate(sizes):
        (tmp_path / str(number)).write_bytes(bytes([number]) * size)
        files.append((str(tmp_path / str(number)), size))
    barrier, started, hash_one = threading.Barrier(2), [], seal._sha256

    def meet(path: str, size: int, tell: Callable[[int], None]) -> bytes | str:
        started.append(size)
        barrier.wait(timeout=30)  # breaks unless two files are under way at once
        return hash_one(path, size, tell)

    monkeypatch.setattr(seal, "_sha256", meet)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    digests = hash_files(files, "hashing")
    assert digests == [hashlib.sha256(bytes([number]) * size).digest() for number, size in enumerate(sizes)]
    assert sorted(started[:2]) == [30_000_000, 40_000_000]
    assert started[-1] == 5_000_000 or started[-2] == 5_000_000

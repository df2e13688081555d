"""A model of what a disk holds after a power cut, for runs in this process.

A file's bytes are on the disk as of its last fsync or fdatasync, a directory's names as of the directory's last fsync; what changed since may be
there or not. `PowerCut` records both by standing in for os.fsync and os.fdatasync, and takes images of a folder at every instant that can
matter: before and after each of these calls, and at each write point. Three kinds of image are taken:

- `least`: nothing but what was synced;
- `all`: everything, as after a kill;
- `some`: a random part of what was not synced: each block of 4 KiB old or new, each size old or new, each change of names done or undone. A rename
  is done or undone in one.

What it does not model: a disk that lies about fsync, and bytes that were synced and changed afterwards without a write.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from gemq import atomic

Key = tuple[int, int]  # device and inode
_BLOCK = 4096


@dataclass(frozen=True)
class Image:
    """A folder after a power cut: the bytes of each file by its path, None for a directory. `label`: the instant and the kind of image."""

    label: str
    content: dict[str, bytes | None]

    @property
    def digest(self) -> str:
        """Equal for equal images."""
        made = hashlib.sha256()
        for path, data in sorted(self.content.items()):
            made.update(f"{path}\0{-1 if data is None else len(data)}\0".encode() + (data or b""))
        return made.hexdigest()

    def restore(self, root: Path) -> None:
        """Make `root` what the image is."""
        shutil.rmtree(root)
        root.mkdir()
        for path, data in sorted(self.content.items()):
            if data is None:
                (root / path).mkdir()
            else:
                (root / path).write_bytes(data)


class PowerCut:
    """Records what is durable below `root` and takes images of it; `ignored(path)` tells of which path a sync is left out, as if by a bug."""

    def __init__(self, root: Path, *, seeds: int = 2, ignored: Callable[[str], bool] = lambda path: False) -> None:
        self.root, self._seeds, self._ignored = root, seeds, ignored
        self._files: dict[Key, bytes] = {}
        self._names: dict[Key, dict[str, Key]] = {}
        self._held: dict[Key, int] = {}  # open, so that no inode's number is given to another file
        self._lock = threading.RLock()
        self.images: dict[str, Image] = {}  # by digest: the distinct ones
        self._root = self._hold(str(root))
        for key, path in list(self._below(self._root)):  # what is there at first is durable
            self._record(key, path)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Stand in for the calls that make things durable, and take images, while the block runs."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", self._sync)
            patch.setattr(os, "fdatasync", self._sync)
            patch.setattr(atomic, "on_write_point", self.take)
            yield

    def take(self, instant: str) -> list[Image]:
        """Take this instant's images; those that no earlier one equals are kept."""
        with self._lock:
            for key, path in list(self._below(self._root)):
                self._hold(path)
                assert key in self._held
            made = [self._image(f"{instant}, least", None, least=True), self._image(f"{instant}, all", None, least=False)]
            made += [self._image(f"{instant}, some {seed}", random.Random(f"{instant} {len(self.images)} {seed}")) for seed in range(self._seeds)]
            for image in made:
                self.images.setdefault(image.digest, image)
            return made

    def close(self) -> None:
        """Close what is held open."""
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()

    def _sync(self, descriptor: int) -> None:
        with self._lock:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            self.take(f"before the sync of {Path(path).name}")
            if not self._ignored(path):
                self._record(self._hold(f"/proc/self/fd/{descriptor}"), path)
                self.take(f"after the sync of {Path(path).name}")

    def _hold(self, path: str) -> Key:
        status = os.stat(path)
        key = (status.st_dev, status.st_ino)
        if key not in self._held:
            self._held[key] = os.open(path, os.O_RDONLY)
        return key

    def _record(self, key: Key, path: str) -> None:
        if self._is_folder(key):
            self._names[key] = self._list(key)
        else:
            self._files[key] = self._read(key)

    def _is_folder(self, key: Key) -> bool:
        return stat.S_ISDIR(os.fstat(self._held[key]).st_mode)

    def _list(self, key: Key) -> dict[str, Key]:
        folder = f"/proc/self/fd/{self._held[key]}"
        found = {}
        for name in os.listdir(folder):
            try:
                found[name] = self._hold(f"{folder}/{name}")
            except FileNotFoundError:  # another thread renamed it
                continue
        return found

    def _read(self, key: Key) -> bytes:
        return os.pread(self._held[key], os.fstat(self._held[key]).st_size, 0)

    def _below(self, key: Key) -> Iterator[tuple[Key, str]]:
        folder = f"/proc/self/fd/{self._held[key]}"
        yield key, folder
        for name, inner in self._list(key).items():
            if self._is_folder(inner):
                yield from self._below(inner)
            else:
                yield inner, f"{folder}/{name}"

    def _image(self, label: str, draw: random.Random | None, *, least: bool = True) -> Image:
        folders = {key for key in self._held if self._is_folder(key)}
        old, new = {key: self._names.get(key, {}) for key in folders}, {key: self._list(key) for key in folders}
        if draw is None:
            names = old if least else new
        else:
            done = self._drawn(draw, old, new)
            names = {key: {name: inner for name, inner in [*((n, i) for n, i in old[key].items() if (key, n) not in done),
                                                            *((n, i) for n, i in new[key].items() if (key, n) in done or old[key].get(n) == i)]}
                     for key in folders}  # fmt: skip
        content: dict[str, bytes | None] = {}
        waiting = [("", self._root)]
        while waiting:
            prefix, key = waiting.pop()
            for name, inner in names.get(key, {}).items():
                if inner in folders:
                    content[prefix + name] = None
                    waiting.append((f"{prefix}{name}/", inner))
                else:
                    content[prefix + name] = self._bytes(inner, draw, least)
        return Image(label, content)

    def _drawn(self, draw: random.Random, old: dict[Key, dict[str, Key]], new: dict[Key, dict[str, Key]]) -> set[tuple[Key, str]]:
        """The names whose change is done: those that one inode, or one name, ties together are done together."""
        changed = [(key, name) for key in sorted(old) for name in sorted({*old[key], *new[key]}) if old[key].get(name) != new[key].get(name)]
        group = {place: number for number, place in enumerate(changed)}
        by_inode: dict[Key, tuple[Key, str]] = {}
        for place in changed:
            for inner in (old[place[0]].get(place[1]), new[place[0]].get(place[1])):
                if inner is not None:
                    first = by_inode.setdefault(inner, place)
                    keep, drop = group[first], group[place]
                    group = {each: keep if number == drop else number for each, number in group.items()}
        choices = {number: draw.random() < 0.5 for number in sorted(set(group.values()))}
        return {place for place, number in group.items() if choices[number]}

    def _bytes(self, key: Key, draw: random.Random | None, least: bool) -> bytes:
        old = self._files.get(key, b"")
        if draw is None:
            return old if least else self._read(key)
        new = self._read(key)
        if old == new:
            return old
        size = len(draw.choice([old, new]))
        blocks = []
        for start in range(0, size, _BLOCK):
            block = draw.choice([old, new])[start : start + _BLOCK]
            blocks.append(block.ljust(min(_BLOCK, size - start), b"\0"))
        return b"".join(blocks)[:size]

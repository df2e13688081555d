"""Where the model comes from: a local directory, a commit on the Hub, or the demo model."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gemq import output

_PIECE_BYTES = 1 << 22


def file_hashes(directory: Path, files: Iterable[str] | None = None) -> dict[str, str]:
    """SHA-256, in hex, of files by their name relative to `directory`, sorted by name.

    files: the names; by default every file below the directory but hidden ones.
    """
    if files is None:
        found = (path.relative_to(directory) for path in directory.rglob("*") if path.is_file())
        files = [name.as_posix() for name in found if not any(part.startswith(".") for part in name.parts)]
    names = sorted(set(files))
    sizes = {name: (directory / name).stat().st_size for name in names}
    with (
        output.progress(f"hashing {directory.name}", sum(sizes.values()) // 1_000_000, "MB") as advance,
        ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool,
    ):
        def digest(name: str) -> str:
            made = hashlib.sha256()
            with open(directory / name, "rb") as file:
                while piece := file.read(_PIECE_BYTES):
                    made.update(piece)
            advance(sizes[name] // 1_000_000)
            return made.hexdigest()

        return dict(zip(names, pool.map(digest, names), strict=True))

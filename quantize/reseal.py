"""A new checkpoint that shares a sealed one's files and has other reports on them."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from pathlib import Path

from gemq import atomic
from gemq.errors import UsageError
from gemq.output_paths import require_separate
from gemq.quantize.seal import SealedFile, put_seal


def place(source: Path, target: Path, mode: int) -> None:
    """Make `target` the file `source` with the permissions `mode`: a hard link where it has them already, else a copy.

    A link is the same file, so a change of its permissions would change the source's too.
    """
    if stat.S_IMODE(source.stat().st_mode) == mode:
        with contextlib.suppress(OSError):  # another disk, one without links, or another user's file
            os.link(source, target)
            return
    shutil.copyfile(source, target)
    target.chmod(mode)


def reseal(checkpoint: Path, to: Path, kept: list[SealedFile], made: dict[str, bytes]) -> str:
    """Publish `to`: the files `kept` of `checkpoint` (`place`), and `made` (name -> bytes), under a seal of its own.

    Returns the seal's digest. Raises UsageError where there is no directory to write into.
    """
    if not to.parent.is_dir():
        raise UsageError(f"{to.parent} is not a directory to write {to.name} into", "choose another --output, or make that directory")
    require_separate(to, checkpoint)
    with atomic.staged_directory(to) as staged:
        for file in kept:
            target = staged / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            place(checkpoint / file.path, target, 0o555 if file.executable else 0o444)
        return put_seal(staged, kept, made)

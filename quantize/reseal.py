"""A new checkpoint that shares a sealed one's files and has other reports on them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from gemq import atomic
from gemq.errors import UsageError
from gemq.output_paths import require_separate
from gemq.quantize.seal import SealedFile, put_seal


def reseal(checkpoint: Path, to: Path, kept: list[SealedFile], made: dict[str, bytes]) -> str:
    """Publish `to`: the files `kept` of `checkpoint`, linked where the disk can, and `made` (name -> bytes), under a seal of its own.

    Returns the seal's digest. Raises UsageError where there is no directory to write into.
    """
    if not to.parent.is_dir():
        raise UsageError(f"{to.parent} is not a directory to write {to.name} into", "choose another --output, or make that directory")
    require_separate(to, checkpoint)
    with atomic.staged_directory(to) as staged:
        for file in kept:
            target = staged / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(checkpoint / file.path, target)
            except OSError:  # another disk, or one without links
                shutil.copyfile(checkpoint / file.path, target)
            target.chmod(0o555 if file.executable else 0o444)
        return put_seal(staged, kept, made)

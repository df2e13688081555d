"""Whether an output may be where a command was asked to write it: not among a model's files, and not around them."""

from __future__ import annotations

import os
from pathlib import Path

from gemq.atomic import partial_of
from gemq.errors import UsageError

_SEAL_FILE = "gemq.seal.json"  # gemq.quantize.seal's, which this module may not import


def require_separate(output: Path, *models: Path | None, option: str = "--output") -> None:
    """Refuse an output that is inside a model's directory or around it, or inside any sealed checkpoint; so is OUT.partial, where it is built.

    models: the directories of what the command reads (None is left out). Links and `..` are resolved. Raises UsageError with a place that is valid.
    """
    for model in filter(None, models):
        outside = os.path.relpath(Path(os.path.realpath(model)).parent / (output.name or "out"))
        advice = f"choose a place outside of it, such as {option} {outside}"
        for path in (output, partial_of(output)):
            if is_inside(path, model):
                raise UsageError(f"{option} {output} is inside the model's directory {model}, and would become one of its files", advice)
            if is_inside(model, path):
                raise UsageError(f"the model's directory {model} is inside {option} {output} (or where that is built, {partial_of(output)})",
                                 f"choose another {option}")  # fmt: skip
    for parent in Path(os.path.realpath(output)).parents:
        if (parent / _SEAL_FILE).exists():
            raise UsageError(f"{option} {output} is inside the sealed checkpoint {parent.name}, where one more file breaks the seal",
                             f"choose an {option} outside of it")  # fmt: skip


def is_inside(path: Path, directory: Path) -> bool:
    """Whether `path`, which need not exist, is `directory` or below it, however either of them is spelled."""
    try:
        wanted = os.stat(directory)
    except OSError:
        return False
    real = Path(os.path.realpath(path))
    for each in (real, *real.parents):
        try:
            if os.path.samestat(os.stat(each), wanted):
                return True
        except OSError:
            continue
    return False

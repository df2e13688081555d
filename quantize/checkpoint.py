"""The files of a checkpoint beside its shards: config with the quantization's description, what a server needs, recipe, manifest."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gemq.atomic import left_over_of, write_file, write_point
from gemq.errors import UsageError
from gemq.quantize.architectures import QUANTIZATION_KEYS
from gemq.quantize.card import reports
from gemq.quantize.companions import companion_files
from gemq.quantize.output_head import state_tying
from gemq.quantize.plan import Plan
from gemq.quantize.provenance import MANIFEST_FILE, PROVENANCE_FILE, RECIPE_FILE, statement, statement_bytes
from gemq.quantize.seal import SealedFile


def checkpoint_config(plan: Plan) -> dict[str, Any]:
    """The source's config.json with the quantization's description, and an untied head where the head has weights of its own.

    A copy of the embedding that the source stores as its head is not its own, until one of the two is quantized (output_head.py).
    """
    skeleton, quantized = plan.skeleton, plan.quantized_matrices
    config, text_key = copy.deepcopy(skeleton.config), skeleton.architecture.text_config
    for level in (config, *([config[text_key]] if text_key else [])):
        for key in QUANTIZATION_KEYS:
            level.pop(key, None)  # null: a quantized source is refused
    config["quantization_config"] = plan.storage.quantization_config(plan)
    own = skeleton.output_head.own or "lm_head" in quantized or (skeleton.output_head.stored and "model.embed_tokens" in quantized)
    state_tying(config, skeleton.complete, text_key, tied=not own)
    return config


def manifest_bytes(manifest: dict[str, Any]) -> bytes:
    """The manifest as it is written, for people to read too."""
    return (json.dumps(manifest, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def file_names(plan: Plan, source: Path, shards: list[str]) -> set[str]:
    """Every file of a checkpoint before it is sealed, by its relative path, without the index of its `shards`."""
    copied = {path.as_posix() for path in companion_files(source)}
    return {*shards, *copied, "config.json", *plan.storage.more_files(plan), RECIPE_FILE, MANIFEST_FILE}


def require_own_files(directory: Path, is_own: Callable[[str], bool]) -> None:
    """Raise UsageError if an unfinished checkpoint holds a file for whose relative path `is_own` is false: it would be sealed, or deleted.

    Temporary files of a killed gemq count as the file that they would have become.
    """
    for path in sorted(directory.rglob("*")):
        relative = path.relative_to(directory)
        name = relative.with_name(left_over_of(path) or path.name).as_posix()
        if (path.is_symlink() or not path.is_dir()) and not is_own(name):
            raise UsageError(f"{path} is not a file of this quantization, and may be yours",
                             "move it to another place, and run the same command again")  # fmt: skip


def write_companions(plan: Plan, source: Path, directory: Path, manifest: dict[str, Any]) -> None:
    """Put every file but shards and seal into `directory`."""
    for relative in companion_files(source):
        target = directory / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / relative, target)
        target.chmod(0o755 if (source / relative).stat().st_mode & 0o111 else 0o644)
    write_point("companions-copied")
    write_file(directory / "config.json", json.dumps(checkpoint_config(plan), indent=2, ensure_ascii=False) + "\n")
    for name, document in plan.storage.more_files(plan).items():
        write_file(directory / name, json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    write_file(directory / RECIPE_FILE, plan.recipe.to_yaml())
    write_file(directory / MANIFEST_FILE, manifest_bytes(manifest))


def sealed_as(name: str, raw: bytes) -> SealedFile:
    """How a seal lists a file of these bytes."""
    return SealedFile(False, name, hashlib.sha256(raw).hexdigest(), len(raw))


def accounts(
    files: list[SealedFile], manifest: dict[str, Any], recipe: dict[str, Any], measurements: list[dict[str, Any]], inherited: dict[str, Any],
    measured_as: str | None = None,
) -> dict[str, bytes]:
    """What describes the checkpoint's other `files`: provenance, and the card and measurements that cover it too (name -> bytes).

    `measured_as` is the content digest under which the measurements were made, where these files are sealed under another one (`card.rebound`).
    """
    raw = statement_bytes(statement(files, manifest, recipe))
    told = [*files, sealed_as(PROVENANCE_FILE, raw)]
    return {PROVENANCE_FILE: raw, **reports(manifest, recipe, told, measurements, inherited, measured_as)}

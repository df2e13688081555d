"""The files of a checkpoint that hold no tensors, compared with the source's: config, tokenizer, templates, processor, code, recorded digests.

gemq copies config.json and changes two things in it: the description of the quantization, and `tie_word_embeddings` where that says something
else of the checkpoint's head than is stored. All other values must be equal as JSON; a value that is spelled out where the source leaves it to
a default is another config. The files that `companion_files` names are copied byte for byte. Whatever else is in a checkpoint was put there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gemq.errors import IntegrityError
from gemq.quantize.architectures import QUANTIZATION_KEYS, refuse_quantized
from gemq.quantize.audit import INDEX_FILE, Tensor, read_config, strict_json
from gemq.quantize.companions import companion_files
from gemq.quantize.pairs import Pairs
from gemq.quantize.provenance import MANIFEST_FILE, PROVENANCE_FILE, RECIPE_FILE
from gemq.quantize.seal import REPORTS, SEAL_FILE, Difference
from gemq.quantize.stored import first_difference
from gemq.source import file_hashes

_WRITTEN = {"config.json", MANIFEST_FILE, RECIPE_FILE, PROVENANCE_FILE, SEAL_FILE, *REPORTS}
_GPTQ_CONFIG = "quantize_config.json"
_TIE = "tie_word_embeddings"
_HEAD = re.compile(r"(?:.*\.)?lm_head\.[a-z_]+$")
_TABLE = re.compile(r"(?:.*\.)?embed_tokens\.weight$")
_PIECE_BYTES = 1 << 20
_LONGEST_SHOWN = 80


def file_differences(pairs: Pairs, source_tensors: dict[str, Tensor]) -> list[Difference]:
    """Where config, files and recorded digests of a checkpoint are not what gemq makes of this source.

    Raises UsageError for a source that is quantized, IntegrityError for one whose config or files can't be read.
    """
    refuse_quantized(pairs.source_config)  # a checkpoint compared with itself proves nothing
    config = read_config(pairs.directory)
    companions = [path.as_posix() for path in companion_files(pairs.source)]
    shards = sorted({tensor.file.name for tensor in source_tensors.values()})
    return [*_config_differences(config, pairs), *_companion_differences(config, pairs, companions),
            *_digest_differences(pairs, shards, companions)]  # fmt: skip


def _config_differences(config: dict[str, Any], pairs: Pairs) -> list[Difference]:
    stored, own = _head_of(pairs)
    ours, theirs = _levels(config), _levels(pairs.source_config)
    ours[0].pop("quantization_config", None)
    for level, meant in zip(ours, theirs, strict=False):
        said = level.get(_TIE)
        if said is not meant.get(_TIE) and ((said is False and stored) or (said is True and not own)):
            level[_TIE] = meant[_TIE] = None  # what gemq writes where the source says something else
    merged, original = (levels[0] | ({"text_config": levels[1]} if levels[1:] else {}) for levels in (ours, theirs))
    found = list(_value_differences(merged, original))
    stated = [level.get(_TIE) for level in _levels(config)]
    if own and (True in stated or False not in stated):
        found.append(f"{_TIE} does not say false, and the checkpoint has a head that is not the embedding")
    return [Difference("config.json", what) for what in found]


def _levels(config: dict[str, Any]) -> list[dict[str, Any]]:
    """A config and its text_config, where it has one, as copies without keys that say null of a quantization."""
    text = config.get("text_config")
    return [{key: value for key, value in level.items() if key not in QUANTIZATION_KEYS or value is not None}
            for level in (config, *([text] if isinstance(text, dict) else []))]  # fmt: skip


def _head_of(pairs: Pairs) -> tuple[bool, bool]:
    """(whether the checkpoint stores a head, whether that is another matrix than its embedding)."""
    tensors = pairs.structure.tensors
    heads = [name for name in tensors if _HEAD.match(name)]
    tables = [tensors[name] for name in tensors if _TABLE.match(name)]
    copied = len(heads) == len(tables) == 1 and heads[0].endswith(".weight") and not first_difference(tensors[heads[0]], tables[0])
    return bool(heads), bool(heads) and not copied


def _value_differences(ours: Any, theirs: Any, key: str = "") -> Iterator[str]:
    """Each value of a JSON document that differs, by its path; 1, 1.0 and true are three values."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name in sorted({*ours, *theirs}):
            path = f"{key}.{name}" if key else name
            if name not in theirs:
                yield f"{path} is {_shown(ours[name])}, the source has no such key"
            elif name not in ours:
                yield f"{path} is missing, the source has {_shown(theirs[name])}"
            else:
                yield from _value_differences(ours[name], theirs[name], path)
    elif json.dumps(ours, sort_keys=True) != json.dumps(theirs, sort_keys=True):
        yield f"{key} is {_shown(ours)}, the source has {_shown(theirs)}"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 1] + "…"


def _companion_differences(config: dict[str, Any], pairs: Pairs, companions: list[str]) -> Iterator[Difference]:
    directory, source = pairs.directory, pairs.source
    tensors = {tensor.file for tensor in pairs.structure.tensors.values()} | {directory / INDEX_FILE}
    found = {path.relative_to(directory).as_posix(): path for path in sorted(directory.rglob("*")) if path.is_file() and path not in tensors}
    for name in companions:
        if name not in found:
            yield Difference(name, "is missing, and gemq copies it from the source")
    for name, path in found.items():
        if name in _WRITTEN or any(part.startswith(".") for part in Path(name).parts):  # a hidden file is the seal's to name
            continue
        if name == _GPTQ_CONFIG and _is_gptq(config):
            if strict_json(path.read_bytes(), name) != config["quantization_config"]:
                yield Difference(name, "is not the quantization_config of config.json")
        elif not (source / name).is_file() or name == _GPTQ_CONFIG:
            yield Difference(name, "is a file that neither the source has nor gemq writes")
        elif not same_bytes(path, source / name):
            yield Difference(name, "is not the source's file, byte for byte")


def _is_gptq(config: dict[str, Any]) -> bool:
    stated = config.get("quantization_config")
    return isinstance(stated, dict) and stated.get("quant_method") == "gptq"


def same_bytes(path: Path, other: Path) -> bool:
    """Whether `other` is a file with the bytes of `path`."""
    if not other.is_file() or path.stat().st_size != other.stat().st_size:
        return False
    with open(path, "rb") as ours, open(other, "rb") as theirs:
        while piece := ours.read(_PIECE_BYTES):
            if piece != theirs.read(_PIECE_BYTES):
                return False
    return True


def _digest_differences(pairs: Pairs, shards: list[str], companions: list[str]) -> list[Difference]:
    """Where the source's files are not those whose SHA-256 the manifest records; what gemq does not read may have changed."""
    try:
        recorded = _recorded_files(pairs.directory)
    except IntegrityError as error:
        return [Difference(MANIFEST_FILE, error.message)]
    needed = ["config.json", *shards]
    differences = [Difference(name, f"is a file of the source that {MANIFEST_FILE} does not record: the checkpoint was made from another one")
                   for name in needed if name not in recorded]  # fmt: skip
    names = [name for name in [*needed, *companions] if name in recorded]
    for name, digest in file_hashes(pairs.source, names).items():
        if digest != recorded[name]:
            differences.append(Difference(name, f"is not the source's file that {MANIFEST_FILE} records: SHA-256 {digest[:16]}… in the source, "
                                                f"{recorded[name][:16]}… there"))  # fmt: skip
    return differences


def _recorded_files(directory: Path) -> dict[str, str]:
    path = directory / MANIFEST_FILE
    if not path.is_file():
        raise IntegrityError("is missing: nothing records which source the checkpoint was made from")
    manifest = strict_json(path.read_bytes(), MANIFEST_FILE)
    source = manifest.get("source") if isinstance(manifest, dict) else None
    files = source.get("files") if isinstance(source, dict) else None
    if not isinstance(files, dict) or not all(isinstance(digest, str) for digest in files.values()):
        raise IntegrityError("records no SHA-256 of the source's files, so nothing says which source the checkpoint was made from")
    return files

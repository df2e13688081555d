"""Which files of a source go into its checkpoint: what a server reads, by name; everything else is left out, and listed.

An allow-list, since a folder of a model can hold anything: adapters, the optimizer's and the trainer's state, older checkpoints, the same
weights for other frameworks. None of that is part of what is quantized, measured and sealed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from gemq.errors import IntegrityError, UsageError
from gemq.quantize.provenance import MANIFEST_FILE, RECIPE_FILE
from gemq.quantize.seal import WRITTEN_LAST
from gemq.shard_headers import INDEX_FILE, shard_files
from gemq.shards import ShardReader
from gemq.source import file_hashes

# transformers' names (utils/__init__.py, tokenization_utils_base.py, the tokenizers' vocab_files_names), code of the model's own
_LOADED = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "*.model", "*.tiktoken", "tekken.json", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json", "audio_tokenizer_config.json", "chat_template.json", "*.jinja",
    "modeling_*.py", "configuration_*.py", "tokenization_*.py", "processing_*.py", "*_processing_*.py", "feature_extraction_*.py",
)  # fmt: skip
_LICENCES = (
    "license*", "licence*", "notice*", "copying*", "copyright*", "use_policy*", "*terms_of_use*", "prohibited_use_policy*",
)  # fmt: skip
_TEMPLATES = "additional_chat_templates"  # the one folder that transformers reads beside a model: named chat templates
_NOT_SERVED = ("*.safetensors", "*.bin")  # whatever else a pattern above lets through
_STATED = ("config.json", INDEX_FILE)  # read beside the shards, and written again for a checkpoint
_QUANTIZED = ("quantize_config.json", "hf_quant_config.json")  # what a quantized checkpoint may state beside config.json
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth")
# read for what the checkpoint's own are made of, or gemq's note on a model that it made
_READ = {*_STATED, "README.md", "gemq-demo.json"}


def companion_files(source: Path) -> Iterator[Path]:
    """The files of `source` that are copied into a checkpoint: relative paths, sorted.

    Raises IntegrityError for a link to nothing, which a server would stop at.
    """
    for path in sorted(source.iterdir()):
        if path.name == _TEMPLATES and path.is_dir():
            yield from (template.relative_to(source) for template in sorted(path.glob("*.jinja")) if template.is_file())
        elif _is_served(path.name) and not path.is_dir():
            if not path.is_file():
                raise IntegrityError(f"{path} is a link to a file that is not there, or not a file", "fetch or copy the source again")
            yield path.relative_to(source)


def left_out(source: Path, weights: ShardReader) -> list[str]:
    """What of `source` is neither quantized nor copied: its entries by name, sorted, a folder with a slash at its end."""
    used = _READ | {path.name for path in weights.files} | {path.parts[0] for path in companion_files(source)}
    return sorted(f"{path.name}/" if path.is_dir() else path.name for path in source.iterdir() if path.name not in used)


def files_read(source: Path, weights: ShardReader) -> list[str]:
    """The files of `source` that a checkpoint is made from: config, index, shards, what is copied, and the model card.

    Raises IntegrityError for a file to copy that is no JSON though its name says so: a server would stop at it.
    """
    copied = list(companion_files(source))
    for path in copied:
        if path.suffix == ".json":
            _require_json(source / path)
    stated = [name for name in (*_STATED, *_QUANTIZED, "README.md") if (source / name).is_file()]
    return sorted({*stated, *(path.name for path in weights.files), *(path.as_posix() for path in copied)})


def source_hashes(source: Path, weights: ShardReader) -> dict[str, str]:
    """SHA-256, in hex, of `files_read` by name: the identity of a source."""
    return file_hashes(source, files_read(source, weights))


def is_loaded(name: str) -> bool:
    """Whether a loader reads the file `name` of a checkpoint: weights, configs, tokenizer, templates, code; not licences, cards or gemq's own files.

    By its name alone: which of several files of weights are read, the directory says (`loaded_files`).
    """
    folder, _, last = name.rpartition("/")
    if folder:
        return folder == _TEMPLATES and last.endswith(".jinja")
    return name in (*_STATED, *_QUANTIZED) or _matches(name, _LOADED) or (not name.startswith(".") and _has_name(name, _WEIGHTS))


def may_be_written(name: str) -> bool:
    """Whether a checkpoint of gemq's could hold a file of this relative path, whatever its source and recipe."""
    written = (*_STATED, *_QUANTIZED, RECIPE_FILE, MANIFEST_FILE, *WRITTEN_LAST)
    return is_loaded(name) or name in written or ("/" not in name and _is_served(name))


def loaded_files(directory: Path) -> list[str]:
    """The files of an unsealed `directory` that a loader reads, sorted: those of `files_read` that `is_loaded`.

    Without safetensors weights under their usual names, whatever else is named like weights counts. Raises IntegrityError for an index or a link
    that can't be followed.
    """
    try:
        weights = [path.name for path in shard_files(directory)]
    except UsageError:
        weights = [path.name for path in directory.iterdir() if _has_name(path.name, _WEIGHTS) and not path.name.startswith(".")]
    stated = [name for name in (*_STATED, *_QUANTIZED) if os.path.lexists(directory / name)]
    return sorted({*stated, *weights, *filter(is_loaded, (path.as_posix() for path in companion_files(directory)))})


def _is_served(name: str) -> bool:
    return _matches(name, (*_LOADED, *_LICENCES))


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return not name.startswith(".") and not _has_name(name, _NOT_SERVED) and _has_name(name, patterns)


def _has_name(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name.lower() if "*" in pattern else name, pattern) for pattern in patterns)


def _require_json(path: Path) -> None:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise IntegrityError(
            f"{path} can't be read as JSON ({str(error)[:100]}), and a server reads it", "fetch or copy that file again"
        ) from None

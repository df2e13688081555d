"""Which output head a source is served with: its embedding, or a head of its own; and what the checkpoint's config says of it.

A config may say `tie_word_embeddings: true` (by itself, or by its class's default) while the files hold an `lm_head.weight` with other values;
Google's 31B QAT checkpoint does. Readers then disagree: transformers 5 and vLLM 0.32 (`maybe_untie_word_embeddings`) use the head in the
files, vLLM 0.26 and transformers 4 the embedding. gemq takes the head in the files, which the source's current readers use and its
evaluation scores, and writes `tie_word_embeddings: false` at the top level and in text_config, so that every reader of the checkpoint uses it too.

A head equal to its embedding, byte for byte, is only a copy: it is kept, and the config stays tied, which every reader takes to mean the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gemq.errors import IntegrityError, UsageError
from gemq.quantize.architectures import Architecture
from gemq.shard_headers import TensorSpec
from gemq.shards import ShardReader

_PIECE_BYTES = 8 << 20


@dataclass(frozen=True)
class OutputHead:
    """`name`: the module, as the source spells it. `stored`: the files hold its weight. `own`: that weight is not the embedding's."""

    name: str
    stored: bool
    own: bool
    note: str = ""  # for the user, where config.json and files disagree


def find_head(
    directory: Path, row: Architecture, complete: Mapping[str, Any], inventory: Mapping[str, TensorSpec], reader: ShardReader | None, prefix: str
) -> OutputHead:
    """The head of the source in `directory`, whose config with its class's defaults is `complete`.

    Raises UsageError for two heads, IntegrityError where config.json wants a head and the files hold none.
    """
    stored = [name for name in row.head_names if f"{name}.weight" in inventory]
    says_tied = bool(complete.get("tie_word_embeddings", True))
    if len(stored) > 1:
        raise UsageError(f"the source holds two heads, {stored[0]}.weight and {stored[1]}.weight: readers take one or the other",
                         "remove the one that was not trained")  # fmt: skip
    if not stored:
        if not says_tied:
            raise IntegrityError(
                f"config.json says that the head is not tied (tie_word_embeddings false), and {directory} has no {row.head_names[0]}.weight",
                "fetch the source again; if its head is the embedding, set tie_word_embeddings to true",
            )
        return OutputHead(row.head_names[row.prefixes.index(prefix)], stored=False, own=False)
    head, embedding = f"{stored[0]}.weight", f"{prefix}embed_tokens.weight"
    if not says_tied:
        return OutputHead(stored[0], stored=True, own=True)
    if reader is None or _equal(reader, head, embedding):
        return OutputHead(stored[0], stored=True, own=False)
    note = (f"config.json says that the head is tied to the embedding, and the files hold another {head}: the checkpoint takes that head, "
            "as transformers 5 and vLLM 0.32 do, and says tie_word_embeddings false")  # fmt: skip
    return OutputHead(stored[0], stored=True, own=True, note=note)


def _equal(reader: ShardReader, one: str, other: str) -> bool:
    first, second = reader.info(one), reader.info(other)
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    for start in range(0, first.nbytes, _PIECE_BYTES):
        length = min(_PIECE_BYTES, first.nbytes - start)
        if not torch.equal(reader.read_bytes(first, start, length), reader.read_bytes(second, start, length)):
            return False
    return True


def state_tying(config: dict[str, Any], complete: Mapping[str, Any], text_key: str | None, *, tied: bool) -> None:
    """Make `config` say whether the head is tied, at its top level and in its text config alike; what says so already is left as it is."""
    levels = [(config, complete)] + ([(config[text_key], complete[text_key])] if text_key else [])
    for level, meant in levels:
        if bool(meant.get("tie_word_embeddings", True)) != tied:
            level["tie_word_embeddings"] = tied

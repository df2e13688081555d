"""From documents to token windows: the tokenizer of a checkpoint, its limits, and the cut.

A *document* is a sequence of token ids. A *window* is BOS and the ids that follow it, at most `length` in all. Gemma's perplexity without
BOS is meaningless, and so are statistics gathered without it: every window starts with exactly one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemq.calibration.special_tokens import beyond_vocabulary
from gemq.config_file import read_complete_config, text_config
from gemq.errors import UsageError

SHORTEST_WINDOW = 16  # tokens with BOS; what a tail below that says about activations is mostly about BOS


@dataclass(frozen=True)
class TokenLimits:
    """What a checkpoint's config says about token ids. `bos` is None where the model has none (Qwen3's tokenizer)."""

    vocab_size: int
    max_length: int | None
    bos: int | None
    eos: int | None


def read_limits(model_dir: Path, tokenizer: Any | None = None) -> TokenLimits:
    """Vocabulary size, longest sequence, BOS and EOS of a checkpoint.

    A multimodal config keeps them in `text_config`; what config.json leaves out is the class's default. A tokenizer knows better than the
    config whether texts start with BOS: where it is given, its BOS and EOS count. Raises UsageError if there is no vocabulary size.
    """
    config = read_complete_config(model_dir)
    merged = {**config, **{key: value for key, value in text_config(config).items() if value is not None}}
    size = merged.get("vocab_size")
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise UsageError(f"{model_dir / 'config.json'} has vocab_size {size!r}, a positive number is needed",
                         "fetch or copy that file again")
    longest = merged.get("max_position_embeddings")
    if tokenizer is not None:
        bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    else:
        bos, eos = _first_id(merged.get("bos_token_id")), _first_id(merged.get("eos_token_id"))
    return TokenLimits(size, longest if isinstance(longest, int) else None, bos, eos)


def _first_id(value: object) -> int | None:
    if isinstance(value, list) and value:
        value = value[0]
    return value if isinstance(value, int) else None


def load_tokenizer(model_dir: Path) -> Any:
    """The checkpoint's own tokenizer, read from its directory only; raises UsageError if it can't be."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
    except Exception as error:  # transformers raises anything from OSError to a Rust panic's Exception here
        raise UsageError(f"{model_dir} has no tokenizer that can be read ({short(error)})",
                         "add the model's tokenizer files, or give calibration data as token ids") from error


def encode_text(tokenizer: Any, text: str, where: str) -> list[int]:
    """The ids of `text` without added special tokens; `where` names the text in errors."""
    try:
        # verbose=False: the tokenizer would warn that a whole file is longer than the model's context
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    except Exception as error:
        raise UsageError(f"{where}: the text can't be tokenized ({short(error)})", "is it valid Unicode?") from error


def check_ids(ids: object, limits: TokenLimits, where: str, tokenizer: Any | None = None) -> list[int]:
    """`ids`, when it is a list of ids within the vocabulary; raises UsageError naming `where`, the first bad one and what `tokenizer` calls it."""
    if not isinstance(ids, list):
        raise UsageError(f"{where}: token ids must be a list of whole numbers, got {short(ids)}", "write [2, 818, …]")
    for position, value in enumerate(ids):
        if not isinstance(value, int) or isinstance(value, bool):
            raise UsageError(f"{where}: token {position} is {short(value)}, a whole number is needed", "write [2, 818, …]")
        if not 0 <= value < limits.vocab_size:
            what, advice = beyond_vocabulary(value, limits.vocab_size, tokenizer)
            raise UsageError(f"{where}: token {position} has id {value}, {what}", advice)
    return ids


def cut_windows(documents: Iterable[Sequence[int]], length: int, *, bos: int | None, eos: int | None = None,
                pack: bool = False) -> Iterator[tuple[int, ...]]:
    """Windows of at most `length` tokens, each BOS and then consecutive ids of one document.

    documents: token ids, with or without BOS. A BOS inside a document starts a new one, so that no window has two.
    A document longer than `length - 1` gives several windows; a last window shorter than SHORTEST_WINDOW (and than `length`) is dropped,
    any other keeps its own length. With `pack`, all documents become one stream in which EOS follows each of them (unless it ends so
    already, or the model has no EOS), and windows straddle them. Lazy: takes no more documents than the windows asked for need.
    """
    head = () if bos is None else (bos,)
    room = length - len(head)
    if room < 1:
        raise UsageError(f"a calibration length of {length} leaves no room beside BOS", "use --length 16 or more")
    shortest = min(SHORTEST_WINDOW, length)
    rest: list[int] = []
    for document in _split_at(documents, bos):
        rest += document
        if pack and eos is not None and document and document[-1] != eos:
            rest.append(eos)
        start = 0
        while len(rest) - start >= room:
            yield (*head, *rest[start : start + room])
            start += room
        rest = rest[start:]
        if not pack:
            if len(rest) + len(head) >= shortest and rest:
                yield (*head, *rest)
            rest = []
    if len(rest) + len(head) >= shortest and rest:
        yield (*head, *rest)


def _split_at(documents: Iterable[Sequence[int]], bos: int | None) -> Iterator[list[int]]:
    for document in documents:
        piece: list[int] = []
        for token in document:
            if token == bos:
                yield piece
                piece = []
            else:
                piece.append(token)
        yield piece


def short(thing: object) -> str:
    """One line about a value or an exception, cut at 200 characters."""
    text = " ".join((str(thing) if isinstance(thing, Exception) else repr(thing)).split())
    return text if len(text) <= 200 else text[:197] + "…"

"""Special tokens that stand in a user's text as literals (`<bos>`, `<eos>`, `<start_of_turn>`), and ids that a model has no embedding for.

A tokenizer turns such a literal into the token itself. What gemq does, in evaluation text and in calibration texts and chats alike:

- BOS at the start of a text is dropped: every window gets one of its own, and two would change every probability after them. In a chat that goes for
  each message.
- Every other one counts as the token that it names, and is reported with how often. A BOS inside begins a new document in calibration, and stays in
  its window in evaluation.
- The placeholder of an image, a recording or a video is refused: no text model can embed it, and a multimodal one expects the medium.

A byte order mark that was left at the start of a text is dropped too.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from gemq import output
from gemq.errors import UsageError

_MEDIA = re.compile(r"(image|audio|video)(_soft)?_token|\|(image|audio|video)(_pad)?\|")


def without_leading_bos(tokenizer: Any, text: str) -> str:
    """`text` without BOS literals and a byte order mark at its very start."""
    bos = getattr(tokenizer, "bos_token", None)
    text = text.removeprefix("\ufeff")
    while bos and text.startswith(bos):
        text = text[len(bos):]
    return text


def clean_text(tokenizer: Any, text: str, where: str, seen: Counter[str]) -> str:
    """`text` without a leading BOS; the special tokens that it holds as literals are counted into `seen`.

    Raises UsageError naming `where` for the placeholder of an image, a recording or a video.
    """
    text = without_leading_bos(tokenizer, text)
    for literal in _pattern(tokenizer).findall(text):
        if _is_placeholder(tokenizer, literal):
            raise UsageError(f"{where}: the text holds {literal}, the placeholder of an image, a recording or a video, and there is none",
                             "remove it from the text; a chat holds media as {\"type\": \"image\", \"path\": …} parts")  # fmt: skip
        seen[literal] += 1
    return text


def warn_of(seen: Counter[str], name: str, bos_note: str, tokenizer: Any) -> None:
    """Report the special tokens that were seen as text in `name`; `bos_note` says what a BOS inside does there."""
    if not seen:
        return
    bos = getattr(tokenizer, "bos_token", None)
    listed = ", ".join(f"{literal} {count} times{f' ({bos_note})' if literal == bos else ''}" for literal, count in sorted(seen.items()))
    output.warn(f"{name} holds special tokens as text, which count as those tokens: {listed}. Remove them if they are not meant so")


def beyond_vocabulary(token: int, size: int, tokenizer: Any | None = None) -> tuple[str, str]:
    """What an id is that a model of `size` tokens has no embedding for, and what to do next."""
    what = f"beyond the vocabulary of {size} tokens (ids 0 to {size - 1})"
    name = str(tokenizer.convert_ids_to_tokens(token)) if tokenizer is not None and 0 <= token < len(tokenizer) else None
    if name is not None and _is_placeholder(tokenizer, name):
        return (f"{what}: {name} in the tokenizer, the placeholder of media, and this model takes text alone",
                "leave the images and recordings out, or use the multimodal checkpoint")  # fmt: skip
    if name is not None:
        return f"{what}: {name!r} in the tokenizer", "use the tokenizer that belongs to the checkpoint"
    if token == size:
        return (f"{what}: the first that is missing, as Gemma 3's placeholder of an image is in a text-only model",
                "leave out records with images, or use the multimodal checkpoint")  # fmt: skip
    return what, "was this data tokenized for another model? use this model's tokenizer"


def _pattern(tokenizer: Any) -> re.Pattern[str]:
    """What finds the tokenizer's special tokens in a text."""
    made: re.Pattern[str] | None = getattr(tokenizer, "_gemq_special_pattern", None)
    if made is None:
        added = getattr(tokenizer, "added_tokens_decoder", {})
        names = {str(token.content) for token in added.values() if token.special} | set(map(str, tokenizer.all_special_tokens))
        made = re.compile("|".join(re.escape(name) for name in sorted(names - {""}, key=lambda name: (-len(name), name))) or r"(?!)")
        tokenizer._gemq_special_pattern = made
    return made


def _is_placeholder(tokenizer: Any, literal: str) -> bool:
    named = {str(getattr(tokenizer, name, None)) for name in ("image_token", "audio_token", "video_token")}
    return literal in named or _MEDIA.search(literal) is not None

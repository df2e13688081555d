"""Gemma's tokenizer from the tokens and scores of a GGUF file.

SentencePiece's BPE joins, again and again, the leftmost pair of neighbours whose joined text is the piece with the highest score. The
`tokenizers` library wants that as a list of merges: for every piece, every way to cut it into two pieces, ordered by the piece's score.
Pieces that SentencePiece calls user-defined (runs of spaces, line breaks, tags) are matched in the text before BPE, the longest first,
and never joined with their neighbours: they are added tokens here, matched after the spaces became U+2581. Control tokens are found in
text too, as in Google's own tokenizer.json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gemq import atomic

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
SPACE = "\u2581"
SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>", "mask_token": "<mask>"}
# what a decoder leaves out with skip_special_tokens; `<unused…>` and the tags are text
_HIDDEN = {*SPECIAL.values(), "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>"}


def merges_from_scores(tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """The merges, first one first, that make byte-pair encoding follow SentencePiece's scores.

    Only normal pieces are made and only from normal pieces: user-defined ones are cut out of the text before.
    """
    pieces = {token: score for token, score, kind in zip(tokens, scores, kinds, strict=True) if kind == NORMAL}
    found: list[tuple[str, str]] = []
    for piece in sorted((piece for piece in pieces if len(piece) > 1), key=pieces.__getitem__, reverse=True):
        for cut in range(1, len(piece)):
            left = piece[:cut]
            if left in pieces and (right := piece[cut:]) in pieces:
                found.append((left, right))
    return found


def tokenizer_from_pieces(tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> Tokenizer:
    """A `tokenizers.Tokenizer` whose ids are the positions in `tokens`; puts BOS first unless add_special_tokens is False."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    # llama.cpp writes the spaces of user-defined pieces as spaces
    tokens = [token.replace(" ", SPACE) for token in tokens]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = merges_from_scores(tokens, scores, kinds)
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    made = Tokenizer(model)
    made.normalizer = normalizers.Replace(" ", SPACE)
    made.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    added = [(token, kind) for token, kind in zip(tokens, kinds, strict=True) if kind in (CONTROL, USER_DEFINED)]
    made.add_tokens([AddedToken(token, special=token in _HIDDEN, normalized=kind == USER_DEFINED and token not in _HIDDEN)
                     for token, kind in added])
    bos = SPECIAL["bos_token"]
    known = [(bos, vocabulary[bos])]
    made.post_processor = processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=known)
    return made


def write_tokenizer(directory: Path, tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int], max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json into `directory`."""
    made = tokenizer_from_pieces(tokens, scores, kinds)
    atomic.write_file(directory / "tokenizer.json", made.to_str())
    config = {
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        **SPECIAL,
        "model_max_length": max_length,
        "padding_side": "left",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    atomic.write_file(directory / "tokenizer_config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
    atomic.write_file(directory / "special_tokens_map.json", json.dumps(SPECIAL, indent=2, sort_keys=True) + "\n")

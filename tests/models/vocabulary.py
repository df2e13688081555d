"""Small Gemma-like tokenizers: BPE over text whose spaces are `▁`, bytes for whatever has no token, BOS (id 2) always first."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

# The order is the ids. 0 to 3 are Gemma's own; the others stand near the end of Gemma's vocabulary and come first in these small ones.
GEMMA3_SPECIALS = (
    "<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>",
)  # fmt: skip
GEMMA4_SPECIALS = (
    "<pad>", "<eos>", "<bos>", "<unk>", "<|image|>", "<|audio|>", "<|video|>", "<|image>", "<image|>", "<|audio>", "<audio|>",
    "<|turn>", "<turn|>",
)  # fmt: skip

GEMMA3_TEMPLATE = """\
{{ bos_token }}{% for message in messages %}<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}<start_of_image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
GEMMA4_TEMPLATE = """\
{{ bos_token }}{% for message in messages %}<|turn>{{ 'model' if message.role == 'assistant' else message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}<|image|>{% elif part.type == 'audio' %}<|audio|>{% elif part.type == 'video' %}<|video|>\
{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<turn|>
{% endfor %}{% if add_generation_prompt %}<|turn>model
{% endif %}"""

_SMALL_TEXT = """\
The river below the mill froze in the first week of December, and for nine days nobody in the village could grind any corn. The miller
sat by the window, counted the sacks that stood along the wall, and wrote the number into a book that his father had begun. He had learned
to write late and he wrote slowly: every figure was as large as a coin. On the tenth day the wind turned to the south. There was a sound like
that of a heavy door, then another, and when the children came running down the hill the wheel was already moving, a little at a time, with
pieces of ice on its paddles. They shouted to each other over the noise of the water. "It is going!" they said. "It is going again!" In the
evening there was bread in all the houses, and the miller wrote: nine days, forty-two sacks, south wind. What he thought of the winter
he did not write down, because the book had no column for it. Many years later his granddaughter found the book in a chest, between a torn
map and three letters, and she understood from the size of the figures how cold it must have been. She began to count: 1, 2, 3, 4, 5, 6, 7,
8, 9, 10 days; 11, 12, 13 sacks; 1874, 1890, 1903. Some of the pages were missing. On others the ink had become so pale that one could read
them only against the light, where the water mark, a small crown over a wheel, shone through the words. She copied what she could, in a clear
hand, and at the end of her copy she put the sentence with which her grandfather had closed each year: the water came back, and so did we.
"""


def train_tokenizer(text: str, vocab_size: int, specials: Sequence[str]):  # type: ignore[no-untyped-def]
    """A `tokenizers.Tokenizer` of exactly `vocab_size` tokens: specials, 256 bytes, printable ASCII, then the merges learned from `text`.

    Raises ValueError where the text is too short for that many merges.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    def shell(model: models.BPE) -> Tokenizer:
        tokenizer = Tokenizer(model)
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
        return tokenizer

    learner = shell(models.BPE())
    alphabet = ["▁", "\n", *(chr(code) for code in range(33, 127))]
    wanted = vocab_size - len(specials) - 256
    trainer = trainers.BpeTrainer(vocab_size=wanted, initial_alphabet=alphabet, limit_alphabet=len(alphabet), show_progress=False)
    learner.train_from_iterator(text.splitlines(keepends=True), trainer)
    learned = json.loads(learner.to_str())["model"]
    tokens = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(learned["vocab"], key=learned["vocab"].__getitem__)]
    if len(tokens) != vocab_size or len(set(tokens)) != vocab_size:
        raise ValueError(f"the text gives {len(tokens)} tokens, {vocab_size} were asked for: use more text or a smaller vocabulary")
    merges = [tuple(merge) for merge in learned["merges"]]
    vocab = {token: at for at, token in enumerate(tokens)}
    tokenizer = shell(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", 2)])
    return tokenizer


def save_gemma3_tokenizer(out: Path, vocab_size: int, text: str = _SMALL_TEXT) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja of a Gemma 3 into `out`."""
    names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    _save(out, train_tokenizer(text, vocab_size, GEMMA3_SPECIALS), names, GEMMA3_TEMPLATE)


def save_gemma4_tokenizer(out: Path, vocab_size: int, text: str = _SMALL_TEXT) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja of a Gemma 4 into `out`."""
    names = {
        "image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>",
        "audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>",
    }  # fmt: skip
    _save(out, train_tokenizer(text, vocab_size, GEMMA4_SPECIALS), names, GEMMA4_TEMPLATE)


def _save(out: Path, tokenizer, names: dict[str, str], template: str) -> None:  # type: ignore[no-untyped-def]
    from transformers import PreTrainedTokenizerFast

    roles = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", extra_special_tokens=names, **roles)
    wrapped.chat_template = template
    wrapped.save_pretrained(out)

"""A tiny Gemma 3 as GGUF, in two parts, in place of the demo model's package: same keys and tensor names, one layer, 300 pieces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize

HIDDEN, FFN, HEADS, HEAD_DIM, LAYERS = 64, 96, 2, 32, 1
SPACE = "\u2581"
NORMAL_PIECES = [f"{SPACE}a", "ab", "aa", f"{SPACE}ab", "abab", SPACE, "a", "b", "c", "<"]
USER_DEFINED_PIECES = ["\n", "\n\n", "  ", "   ", "<b>"]
CONTROL_PIECES = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>"]


def pieces() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and kinds as llama.cpp writes them: user-defined pieces with plain spaces."""
    bytes_ = [f"<0x{number:02X}>" for number in range(256)]
    tokens = CONTROL_PIECES + USER_DEFINED_PIECES + bytes_ + NORMAL_PIECES
    kinds = [3] * len(CONTROL_PIECES) + [4] * len(USER_DEFINED_PIECES) + [6] * len(bytes_) + [1] * len(NORMAL_PIECES)
    scores = [-1000.0] * (len(tokens) - len(NORMAL_PIECES)) + [-float(rank) for rank in range(len(NORMAL_PIECES))]
    return tokens, scores, kinds


def shapes() -> dict[str, tuple[int, ...]]:
    """The tensors by their names in GGUF."""
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(pieces()[0]), HIDDEN), "output_norm.weight": (HIDDEN,)}
    layer = {
        "attn_q": (HEADS * HEAD_DIM, HIDDEN), "attn_k": (HEAD_DIM, HIDDEN), "attn_v": (HEAD_DIM, HIDDEN),
        "attn_output": (HIDDEN, HEADS * HEAD_DIM), "ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN), "ffn_down": (HIDDEN, FFN),
        "attn_q_norm": (HEAD_DIM,), "attn_k_norm": (HEAD_DIM,), "attn_norm": (HIDDEN,), "post_attention_norm": (HIDDEN,),
        "ffn_norm": (HIDDEN,), "post_ffw_norm": (HIDDEN,),
    }
    return found | {f"blk.{number}.{name}.weight": shape for number in range(LAYERS) for name, shape in layer.items()}


def write_parts(directory: Path, *, architecture: str = "gemma3", without: str = "", extra: str = "",
                count: int = 2) -> tuple[list[Path], dict[str, np.ndarray]]:
    """Write the file in `count` parts; returns their paths and the values that its tensors stand for, by GGUF name, float32.

    without: a key or tensor to leave out. extra: a tensor to add.
    """
    directory.mkdir(parents=True, exist_ok=True)
    whole = directory / "tiny.gguf"
    writer = GGUFWriter(whole, architecture)
    numbers = {
        f"{architecture}.context_length": 128, f"{architecture}.embedding_length": HIDDEN, f"{architecture}.block_count": LAYERS,
        f"{architecture}.feed_forward_length": FFN, f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": 1, f"{architecture}.attention.key_length": HEAD_DIM,
        f"{architecture}.attention.sliding_window": 16, "tokenizer.ggml.bos_token_id": 2, "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 0,
    }
    for key, value in numbers.items():
        if key != without:
            writer.add_uint32(key, value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32(f"{architecture}.rope.freq_base", 1e6)
    tokens, scores, kinds = pieces()
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.scores", scores)
    writer.add_array("tokenizer.ggml.token_type", kinds)
    random, values = np.random.default_rng(0), {}
    for name, shape in {**shapes(), **({extra: (HIDDEN,)} if extra else {})}.items():
        if name == without:
            continue
        data = random.standard_normal(shape).astype(np.float32) / 8
        if len(shape) == 1:
            values[name] = data
            writer.add_tensor(name, 1 + data)
        else:
            packed = quantize(data, GGMLQuantizationType.Q8_0)
            values[name] = dequantize(packed, GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    raw = whole.read_bytes()
    size = -(-len(raw) // count)
    parts = [directory / f"tiny.gguf.part{number:02d}" for number in range(count)]
    for number, part in enumerate(parts):
        part.write_bytes(raw[number * size : (number + 1) * size])
    whole.unlink()
    return parts, values

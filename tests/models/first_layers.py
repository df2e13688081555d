"""The first layers of a real Gemma 3 as a model of its own: real weights, small enough to be quantized several times in a test."""

from __future__ import annotations

import json
import re
from pathlib import Path

from gemq.shards import ShardReader

from .weights import save_weights, write_json


def save_first_layers(model: Path, out: Path, *, layers: int, vocabulary: int) -> Path:
    """Write the first `layers` layers of the text-only Gemma 3 in `model`, with its first `vocabulary` tokens, to the new folder `out`.

    No tokenizer comes along: it knows more tokens than are left. Returns `out`.
    """
    out.mkdir(parents=True)
    config = json.loads((model / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "layer_types": config["layer_types"][:layers], "vocab_size": vocabulary}
    write_json(out / "config.json", config)
    reader, tensors = ShardReader(model), {}
    for name in reader.tensors:
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if layer is not None and int(layer[1]) >= layers:
            continue
        tensors[name] = reader.read_slice(name, 0, vocabulary) if "embed_tokens" in name else reader.read(name)
    reader.close()
    save_weights(out, tensors)
    return out

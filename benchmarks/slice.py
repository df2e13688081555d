"""Slices of a Gemma 4 of E4B's real widths, 2, 4 and 7 layers deep, quantized by gemq and by llm-compressor, each in a process of its own.

Weights are random (normal, of a trained model's size), the vocabulary is cut to 8,192 ids, and there are no towers; every linear has its real
shape: hidden 2560, FFN 10240, 8 query and 2 KV heads of 256 (sliding) and 512 (full), per-layer inputs of 256. Every slice ends its own
layers with a full one; of the seven, the last three share the keys and values of layers before them. Calibration: random ids.

What is asked: that gemq's peak memory doesn't grow with the number of layers and stays under 4 GiB. llm-compressor is run beside it on the same
ids in float32 (bfloat16 products are slow on processors without them); however its run ends is what the table says. Output error: KL(slice ||
checkpoint), nats a token, by `gemq eval-kl` on as many windows of other random ids.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tests.models.real_configs import real_config

from benchmarks import measured
from gemq import output
from gemq.quantize.architectures import ARCHITECTURES
from gemq.quantize.whole_model import full_inventory
from gemq.shard_headers import TensorSpec
from gemq.shards import DTYPES, ShardWriter

VOCABULARY = 8192
LIMIT_BYTES = 4 << 30
GROWTH_BYTES = 128 << 20  # what a layer's activations may add between the shallowest slice and the deepest
_SLIDING, _FULL = "sliding_attention", "full_attention"
SLICES = {2: ([_SLIDING, _FULL], 0), 4: ([_SLIDING] * 3 + [_FULL], 0), 7: ([_SLIDING] * 3 + [_FULL] + [_SLIDING] * 2 + [_FULL], 3)}
"""Layers -> their kinds, and how many of the last share keys and values."""


def slice_config(layers: int) -> dict[str, Any]:
    """The config.json of a text-only Gemma 4 of E4B's widths."""
    kinds, shared = SLICES[layers]
    text = real_config("e4b")["text_config"]
    sizes = {"num_hidden_layers": layers, "layer_types": kinds, "num_kv_shared_layers": shared, "vocab_size": VOCABULARY}
    return text | sizes | {"vocab_size_per_layer_input": VOCABULARY, "architectures": ["Gemma4ForCausalLM"], "dtype": "bfloat16"}


def build_slice(out: Path, layers: int) -> Path:
    """Write a slice into the new folder `out`, tensor by tensor."""
    out.mkdir()
    config = slice_config(layers)
    (out / "config.json").write_text(json.dumps(config, indent=2))
    save_tokenizer(out)
    specs = full_inventory(config, ARCHITECTURES["Gemma4ForCausalLM"])
    writer = ShardWriter(out, specs.values())
    writer.allocate()
    for number, spec in enumerate(specs.values()):
        writer.write(spec.name, _random(spec, number))
    writer.close()
    return out


def _random(spec: TensorSpec, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    if len(spec.shape) < 2:
        value = 1 + 0.1 * torch.randn(spec.shape, generator=draw)
    else:
        value = torch.randn(spec.shape, generator=draw) / math.sqrt(spec.shape[-1])
    return value.to(DTYPES[spec.dtype])


def save_tokenizer(out: Path) -> None:
    """A tokenizer of words w4, w5, ... and the special ones; benchmarks calibrate on ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"w{number}" for number in range(4, VOCABULARY))]
    words = Tokenizer(models.WordLevel({name: at for at, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    roles = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **roles).save_pretrained(out)


def write_ids(path: Path, samples: int, length: int, vocabulary: int = VOCABULARY) -> None:
    """Calibration windows of BOS and random ids, a line each."""
    path.write_text("".join(json.dumps({"token_ids": [2, *row]}) + "\n" for row in _random_ids(samples, length - 1, vocabulary, seed=0)))


def write_records(path: Path, samples: int, length: int, vocabulary: int = VOCABULARY) -> None:
    """Records of other random ids after BOS, all of them scored."""
    rows = enumerate(_random_ids(samples, length - 1, vocabulary, seed=1))
    path.write_text("".join(json.dumps({"id": number, "context_token_ids": [2], "target_token_ids": row}) + "\n" for number, row in rows))


def _random_ids(rows: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(4, vocabulary) for _ in range(length)] for _ in range(rows)]


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code, seconds, largest resident memory, and its last line; the KL of what it made, in nats a token."""

    code: int
    seconds: float
    peak_bytes: int
    last_line: str
    kl: float | None = None


def divergence(source: Path, checkpoint: Path, ids: Path, samples: int, length: int) -> float:
    """KL(source || checkpoint) on the records of `ids`, nats a token."""
    from gemq.eval.kl import evaluate_kl

    return evaluate_kl(str(checkpoint), ids, reference=str(source), records=samples, length=length).kl_nats.value


def run(command: list[str], log: Path) -> Ended:
    """Run `command` to whatever end it comes to."""
    code, taken = measured.ended(command, log)
    lines = [line for line in log.read_text(errors="replace").replace("\r", "\n").splitlines() if line.strip()]
    return Ended(code, taken.seconds, taken.peak_bytes, lines[-1].strip() if lines else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="*", choices=SLICES, default=list(SLICES))
    parser.add_argument("--samples", type=int, default=8, help="calibration windows")
    parser.add_argument("--length", type=int, default=256, help="tokens a window")
    parser.add_argument("--recipe", default="w4a16")
    parser.add_argument("--no-peer", action="store_true", help="leave llm-compressor out")
    parser.add_argument("--work", type=Path, help="folder for slices, checkpoints and logs (6 GB); a temporary one by default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        taken = _measure(options, Path(folder))
    output.note(measured.machine())
    rows = [
        (name, layers, f"{ended.seconds:.0f}", f"{ended.peak_bytes / 2**30:.2f}", "" if ended.kl is None else f"{ended.kl:.5f}",
         "done" if ended.code == 0 else ended.last_line[:120])
        for (name, layers), ended in taken.items()
    ]  # fmt: skip
    tokens = f"{options.samples} x {options.length} tokens, {options.recipe}, {torch.get_num_threads()} threads"
    output.table(f"E4B's widths, {tokens}", ("", "layers", "seconds", "peak GiB", "KL, nats", "end"), rows)
    ours = {layers: ended for (name, layers), ended in taken.items() if name == "gemq"}
    failed = [f"gemq on {layers} layers ended with {ended.code}" for layers, ended in ours.items() if ended.code]
    failed += [f"gemq took over 4 GiB on {layers} layers" for layers, ended in ours.items() if ended.peak_bytes > LIMIT_BYTES]
    growth = max(ended.peak_bytes for ended in ours.values()) - ours[min(ours)].peak_bytes
    if growth > GROWTH_BYTES:
        failed.append(f"gemq's peak memory grew by {growth / 2**20:.0f} MiB with the number of layers")
    for line in failed:
        output.warn(line)
    sys.exit(bool(failed))


def _measure(options: argparse.Namespace, work: Path) -> dict[tuple[str, int], Ended]:
    ids, others = work / "ids.jsonl", work / "others.jsonl"
    write_ids(ids, options.samples, options.length)
    write_records(others, options.samples, options.length)
    taken: dict[tuple[str, int], Ended] = {}
    for layers in options.layers:
        source = build_slice(work / f"e4b-{layers}", layers)
        made = {name: work / f"{name}-{layers}" for name in ("gemq", "llm-compressor")}
        commands = {
            "gemq": measured.gemq("quantize", source, "--recipe", options.recipe, "--calibration", ids, "--samples", options.samples,
                                  "--length", options.length, "--eval-data", "none", "-o", made["gemq"]),
            "llm-compressor": measured.peer(source, made["llm-compressor"], "gptq", ids, options.samples, options.length, "float32"),
        }  # fmt: skip
        for name, command in commands.items():
            if name == "llm-compressor" and options.no_peer:
                continue
            ended = run(command, work / f"{name}-{layers}.log")
            if ended.code == 0:
                ended = replace(ended, kl=divergence(source, made[name], others, options.samples, options.length))
            taken[name, layers] = ended
            output.note(f"{name}, {layers} layers: {ended.seconds:.0f} s, {ended.peak_bytes / 2**30:.2f} GiB, "
                        f"exit code {ended.code}: {ended.last_line[:200]}")  # fmt: skip
    return taken


if __name__ == "__main__":
    main()

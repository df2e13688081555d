"""The model's own samples as calibration data (Williams et al. 2024, "Self-calibration for Language Model Quantization and Pruning").

A base model writes documents from BOS alone. An instruction-tuned one is given the opened user turn of its chat template, writes the user's
message, and after the template's own transition the answer (Xu et al. 2024, "Magpie"). Sampling is plain: temperature 1, the whole
vocabulary but padding, BOS and the placeholders of images, audio and video, which the text path can't embed.

Windows are generated in batches, each with a seed of its own, and kept on disk batch by batch: an interrupted run goes on where it was, and
its result is that of an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gemq import output
from gemq.adapters import no_adapters
from gemq.atomic import disk_errors, write_file
from gemq.calibration.sets import CalibrationSet, digest
from gemq.calibration.tokenize import encode_text, load_tokenizer, read_limits, short
from gemq.config_file import read_complete_config, text_config
from gemq.demo import cache_root, make_cache
from gemq.errors import IntegrityError, Interrupted, UsageError
from gemq.memory import available_bytes
from gemq.shards import ShardReader
from gemq.source import file_hashes

ALGORITHM = 1  # counts up when the same seed would give other windows
BATCH = 64  # windows at once at most: matrix products of fewer rows waste a CPU, of more gain little
CACHE_BYTES = {"cpu": 2_000_000_000, "cuda": 8_000_000_000}  # of keys and values at once; long windows make the batches smaller
SHORTEST_SHARE = 0.25  # of the length: a sample that the model ends before that is drawn again
DRAWS_PER_SAMPLE = 4  # how often on average, before gemq gives up on a model that ends its texts at once
_BLOCK = 512  # tokens of the vocabulary whose probability is summed first
_MARK = "gemq7message"  # stands for the user's message while the template is taken apart
_PLACEHOLDER = re.compile(r"(image|video|audio|boi|eoi|boa|eoa)_token_(id|index)")


@dataclass(frozen=True)
class Prompt:
    """What a sample starts from and how it ends.

    prefix: BOS, and for chat models the opened user turn. transition: what the template puts between the user's message and the answer,
    empty for a base model. stops: ids that end a text or a turn. masked: ids that are never sampled.
    """

    prefix: tuple[int, ...]
    transition: tuple[int, ...]
    stops: tuple[int, ...]
    masked: tuple[int, ...]


def generate_self_set(model_dir: Path, *, samples: int, length: int, seed: int, device: str = "cpu",
                      cache_dir: Path | None = None) -> CalibrationSet:
    """`samples` windows that the model in `model_dir` wrote, from the cache if they are there.

    A window has `length` tokens, or fewer (a quarter at least) where the model ended its text. cache_dir: by default the folder
    `calibration` of gemq's cache. Raises UsageError for a model that keeps ending its texts too early, Interrupted on Ctrl-C (what is
    finished is kept).
    """
    prompt = read_prompt(model_dir)
    if length <= len(prompt.prefix):
        raise UsageError(f"--length {length} leaves no room after this model's prompt of {len(prompt.prefix)} tokens",
                         "choose a longer --length")
    device_kind, dtype = device.split(":")[0], compute_dtype(device)
    shards = ShardReader(model_dir)
    hashes = file_hashes(model_dir, [path.name for path in shards.files] + ["config.json"])
    parameters = sum(info.numel for info in shards.tensors.values())
    batch = rows_at_once(read_complete_config(model_dir), length, dtype, device_kind)
    key = _key({"algorithm": ALGORITHM, "batch": batch, "files": hashes, "prompt": asdict(prompt), "samples": samples, "length": length,
                "seed": seed, "device": device_kind, "dtype": dtype})
    folder = cache_dir or cache_root() / "calibration"
    final, partial = folder / f"self-{key[:24]}.jsonl", folder / f"self-{key[:24]}.partial.json"
    if (found := _cached(final, key)) is not None:
        output.note(f"calibration: the model's own samples from {final.name} in the cache")
        return found
    make_cache(folder)
    batches = _finished_batches(partial, key)
    if batches:
        output.note(f"calibration: {sum(map(len, batches))} of {samples} windows are there from an earlier run")
    try:
        if sum(map(len, batches)) < samples:
            model = _load_model(model_dir, device, dtype, parameters)
            for windows in _generate(model, prompt, batches, samples=samples, length=length, seed=seed, batch=batch, device=device):
                batches.append(windows)
                state = {"key": key, "sha256": digest(window for batch in batches for window in batch), "batches": batches}
                with disk_errors(partial):
                    write_file(partial, json.dumps(state))
    except KeyboardInterrupt:
        kept = sum(map(len, batches))
        raise Interrupted(f"stopped while the model wrote calibration data; {kept} of {samples} windows are kept",
                          "run the same command again to go on") from None
    made = CalibrationSet.of((window for batch in batches for window in batch), {
        "kind": "self", "name": "self", "chat": bool(prompt.transition), "length": length, "seed": seed, "packed": False,
        "device": device_kind, "dtype": dtype, "key": key,
    })  # fmt: skip
    made.save(final)
    partial.unlink(missing_ok=True)
    return made


def read_prompt(model_dir: Path) -> Prompt:
    """How the model in `model_dir` starts and ends a text, from its tokenizer, chat template, config and generation config."""
    tokenizer = load_tokenizer(model_dir)
    limits, config = read_limits(model_dir, tokenizer), read_complete_config(model_dir)
    opener: list[int] = []
    transition: list[int] = []
    if tokenizer.chat_template:
        try:
            text = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=True)
        except Exception as error:  # jinja's, and whatever a template's raise_exception raises
            raise UsageError(f"the chat template in {model_dir} can't be rendered ({short(error)})", "use a calibration file") from error
        if text.count(_MARK) != 1:
            raise UsageError(f"the chat template in {model_dir} writes a user's message {text.count(_MARK)} times, once is needed",
                             "use a calibration file")
        before, after = text.split(_MARK)
        opener, transition = (encode_text(tokenizer, part, "the chat template") for part in (before, after))
    start = [] if limits.bos is None else [limits.bos]
    prefix = start + [token for token in opener if token != limits.bos]
    if not prefix:
        raise UsageError(f"the tokenizer in {model_dir} has neither BOS nor a chat template to start a text with", "use a calibration file")
    ends = (config.get("eos_token_id"), _generation_config(model_dir).get("eos_token_id"), limits.eos, transition[:1])
    stops = {token for end in ends for token in _ids(end)}
    named = [value for part in (config, text_config(config)) for name, value in part.items() if _PLACEHOLDER.fullmatch(name)]
    masked = {*_ids(named), *_ids(limits.bos), *_ids(tokenizer.pad_token_id)} - stops
    beyond = [token for token in (*prefix, *transition) if token >= limits.vocab_size]
    if beyond:
        raise UsageError(f"the tokenizer in {model_dir} uses id {beyond[0]}, the model's vocabulary has {limits.vocab_size} ids",
                         "fetch the checkpoint again: its tokenizer is another model's")
    masked = {token for token in masked if token < limits.vocab_size}
    return Prompt(tuple(prefix), tuple(transition), tuple(sorted(stops)), tuple(sorted(masked)))


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool) and item >= 0]


def _generation_config(model_dir: Path) -> dict[str, Any]:
    path = model_dir / "generation_config.json"
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} can't be read ({short(error)})", "fetch or copy that file again") from None
    return read if isinstance(read, dict) else {}


def compute_dtype(device: str) -> str:
    """The dtype to sample in: bfloat16, but float32 on a CPU without bfloat16 arithmetic, where that is several times faster."""
    if device.split(":")[0] != "cpu":
        return "bfloat16"
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return "float32"
    return "bfloat16" if re.search(r"\b(avx512_bf16|amx_bf16)\b", flags) else "float32"


def rows_at_once(config: dict[str, Any], length: int, dtype: str, device_kind: str) -> int:
    """How many windows to generate together: BATCH, or fewer so that their keys and values fit CACHE_BYTES."""
    text = text_config(config)
    heads = text.get("num_key_value_heads") or text.get("num_attention_heads") or 1
    head_dim = max(text.get("head_dim") or 256, text.get("global_head_dim") or 0)
    bytes_per_token = 2 * (text.get("num_hidden_layers") or 1) * heads * head_dim * (4 if dtype == "float32" else 2)
    return max(1, min(BATCH, CACHE_BYTES["cpu" if device_kind == "cpu" else "cuda"] // (bytes_per_token * length)))


def _load_model(model_dir: Path, device: str, dtype: str, parameters: int) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    needed = parameters * getattr(torch, dtype).itemsize
    available = available_bytes()
    if device == "cpu" and available is not None and needed > available:
        raise UsageError(f"the model needs {output.human_bytes(needed)} of memory to write its own calibration data, "
                         f"{output.human_bytes(available)} are free", "use a calibration file, or --device cuda")
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with no_adapters():
            model = AutoModelForCausalLM.from_pretrained(str(model_dir), dtype=getattr(torch, dtype), local_files_only=True)
        return model.to(device).eval()
    except torch.OutOfMemoryError as error:
        raise UsageError(f"the model doesn't fit into the memory of {device}", "use a calibration file, or --device cpu") from error
    except (ValueError, KeyError, OSError, RuntimeError) as error:
        raise UsageError(f"the model in {model_dir} can't be loaded to write its own calibration data ({short(error)})",
                         "use a calibration file, or check the checkpoint") from error
    finally:
        if shown:
            logging.enable_progress_bar()


def _generate(model: Any, prompt: Prompt, done: Sequence[Sequence[Sequence[int]]], *, samples: int, length: int, seed: int,
              batch: int, device: str) -> Iterator[list[list[int]]]:
    """The windows of each batch that is still to be drawn after the batches `done`."""
    kept, number = sum(map(len, done)), len(done)
    shortest = math.ceil(length * SHORTEST_SHARE)
    limit = DRAWS_PER_SAMPLE * samples + batch
    written = 0  # by this run; an earlier one's are not counted again
    with output.progress("the model writes calibration data", (samples - kept) * length, "tokens") as advance:
        while kept < samples:
            rows = min(batch, samples - kept)
            if written + rows > limit:
                raise UsageError(f"the model wrote {written} texts and ended most of them early: {kept} of the "
                                 f"{samples} windows asked for have at least {shortest} tokens",
                                 "choose a shorter --length, or a calibration file")
            written += rows
            texts = sample_batch(model, prompt, rows=rows, length=length, seed=batch_seed(seed, number), device=device, advance=advance)
            windows = [text for text in texts if len(text) >= shortest]
            advance(sum(map(len, windows)) - sum(map(len, texts)) + sum(length - len(text) for text in windows))
            kept += len(windows)
            number += 1
            yield windows


def batch_seed(seed: int, number: int) -> int:
    """The seed of batch `number`: below 2**63, and unrelated to those of its neighbours."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{number}".encode()).digest()[:8], "big") >> 1


def sample_batch(model: Any, prompt: Prompt, *, rows: int, length: int, seed: int, device: str = "cpu",
                 advance: Callable[..., None] | None = None) -> list[list[int]]:
    """`rows` texts of at most `length` tokens, prefix and final stop id included. Raises IntegrityError on logits that aren't finite."""
    import torch
    from transformers import DynamicCache

    generator = torch.Generator().manual_seed(seed)
    texts = [list(prompt.prefix) for _ in range(rows)]
    forced: list[list[int]] = [[] for _ in range(rows)]  # what is left of the transition
    in_user_turn = [bool(prompt.transition)] * rows
    stops, masked = set(prompt.stops), torch.tensor(prompt.masked, dtype=torch.long, device=device)
    alive = list(range(rows))  # the rows of the running batch
    cache = DynamicCache(config=model.config.get_text_config())
    inputs = torch.tensor([prompt.prefix] * rows, device=device)
    with torch.inference_mode():
        while alive:
            logits = model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()
            uniforms = torch.rand(len(alive), 2, dtype=torch.float64, generator=generator)
            drawn = draw_tokens(logits, masked, uniforms).tolist()
            staying = []
            for position, row in enumerate(alive):
                token, ended = drawn[position], False
                if forced[row]:
                    token = forced[row].pop(0)
                elif token in stops:
                    if in_user_turn[row] and len(texts[row]) > len(prompt.prefix):
                        token, *forced[row] = prompt.transition
                        in_user_turn[row] = False
                    else:
                        ended = True
                texts[row].append(token)
                if not ended and len(texts[row]) < length:
                    staying.append(position)
            if advance is not None:
                advance(len(alive))
            if len(staying) < len(alive):
                alive = [alive[position] for position in staying]
                if alive:
                    cache.batch_select_indices(torch.tensor(staying, device=device))
            inputs = torch.tensor([[texts[row][-1]] for row in alive], device=device)
    return texts


def draw_tokens(logits: Any, masked: Any, uniforms: Any) -> Any:
    """One id a row, [rows], drawn from softmax(logits) without the ids `masked`.

    logits: [rows, vocabulary] float32, overwritten. uniforms: [rows, 2] float64 in [0, 1). By inversion in two stages: first the block of
    the vocabulary, then the token in it, so that only the blocks' sums and one block a row are accumulated, in float64. Raises
    IntegrityError on logits that aren't finite.
    """
    import torch

    rows, size = logits.shape
    block = math.gcd(size, _BLOCK)
    logits[:, masked] = -torch.inf
    weights = logits.sub_(logits.amax(-1, keepdim=True)).exp_().view(rows, size // block, block)
    outer = weights.sum(-1).double().cumsum(-1)
    if not bool(torch.isfinite(outer[:, -1]).all()):
        raise IntegrityError("the model's logits aren't finite: it can't write calibration data",
                             "check the checkpoint: a weight may be NaN")
    uniforms = uniforms.to(logits.device)
    chosen = torch.searchsorted(outer, uniforms[:, :1] * outer[:, -1:], right=True).clamp_(max=size // block - 1)
    inner = weights[torch.arange(rows, device=logits.device), chosen[:, 0]].double().cumsum(-1)
    token = torch.searchsorted(inner, uniforms[:, 1:] * inner[:, -1:], right=True).clamp_(max=block - 1)
    return (chosen * block + token)[:, 0]


def _key(identity: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _cached(path: Path, key: str) -> CalibrationSet | None:
    if not path.exists():
        return None
    try:
        found = CalibrationSet.load(path)
        if found.description.get("key") == key:
            return found
        reason = "it belongs to other settings"
    except (IntegrityError, UsageError) as error:
        reason = error.message
    output.warn(f"the cached calibration set is not used and made anew: {reason}")
    return None


def _finished_batches(path: Path, key: str) -> list[list[list[int]]]:
    """The batches that an interrupted run left, none if there are none or they are damaged."""
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        batches: list[list[list[int]]] = state["batches"]
        if state["key"] == key and digest(window for batch in batches for window in batch) == state["sha256"]:
            return batches
        reason = "its content has not the digest that it states"
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = short(error)
    output.warn(f"calibration data of an interrupted run ({path.name}) is not used and made anew: {reason}")
    return []

"""Whether a source's files and its config.json are of one model: class, names, and nothing that the model has no part for.

What transformers would leave out with a warning and vLLM refuse to load (or what both would fill at random) is refused here, with the reason.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from gemq.errors import IntegrityError, UsageError
from gemq.quantize.architectures import Architecture
from gemq.shard_headers import INDEX_FILE, SINGLE_FILE, TensorSpec
from gemq.shards import ShardReader

if TYPE_CHECKING:
    from gemq.quantize.skeleton import Skeleton

# names that PEFT gives to the parts of an adapter, and to the layers that it wraps
_ADAPTER = re.compile(
    r"(^|\.)(base_model|base_layer|original_module|modules_to_save|lora_\w+|ia3_\w+|hada_\w+|lokr_\w+|oft_\w+|boft_\w+|vera_\w+|randlora_\w+"
    r"|fourierft_\w+|vblora_\w+|adaption_\w+|prompt_encoder|prompt_embeddings|trainable_tokens_\w+)(\.|$)"
)
# computed, not trained; vLLM drops them by name (AutoWeightsLoader)
_ROTARY = re.compile(r"rotary_(pos_)?emb\.(inv_freq|cos_cached|sin_cached)$")
_AUDIO = ("model.audio_tower.", "model.embed_audio.")  # left out by vLLM where audio_config is null
_DTYPES = ("bfloat16", "float16", "float32")


def require_one_model(directory: Path, config: dict[str, Any], complete: Mapping[str, Any], row: Architecture) -> None:
    """Raise UsageError where config.json contradicts itself: class and model_type, or a part that vLLM can't do without."""
    import transformers

    expected = getattr(transformers, row.name).config_class.model_type
    if config.get("model_type") != expected:
        raise UsageError(
            f"config.json names the architecture {row.name} and the model_type {config.get('model_type')!r}, which belongs to another class; "
            f"{expected} is valid",
            as_text_model(directory, row.name) if row.text_config is None and isinstance(config.get("text_config"), dict)
            else "fetch config.json again",
        )  # fmt: skip
    for key in row.needs:
        if not isinstance(complete.get(key), dict):
            raise UsageError(f"config.json of a {row.name} has {key} {complete.get(key)!r}, and vLLM builds none without it",
                             _text_only_advice(directory, row))  # fmt: skip


def require_known_dtype(config: dict[str, Any]) -> None:
    """Raise UsageError for a dtype that transformers has no such name of."""
    text = config.get("text_config")
    for part, where in ((config, ""), (text if isinstance(text, dict) else {}, "text_config.")):
        for key in ("dtype", "torch_dtype"):
            if part.get(key) is not None and part[key] not in _DTYPES:
                raise UsageError(f"config.json has {where}{key} {str(part[key])[:80]!r}, which transformers can't read",
                                 f"{', '.join(_DTYPES)} are valid: write one of them into config.json")  # fmt: skip


def refuse_two_layouts(directory: Path, reader: ShardReader) -> None:
    """Raise UsageError for a model.safetensors beside an index that names other files: transformers reads the first, vLLM the others."""
    if (directory / INDEX_FILE).exists() and (directory / SINGLE_FILE).exists() and directory / SINGLE_FILE not in reader.files:
        raise UsageError(
            f"{directory} holds {SINGLE_FILE} and an {INDEX_FILE} of other files: transformers reads the one, vLLM the others",
            "move the weights that are not wanted, with their index, out of that directory",
        )


def index_note(reader: ShardReader) -> str:
    """What the user should know of the source's index ("" if nothing): a total_size that is not the shards', which no reader asks for.

    Raises UsageError for an index without metadata, which transformers can't read.
    """
    index = reader.directory / INDEX_FILE
    if not index.exists():
        return ""
    document = json.loads(index.read_text(encoding="utf-8"))
    metadata = document.get("metadata")
    if not isinstance(metadata, dict):
        raise UsageError(f"{index} has the metadata {str(metadata)[:80]}, and transformers can't read it so", 'add "metadata": {} to it')
    stored = sum(tensor.nbytes for tensor in reader.tensors.values())
    total = metadata.get("total_size")
    return "" if total == stored else f"{index} claims a total_size of {str(total)[:40]}, the shards hold {stored}; nothing depends on it"


def refuse_adapters(names: Iterable[str]) -> None:
    """Raise UsageError if the weights are, or hold, an adapter (LoRA, DoRA, IA3 and their like) that was not merged."""
    found = [name for name in names if _ADAPTER.search(name)]
    if found:
        raise UsageError(
            f"the weights hold {found[0]}{_more(found)}: an adapter that is not merged, which would be copied and ignored",
            "merge it first: load base model and adapter with peft's PeftModel.from_pretrained, then merge_and_unload() and save_pretrained()",
        )


def explain_no_embedding(directory: Path, row: Architecture, inventory: Mapping[str, TensorSpec]) -> NoReturn:
    """Raise the error for a source without an embedding where its class has it: it says what is there in its place."""
    wanted = f"{row.prefixes[0]}embed_tokens.weight"
    found = next((name for name in inventory if re.search(r"(^|\.)embed_tokens\.weight$", name)), None)
    if found is not None:
        prefix = found.removesuffix("embed_tokens.weight")
        raise UsageError(
            f"the names of the weights begin with {prefix!r}, and those of a {row.name}, which config.json names, with "
            + " or ".join(map(repr, row.prefixes)),
            _text_only_advice(directory, row, inventory),
        )
    head = next((f"{name}.weight" for name in row.head_names if f"{name}.weight" in inventory), None)
    if head is not None:
        raise IntegrityError(
            f"{directory} has {head} and no {wanted}: transformers would take the head for the embedding, vLLM does not",
            f"save that tensor as {wanted}, or fetch the source again",
        )
    raise IntegrityError(f"{directory} has no {wanted}", "fetch the source again: a shard may be missing from its index")


def require_only_known(skeleton: Skeleton, names: Mapping[str, str], known: Iterable[str]) -> None:
    """Raise UsageError for tensors that the model has no part for; `names` maps the model's name of each tensor to the source's.

    Accepted, and copied: keys and values that a layer shares and so never reads, rotary tables, and what vLLM leaves out by name.
    """
    accepted, unused = {*known}, skeleton.architecture.unused
    if skeleton.architecture.unused and skeleton.complete.get("audio_config") is None:
        unused += _AUDIO
    redundant = set(skeleton.redundant_kv())
    # transformers finds a head under any name that ends so, vLLM under these
    heads = {f"{head}.weight" for head in skeleton.architecture.head_names}

    def has_place(name: str, source: str) -> bool:
        if name == "lm_head.weight":
            return source in heads
        return name in accepted or source in redundant or name.startswith(unused) or _ROTARY.search(name) is not None

    unknown = sorted(source for name, source in names.items() if not has_place(name, source))
    if unknown:
        raise UsageError(
            f"the source holds {unknown[0]}{_more(unknown)}, which is not a tensor of a {skeleton.architecture.name} of this config.json: "
            "transformers would ignore it, and vLLM refuse to load it",
            "fetch config.json and weights of one revision, or load the model with transformers and save it again (save_pretrained)",
        )


def require_one_name_each(names: Mapping[str, str], inventory: Mapping[str, TensorSpec]) -> None:
    """Raise UsageError where two tensors of the source are one of the model's, spelled in two ways."""
    twice = sorted(set(inventory) - set(names.values()))
    if twice:
        raise UsageError(f"the source holds {twice[0]} under a second name too: readers take one or the other",
                         "remove the tensors that are not wanted from the files and the index")  # fmt: skip


def refuse_text_only(skeleton: Skeleton, names: Mapping[str, str], directory: Path) -> None:
    """Raise UsageError for a multimodal config over the weights of a language model alone."""
    row = skeleton.architecture
    if row.text_config is None or any(not name.startswith(("model.language_model.", "lm_head.")) for name in names):
        return
    raise UsageError(
        f"config.json is of a {row.name}, and the files hold its language model alone: no tensor of {', '.join(row.towers)}; "
        "transformers and vLLM would fill those parts at random",
        _text_only_advice(directory, row, skeleton.inventory),
    )


def as_text_model(directory: Path, text_class: str) -> str:
    """How to write the language model in `directory` as a model of its own, as a command."""
    code = (
        f"import glob, sys; from safetensors.torch import load_file; from transformers import AutoConfig, {text_class} as M; d = sys.argv[1]; "
        "w = {k.replace('language_model.model.', 'model.').replace('model.language_model.', 'model.')"
        ".replace('language_model.lm_head', 'lm_head'): v for f in glob.glob(d + '/*.safetensors') for k, v in load_file(f).items()}; "
        "M.from_pretrained(None, config="
        "AutoConfig.from_pretrained(d).get_text_config(), state_dict=w, dtype='auto').save_pretrained('text-model')"
    )
    return ("to quantize the language model alone, write it as one, copy the tokenizer's files into it, and give it instead: "
            f'python -c "{code}" {shlex.quote(str(directory))}')  # fmt: skip


def _text_only_advice(directory: Path, row: Architecture, inventory: Mapping[str, TensorSpec] | None = None) -> str:
    has_towers = any("_tower." in name or "embed_vision." in name for name in inventory or ())
    text_class = row.text_class if row.text_config else row.name
    if (row.text_config is None and has_towers) or not text_class:
        return "fetch config.json and weights of one revision"
    return as_text_model(directory, text_class)


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} others" if len(names) > 1 else ""

"""The config.json of a checkpoint, read, and completed by the defaults of its transformers class.

Google's own files leave out whatever equals the class's default (Gemma 3 4B's names no vocab_size), so a value that has a default is never
taken from the JSON alone: `complete_config` gives what transformers and vLLM compute with.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from gemq.errors import UsageError


def read_config(directory: Path) -> dict[str, Any]:
    """A checkpoint's config.json as it is written; raises UsageError if there is none or it can't be read."""
    path = directory / "config.json"
    try:
        text = path.read_text(encoding="utf-8")
        if "\ufeff" in (text[:1], text.rstrip()[-1:]):
            raise UsageError(f"{path} has a byte order mark, which transformers and vLLM don't read", "save it as UTF-8 without BOM")
        config = json.loads(text)
    except FileNotFoundError:
        raise UsageError(f"{directory} has no config.json", "point to a Hugging Face checkpoint directory") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} can't be read: {error}", "fetch that file again") from None
    if not isinstance(config, dict):
        raise UsageError(f"{path} holds no JSON object", "fetch that file again")
    return config


def complete_config(config: dict[str, Any]) -> dict[str, Any]:
    """`config` with every value that its transformers class adds, in its sub-configs too; keys that the class does not know stay.

    As it is where transformers has no class for its `model_type`: nothing then has a default. Raises UsageError if the class refuses it.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        return config
    try:
        made = CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(config)).to_dict()
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError, StrictDataclassError) as error:
        raise UsageError(f"config.json: transformers can't read it as a {model_type}: {error!r}", "fetch config.json again") from None
    return _merged(config, made)


def _merged(stated: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
    result = {**stated, **made}
    for key, value in made.items():
        below = stated.get(key)
        if isinstance(value, dict) and isinstance(below, dict):
            result[key] = _merged(below, value)
        elif value is None and below is not None:  # what a class hands on to its sub-configs
            result[key] = below
    return result


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config that describes the decoder: `text_config` in multimodal models, else all of it."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def read_complete_config(directory: Path) -> dict[str, Any]:
    """A checkpoint's config with its class's defaults; raises UsageError as `read_config` and `complete_config` do."""
    return complete_config(read_config(directory))

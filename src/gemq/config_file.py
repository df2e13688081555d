"""The config.json of a checkpoint, read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gemq.errors import UsageError


def read_config(directory: Path) -> dict[str, Any]:
    """A checkpoint's config.json; raises UsageError if there is none or it can't be read."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{directory} has no config.json", "point to a Hugging Face checkpoint directory") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} can't be read: {error}", "fetch that file again") from None
    if not isinstance(config, dict):
        raise UsageError(f"{path} holds no JSON object", "fetch that file again")
    return config

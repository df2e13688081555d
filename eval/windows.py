"""Token windows as records that every evaluation reads: the first token is context, the rest are targets."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path


def write_records(path: Path, windows: Iterable[Sequence[int]]) -> None:
    """Write `windows` to `path` as a .jsonl of token records; each window's BOS is its context."""
    with open(path, "w", encoding="utf-8") as file:
        for number, window in enumerate(windows):
            record = {"id": f"window-{number}", "context_token_ids": list(window[:1]), "target_token_ids": list(window[1:])}
            file.write(json.dumps(record) + "\n")

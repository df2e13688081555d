"""What a reference leaves for scoring: its hidden states at the targets, kept in a file, so that the next target need not run it again.

A search builds several checkpoints of one source and judges each on the same records. The states are a hundredth of the log-probabilities' size;
the head that turns them into those is read from the reference's own shards.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from gemq import atomic, output
from gemq.eval.local import Head, LocalCheckpoint
from gemq.eval.plan import Plan, records_sha256
from gemq.quantize.skeleton import load_skeleton

_KEY = "key"


def key_of(plan: Plan, dtype: str) -> str:
    """What the states depend on: the reference's content, the records' tokens, device and dtype."""
    text = json.dumps([plan.reference_digest, records_sha256(plan.records), plan.device, dtype])
    return hashlib.sha256(text.encode()).hexdigest()


def read_states(path: Path, key: str, count: int) -> dict[int, torch.Tensor] | None:
    """The states of all `count` records, or None where the file has none of this key."""
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            if (file.metadata() or {}).get(_KEY) == key:
                return {index: file.get_tensor(str(index)) for index in range(count)}
    except (SafetensorError, OSError):
        output.warn(f"{path} can't be read: the source is scored again")
    return None


def write_states(path: Path, key: str, states: dict[int, torch.Tensor]) -> None:
    """Keep the states of every record."""
    with atomic.disk_errors(path.parent), atomic.staged_file(path) as staged:
        save_file({str(index): part.contiguous() for index, part in states.items()}, staged, metadata={_KEY: key})


def head_of(reference: LocalCheckpoint, device: torch.device, dtype: torch.dtype) -> Head:
    """The output projection of an unquantized reference and its soft cap, without the rest of the model."""
    skeleton, reader = load_skeleton(reference.directory)
    assert reader is not None
    (matrix,) = (matrix for matrix in skeleton.matrices if matrix.module == "lm_head")
    weight = reader.read(matrix.tensor).to(device=device, dtype=dtype)
    reader.close()
    projection = torch.nn.Linear(matrix.in_features, matrix.out_features, bias=False, device="meta")
    projection.weight = torch.nn.Parameter(weight, requires_grad=False)
    return Head(projection, getattr(skeleton.text, "final_logit_softcapping", None))

"""A checkpoint with quantized embedding tables, read for transformers, whose classes of Gemma's tables can't be loaded packed.

(transformers 5.17 with compressed-tensors 0.19: packing a scaled embedding makes a parameter of its scale, and the loader then asks the module
for the weight that packing took.) The tables are unpacked here; every other module is loaded the usual way.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gemq.errors import IntegrityError
from gemq.shards import ShardReader

_TABLE = re.compile(r"(?P<module>(?:.*\.)?embed_tokens(?:_per_layer)?)\.weight_packed$")
_PARTS = ("weight_packed", "weight_scale", "weight_shape")


def quantized_tables(directory: Path) -> list[str]:
    """The modules of a checkpoint's packed tables."""
    reader = ShardReader(directory)
    reader.close()
    return sorted(found["module"] for name in reader.tensors if (found := _TABLE.match(name)))


def without_tables(quantization: dict[str, Any], tables: list[str]) -> dict[str, Any]:
    """A `quantization_config` in which no target names one of `tables`."""
    left = copy.deepcopy(quantization)
    groups = {}
    for name, group in left["config_groups"].items():
        group["targets"] = [
            target for target in group["targets"]
            if not (target.startswith("re:") and any(re.match(target[3:], table) for table in tables)) and target not in tables
        ]  # fmt: skip
        if group["targets"]:
            groups[name] = group
    return left | {"config_groups": groups}


def unpack_table(packed: torch.Tensor, scale: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """The rows [rows, columns], in the scale's dtype, that int32 words [rows, words] and scales [rows, groups] stand for."""
    rows, columns = shape
    bits = 32 * packed.shape[1] // columns
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    table = torch.empty(rows, columns, dtype=scale.dtype)
    for first in range(0, rows, 4096):
        words = packed[first : first + 4096]
        levels = ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(1)[:, :columns] - (1 << (bits - 1))
        groups = scale[first : first + 4096].float()
        part = levels.float().reshape(len(words), groups.shape[1], -1) * groups.unsqueeze(-1)
        table[first : first + 4096] = part.reshape(len(words), columns).to(scale.dtype)
    return table


def read_state_dict(directory: Path, tables: list[str], left_out: Callable[[str], bool] = lambda name: False) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint by its stored name, the tables unpacked, without those whose name is `left_out`."""
    reader = ShardReader(directory)
    try:
        state = {name: reader.read(name) for name in reader.tensors if not _of_table(name, tables) and not left_out(name)}
        for table in tables:
            packed, scale, shape = (reader.read(f"{table}.{part}") for part in _PARTS)
            try:
                state[f"{table}.weight"] = unpack_table(packed, scale, (int(shape[0]), int(shape[1])))
            except (RuntimeError, IndexError, ZeroDivisionError) as error:
                raise IntegrityError(f"{table} does not fit together ({error})", "quantize the source again") from error
        return state
    finally:
        reader.close()


def _of_table(name: str, tables: list[str]) -> bool:
    module, _, part = name.rpartition(".")
    return module in tables and part in _PARTS

"""What a checkpoint's safetensors files say of themselves: which there are, and where every tensor lies. Nothing here needs torch.

The format (safetensors README): 8 bytes of little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, the data.
"""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from gemq.errors import IntegrityError, UsageError

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of a value by safetensors dtype, of those that gemq reads and writes."""
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: `offset` counts from the start of `path`, `nbytes` is its length."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one shard in file order; raises IntegrityError on anything but a well-formed file of exactly the right length."""

    def broken(why: str) -> IntegrityError:
        return IntegrityError(f"{path} is not a whole safetensors file: {why}", "fetch or copy that file again")

    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise broken(f"it has only {size} bytes")
            (length,) = struct.unpack("<Q", prefix)
            if length > min(size - 8, _MAX_HEADER_BYTES):
                raise broken(f"its header claims {length} bytes, the file has {size}")
            header = json.loads(file.read(length).decode(), object_pairs_hook=_unique_keys)
    except FileNotFoundError:
        raise IntegrityError(f"{path} is missing", "fetch or copy that file again") from None
    except OSError as error:
        raise IntegrityError(f"{path} can't be read: {error.strerror}", "fetch or copy that file again") from None
    except (ValueError, RecursionError) as error:
        raise broken(f"its header can't be read ({error})") from None
    if not isinstance(header, dict):
        raise broken("its header is no JSON object")
    metadata = header.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise broken("its __metadata__ is no map of strings")
    infos = [_tensor_info(path, 8 + length, name, entry, broken) for name, entry in header.items() if name != "__metadata__"]
    infos.sort(key=lambda info: (info.offset, info.nbytes))
    end = 8 + length
    for info in infos:
        if info.offset != end:
            raise broken(f"{info.name} starts at byte {info.offset}, the tensor before it ends at {end}")
        end += info.nbytes
    if end != size:
        raise broken(f"its tensors end at byte {end}, the file at {size}")
    return {info.name: info for info in infos}


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands in it twice")
    return found


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _tensor_info(path: Path, base: int, name: str, entry: object, broken) -> TensorInfo:  # type: ignore[no-untyped-def]
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise broken(f"the entry of {name} must have dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not name.isprintable():
        raise broken(f"it has a tensor named {name[:80]!r}")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise broken(f"{name} has the unknown dtype {str(dtype)[:80]!r}")
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        raise broken(f"{name} has the shape {str(shape)[:80]}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise broken(f"{name} has the offsets {str(offsets)[:80]}")
    nbytes = math.prod(shape) * ITEM_BYTES[dtype]
    if offsets[1] - offsets[0] != nbytes:
        raise broken(f"{name} of {dtype} {shape} does not fit its offsets, which span {offsets[1] - offsets[0]} bytes")
    return TensorInfo(name, dtype, tuple(shape), path, base + offsets[0], nbytes)


def shard_files(directory: Path) -> list[Path]:
    """The shards that a loader reads in `directory`, by name: those that the index lists, or the single file; their headers are not read.

    Raises IntegrityError for an index that can't be read, UsageError where there are neither.
    """
    return sorted(indexed_shards(directory))


def indexed_shards(directory: Path) -> dict[Path, list[str] | None]:
    """Shard -> the tensors that the index places there; None for the single file. Raises as `shard_files`."""
    index, single = directory / INDEX_FILE, directory / SINGLE_FILE
    if index.exists():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            pairs = [(str(name), str(file)) for name, file in weight_map.items()]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise IntegrityError(f"{index} can't be read ({error!r})", "fetch or copy that file again") from None
        shards: dict[Path, list[str] | None] = {}
        for name, file in pairs:
            if file != os.path.basename(file) or file in (".", "..", ""):
                raise IntegrityError(f"{index} places {name} outside the checkpoint, in {file!r}", "don't use this checkpoint")
            names = shards.setdefault(directory / file, [])
            assert names is not None
            names.append(name)
        return shards
    if single.exists():
        return {single: None}
    raise UsageError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}", "point to a directory with safetensors weights")


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that will be written: name, safetensors dtype, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

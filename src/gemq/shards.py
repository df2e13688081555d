"""Read and write safetensors shards tensor by tensor, with positioned reads and writes.

The format (safetensors README): 8 bytes of little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, the data.
The safetensors library maps whole files, which counts against resident memory, and can only write a file whose tensors are all at hand.
A layer walk has one layer at hand and knows every header in advance, so this module writes headers first and tensors as they come.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from threading import Lock, local

import torch

from gemq.atomic import sync_path, write_point
from gemq.errors import IntegrityError, UsageError
from gemq.positioned import BESIDE_BYTES, begin_writeback, bytes_of, pieces, read_at, write_at

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
_CACHED_BYTES = 2 << 20


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
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise broken(f"{name} has the unknown dtype {str(dtype)[:80]!r}")
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        raise broken(f"{name} has the shape {str(shape)[:80]}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise broken(f"{name} has the offsets {str(offsets)[:80]}")
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != nbytes:
        raise broken(f"{name} of {dtype} {shape} does not fit its offsets, which span {offsets[1] - offsets[0]} bytes")
    return TensorInfo(name, dtype, tuple(shape), path, base + offsets[0], nbytes)


def shard_files(directory: Path) -> list[Path]:
    """The shards that a loader reads in `directory`, by name: those that the index lists, or the single file; their headers are not read.

    Raises IntegrityError for an index that can't be read, UsageError where there are neither.
    """
    return sorted(_shards(directory))


def _shards(directory: Path) -> dict[Path, list[str] | None]:
    """Shard -> the tensors that the index places there; None for the single file."""
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


def _opened(descriptors: dict[Path, int], opening: Lock, path: Path, flags: int) -> int:
    """The descriptor of `path` in `descriptors`, opened by the first thread that asks."""
    with opening:
        descriptor = descriptors.get(path)
        if descriptor is None:
            descriptor = descriptors[path] = os.open(path, flags | os.O_CLOEXEC)
        return descriptor


class ShardReader:
    """The tensors of a checkpoint directory by name; opens each shard once and never maps it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._descriptors: dict[Path, int] = {}
        self._opening = Lock()
        self.tensors: dict[str, TensorInfo] = {}
        for path, names in _shards(directory).items():
            header = read_header(path)
            missing = sorted(set(names) - set(header)) if names is not None else []
            if missing:
                raise IntegrityError(f"{path} lacks {missing[0]}, which {INDEX_FILE} places there", "fetch or copy the checkpoint again")
            for name, info in header.items():
                if name in self.tensors:
                    raise IntegrityError(
                        f"{name} stands in {self.tensors[name].path.name} and in {path.name}", "fetch the checkpoint again"
                    )
                self.tensors[name] = info

    @property
    def files(self) -> list[Path]:
        """The shards, in the order of their names."""
        return shard_files(self.directory)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def info(self, name: str) -> TensorInfo:
        """Where `name` lies; raises IntegrityError if the checkpoint has no such tensor."""
        try:
            return self.tensors[name]
        except KeyError:
            raise IntegrityError(
                f"{self.directory} has no tensor {name}", "check that the checkpoint is whole and of the architecture it claims"
            ) from None

    def read(self, name: str, *, pinned: bool = False) -> torch.Tensor:
        """The tensor `name`, in its stored dtype, in memory of its own; `pinned` memory, if a GPU is to fetch it from there."""
        info = self.info(name)
        return self.read_bytes(info, 0, info.nbytes, pinned=pinned).view(DTYPES[info.dtype]).reshape(info.shape)

    def read_rows(self, name: str, rows: Sequence[int], *, threads: int = 1, pinned: bool = False) -> torch.Tensor:
        """Rows `rows` of a matrix, in that order, without reading the others. Returns [len(rows), *shape[1:]]."""
        info = self.info(name)
        row_bytes = info.nbytes // max(info.shape[0], 1)
        out = torch.empty(len(rows), row_bytes, dtype=torch.uint8, pin_memory=pinned)
        view = bytes_of(out.reshape(-1))

        def read(first: int, stop: int) -> None:
            for position in range(first, stop):
                row = rows[position]
                if not 0 <= row < info.shape[0]:
                    raise IndexError(f"row {row} of {name}, which has {info.shape[0]}")
                self._read_view(info.path, info.offset + row * row_bytes, view[position * row_bytes : (position + 1) * row_bytes])

        if threads == 1 or len(rows) < 64 * threads:
            read(0, len(rows))
        else:
            ends = [len(rows) * share // threads for share in range(threads + 1)]
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(read, ends[:-1], ends[1:]))
        return out.view(DTYPES[info.dtype]).reshape(len(rows), *info.shape[1:])

    def read_slice(self, name: str, first: int, count: int, *, pinned: bool = False) -> torch.Tensor:
        """Rows `first` to `first + count` of a tensor seen as [rows, last dimension], in one read."""
        info = self.info(name)
        row_bytes = info.shape[-1] * DTYPES[info.dtype].itemsize
        raw = self.read_bytes(info, first * row_bytes, count * row_bytes, pinned=pinned)
        return raw.view(DTYPES[info.dtype]).reshape(count, info.shape[-1])

    def read_bytes(self, info: TensorInfo, start: int, length: int, *, pinned: bool = False) -> torch.Tensor:
        """`length` raw bytes of a tensor from byte `start` of it, as uint8."""
        out = torch.empty(length, dtype=torch.uint8, pin_memory=pinned)
        self._read_into(info.path, info.offset + start, out)
        return out

    def _read_into(self, path: Path, offset: int, out: torch.Tensor) -> None:
        self._read_view(path, offset, bytes_of(out))

    def _read_view(self, path: Path, offset: int, view: memoryview) -> None:
        descriptor = self._descriptors.get(path) or _opened(self._descriptors, self._opening, path, os.O_RDONLY)
        done = read_at(descriptor, offset, view)
        if done < len(view):
            raise IntegrityError(f"{path} ended at byte {offset + done} while it was read", "the file changed: fetch or copy it again")

    def read_into(self, info: TensorInfo, start: int, out: torch.Tensor) -> None:
        """Fill `out`, contiguous uint8, with raw bytes of a tensor from byte `start` of it."""
        self._read_into(info.path, info.offset + start, out)

    def close(self) -> None:
        """Close the shards; the reader opens them again when it is asked for a tensor."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that will be written: name, safetensors dtype, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class ShardWriter:
    """Shards whose every header is known in advance; tensors are written at their place in any order, also by a later process.

    Same specs, same layout: what a file holds depends on what was written and not on when.
    """

    def __init__(self, directory: Path, specs: Iterable[TensorSpec], max_shard_bytes: int = 2_000_000_000) -> None:
        groups: list[list[TensorSpec]] = [[]]
        filled = 0
        for spec in specs:
            if groups[-1] and filled + spec.nbytes > max_shard_bytes:
                groups.append([])
                filled = 0
            groups[-1].append(spec)
            filled += spec.nbytes
        self.directory = directory
        self._descriptors: dict[Path, int] = {}
        self._opening, self._copying = Lock(), local()
        self.tensors: dict[str, TensorInfo] = {}
        self._headers: dict[Path, bytes] = {}
        self._sizes: dict[Path, int] = {}
        for number, group in enumerate(groups, 1):
            name = SINGLE_FILE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            self._lay_out(directory / name, group)
        self.sharded = len(groups) > 1

    def _lay_out(self, path: Path, group: list[TensorSpec]) -> None:
        # wide dtypes first, as safetensors does, so that every tensor is aligned
        ordered = sorted(group, key=lambda spec: (-DTYPES[spec.dtype].itemsize, spec.name))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for spec in ordered:
            header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, offset + spec.nbytes]}
            offset += spec.nbytes
        raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        raw += b" " * (-len(raw) % 8)
        self._headers[path] = struct.pack("<Q", len(raw)) + raw
        start = 8 + len(raw)
        for spec in ordered:
            if spec.name in self.tensors:
                raise ValueError(f"{spec.name} is planned twice")
            self.tensors[spec.name] = TensorInfo(spec.name, spec.dtype, spec.shape, path, start, spec.nbytes)
            start += spec.nbytes
        self._sizes[path] = start

    @property
    def files(self) -> list[Path]:
        """The shards, in their order."""
        return list(self._sizes)

    @property
    def total_bytes(self) -> int:
        """Bytes of all shards, headers included."""
        return sum(self._sizes.values())

    def allocate(self) -> list[str]:
        """Make every shard have its size and its header, on the disk when this returns; a full disk shows now.

        What tensors an earlier process wrote stay. Returns the names of shards that were there and had another size or header.
        """
        changed = []
        for path, size in self._sizes.items():
            was_there, header = path.exists(), self._headers[path]
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                if os.fstat(descriptor).st_size != size or os.pread(descriptor, len(header), 0) != header:
                    changed += [path.name] if was_there else []
                    os.ftruncate(descriptor, size)
                    os.posix_fallocate(descriptor, 0, size)
                    write_point(f"sized:{path.name}")
                    write_at(descriptor, 0, memoryview(header))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_path(self.directory)
        write_point("allocated")
        return changed

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Put `tensor` in its place; raises ValueError if its dtype or shape is not the planned one."""
        info = self.tensors[name]
        if DTYPE_NAMES.get(tensor.dtype) != info.dtype or tuple(tensor.shape) != info.shape:
            raise ValueError(f"{name} was planned as {info.dtype} {info.shape}, got {tensor.dtype} {tuple(tensor.shape)}")
        raw = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
        self._write_at(info.path, info.offset, bytes_of(raw))

    def write_rows(self, name: str, first: int, rows: torch.Tensor) -> None:
        """Put `rows` at row `first` of the tensor `name`; raises ValueError where they don't fit."""
        info = self.tensors[name]
        if DTYPE_NAMES.get(rows.dtype) != info.dtype or tuple(rows.shape[1:]) != info.shape[1:] or first + rows.shape[0] > info.shape[0]:
            raise ValueError(f"{name} was planned as {info.dtype} {info.shape}, got rows {first} on of {rows.dtype} {tuple(rows.shape)}")
        raw = rows.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
        self._write_at(info.path, info.offset + first * (info.nbytes // info.shape[0]), bytes_of(raw))

    def write_columns(self, name: str, first: int, columns: torch.Tensor) -> None:
        """Put `columns` at column `first` of the matrix `name`; raises ValueError where they don't fit."""
        info = self.tensors[name]
        rows, width = info.shape if len(info.shape) == 2 else (-1, -1)
        if DTYPE_NAMES.get(columns.dtype) != info.dtype or columns.shape[0] != rows or first + columns.shape[1] > width:
            raise ValueError(f"{name} was planned as {info.dtype} {info.shape}, got columns {first} on of {columns.dtype} {tuple(columns.shape)}")
        if columns.shape[1] == width:
            self.write(name, columns)
            return
        raw, item = columns.detach().contiguous().cpu().view(torch.uint8), columns.element_size()
        for row in range(rows):
            self._write_at(info.path, info.offset + (row * width + first) * item, bytes_of(raw[row]))

    def copy(self, reader: ShardReader, name: str, source_name: str | None = None) -> None:
        """Copy a tensor byte for byte from `reader`, in pieces."""
        self.copy_bytes(reader, name, 0, self.tensors[name].nbytes, source_name)

    def copy_bytes(self, reader: ShardReader, name: str, start: int, length: int, source_name: str | None = None) -> None:
        """Copy `length` bytes of a tensor from its byte `start` on."""
        info, source = self.tensors[name], reader.info(source_name or name)
        if (info.dtype, info.shape) != (source.dtype, source.shape):
            raise ValueError(f"{name} was planned as {info.dtype} {info.shape}, the source has {source.dtype} {source.shape}")
        # one small buffer a thread, which stays in its cache and is not asked of the system again for each piece
        if not hasattr(self._copying, "buffer"):
            self._copying.buffer = torch.empty(_CACHED_BYTES, dtype=torch.uint8)
        for first in range(start, start + length, _CACHED_BYTES):
            piece = self._copying.buffer[: min(_CACHED_BYTES, start + length - first)]
            reader.read_into(source, first, piece)
            self._write_at(info.path, info.offset + first, bytes_of(piece))

    def _write_at(self, path: Path, offset: int, view: memoryview) -> None:
        descriptor = _opened(self._descriptors, self._opening, path, os.O_RDWR)
        write_at(descriptor, offset, view)
        begin_writeback(descriptor, offset, len(view))

    def read(self, name: str) -> torch.Tensor:
        """The tensor `name` as it lies in its shard now."""
        info = self.tensors[name]
        raw = bytearray()
        self.feed(name, raw.extend)
        return torch.frombuffer(raw, dtype=DTYPES[info.dtype]).reshape(info.shape)

    def feed(self, name: str, sink: Callable[[memoryview], object], start: int = 0, length: int | None = None) -> None:
        """Pass the bytes of `name`, as they lie in its shard now, to `sink` in pieces: all, or at most `length` from byte `start` on."""
        info = self.tensors[name]
        with FileIO(info.path) as file:
            file.seek(info.offset + start)
            for piece in pieces(file, BESIDE_BYTES, info.nbytes - start if length is None else min(length, info.nbytes - start)):
                sink(piece)

    def sync(self) -> None:
        """Make what was written survive a power cut."""
        with self._opening:
            descriptors = list(self._descriptors.values())
        for descriptor in descriptors:
            os.fdatasync(descriptor)

    def index_json(self) -> str | None:
        """The text of model.safetensors.index.json, or None where one file holds everything."""
        if not self.sharded:
            return None
        total = sum(info.nbytes for info in self.tensors.values())
        weight_map = {name: self.tensors[name].path.name for name in sorted(self.tensors)}
        return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, ensure_ascii=False) + "\n"

    def close(self) -> None:
        """Close the shards."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

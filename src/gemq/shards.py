"""Read and write safetensors shards tensor by tensor, with positioned reads and writes. What they say of themselves is in `shard_headers`.

The safetensors library maps whole files, which counts against resident memory, and can only write a file whose tensors are all at hand.
A layer walk has one layer at hand and knows every header in advance, so this module writes headers first and tensors as they come.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from threading import Lock, local

import torch

from gemq.atomic import sync_path, write_point
from gemq.errors import IntegrityError
from gemq.positioned import BESIDE_BYTES, begin_writeback, bytes_of, pieces, read_at, write_at
from gemq.shard_headers import INDEX_FILE, ITEM_BYTES, SINGLE_FILE, TensorInfo, TensorSpec, indexed_shards, read_header, shard_files

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CACHED_BYTES = 2 << 20


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
        for path, names in indexed_shards(directory).items():
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
        ordered = sorted(group, key=lambda spec: (-ITEM_BYTES[spec.dtype], spec.name))
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

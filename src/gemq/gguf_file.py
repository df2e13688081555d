"""Read a GGUF file that may come in several parts, without joining them on disk.

The `gguf` package's own reader makes one array object of every token and score, which takes 20 s for Gemma's vocabulary; this one reads
the header as plain values and leaves the tensors where they lie. Dequantization stays with that package.
Layout: the GGUF specification, version 3, little-endian (docs/gguf.md of the ggml project).
"""

from __future__ import annotations

import hashlib
import io
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gemq.errors import IntegrityError

_FETCH_AGAIN = "install the package that holds it again (pip install --force-reinstall --no-cache-dir), or fetch the file again"
_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9


class JoinedFiles(io.RawIOBase):
    """The bytes of several files, one after the other, as one readable and seekable file."""

    def __init__(self, parts: Sequence[Path]) -> None:
        self._files = [open(part, "rb", buffering=0) for part in parts]  # noqa: SIM115 - closed by close()
        self._ends: list[int] = []
        for file in self._files:
            self._ends.append((self._ends[-1] if self._ends else 0) + file.seek(0, io.SEEK_END))
        self._position = 0

    @property
    def size(self) -> int:
        """Bytes of all parts."""
        return self._ends[-1] if self._ends else 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        for number, end in enumerate(self._ends):
            if self._position < end:
                file, start = self._files[number], self._ends[number - 1] if number else 0
                file.seek(self._position - start)
                count = file.readinto(buffer) or 0
                self._position += count
                return count
        return 0

    def close(self) -> None:
        for file in self._files:
            file.close()
        super().close()


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies: name, shape as torch has it (rows first), ggml type, byte offset in the file, bytes."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int
    nbytes: int


class GgufFile:
    """The key-value pairs and tensors of a GGUF file; raises IntegrityError where the file is cut short or not what it says."""

    def __init__(self, parts: Sequence[Path]) -> None:
        self.name = parts[0].name if parts else "no file"
        self._raw = JoinedFiles(parts)
        self._file = io.BufferedReader(self._raw, 1 << 20)
        self.fields: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        if self._take(4) != b"GGUF":
            raise self._broken("it doesn't start with GGUF")
        version = self._number("<u4")
        if version not in (2, 3):
            raise self._broken(f"its version is {version}, gemq reads 2 and 3")
        tensor_count, field_count = self._number("<u8"), self._number("<u8")
        for _ in range(field_count):
            key = self._string()
            self.fields[key] = self._value(self._number("<u4"))
        self._read_tensor_table(tensor_count)

    def _broken(self, what: str) -> IntegrityError:
        return IntegrityError(f"GGUF file {self.name} ({self._raw.size} bytes in all its parts) can't be read: {what}", _FETCH_AGAIN)

    def _take(self, count: int) -> bytes:
        # a damaged length must not ask for terabytes
        if count > self._raw.size:
            raise self._broken(f"a length of {count} bytes at byte {self._file.tell()} is longer than the file")
        data = self._file.read(count)
        if len(data) != count:
            raise self._broken(f"it ends at byte {self._raw.size}, in the middle of its data")
        return data

    def _number(self, kind: str) -> int:
        return int(np.frombuffer(self._take(np.dtype(kind).itemsize), kind)[0])

    def _string(self) -> str:
        raw = self._take(struct.unpack("<Q", self._take(8))[0])
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._broken(f"a string before byte {self._file.tell()} is not UTF-8 ({error})") from None

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, count = self._number("<u4"), self._number("<u8")
            if item in _SCALARS:
                dtype = np.dtype(_SCALARS[item])
                return np.frombuffer(self._take(count * dtype.itemsize), dtype)
            if count > self._raw.size:
                raise self._broken(f"an array of {count} values is longer than the file")
            return [self._value(item) for _ in range(count)]
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind])
            scalar = np.frombuffer(self._take(dtype.itemsize), dtype)[0]
            # a float stays a numpy scalar: its str() is the shortest decimal of its own width
            return scalar if dtype.kind == "f" else scalar.item()
        raise self._broken(f"a value before byte {self._file.tell()} has the unknown type {kind}")

    def _read_tensor_table(self, count: int) -> None:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        found = []
        for _ in range(count):
            name, dimensions = self._string(), self._number("<u4")
            shape = tuple(reversed([self._number("<u8") for _ in range(dimensions)]))
            found.append((name, shape, self._number("<u4"), self._number("<u8")))
        alignment = int(self.fields.get("general.alignment", 32))
        start = math.ceil(self._file.tell() / alignment) * alignment
        for name, shape, ggml_type, offset in found:
            try:
                block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(ggml_type)]
            except ValueError:
                raise self._broken(f"{name} has the unknown ggml type {ggml_type}") from None
            nbytes = math.prod(shape) // block * block_bytes
            if start + offset + nbytes > self._raw.size:
                raise self._broken(f"{name} would end at byte {start + offset + nbytes}, the file ends at {self._raw.size}")
            self.tensors[name] = GgufTensor(name, shape, ggml_type, start + offset, nbytes)

    def field(self, key: str) -> Any:
        """The value of a key: a Python or numpy scalar, a string, an array of numbers, or a list of strings."""
        if key not in self.fields:
            raise self._broken(f"it has no key {key}")
        return self.fields[key]

    def tensor(self, name: str) -> GgufTensor:
        """Where a tensor lies."""
        if name not in self.tensors:
            raise self._broken(f"it has no tensor {name}")
        return self.tensors[name]

    def rows(self, tensor: GgufTensor, first: int, count: int) -> np.ndarray:
        """Rows `first` to `first + count` of a tensor (of a vector: all of it), dequantized. Returns [count, *shape[1:]] float32."""
        from gguf import GGMLQuantizationType, dequantize

        rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
        row_bytes = tensor.nbytes // rows
        self._file.seek(tensor.offset + first * row_bytes)
        kind = GGMLQuantizationType(tensor.ggml_type)
        raw = np.frombuffer(self._take(count * row_bytes), np.uint8).reshape(count, row_bytes)
        values = raw.view(np.float32) if kind is GGMLQuantizationType.F32 else dequantize(raw, kind)
        return values.reshape(count, *tensor.shape[1:]) if len(tensor.shape) > 1 else values.reshape(-1)

    def sha256(self) -> str:
        """SHA-256 of the whole file, in hex."""
        digest = hashlib.sha256()
        self._file.seek(0)
        while piece := self._file.read(1 << 22):
            digest.update(piece)
        return digest.hexdigest()

    def close(self) -> None:
        """Close the parts."""
        self._file.close()

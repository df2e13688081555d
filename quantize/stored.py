"""What a checkpoint stores of a quantized unit, as numbers: scales, zero points, and the integers of any rows, format by format."""

from __future__ import annotations

import math
import os
from threading import local

import numpy as np
from numpy.typing import NDArray

from gemq.errors import IntegrityError
from gemq.quantize.audit import Tensor, Unit

Floats = NDArray[np.float32]
_CHUNK_BYTES = 8 << 20

_open = local()


def read(tensor: Tensor, start: int, nbytes: int) -> bytes:
    """Bytes of a tensor; a thread keeps the file that it read last open until that path leads to another file."""
    status = os.stat(tensor.file)
    identity = (status.st_dev, status.st_ino)  # the open file keeps its inode, so that no newer file has the same one
    if getattr(_open, "identity", None) != identity:
        _open.file = open(tensor.file, "rb", buffering=0)  # noqa: SIM115
        opened = os.fstat(_open.file.fileno())
        _open.identity = (opened.st_dev, opened.st_ino)
    raw = os.pread(_open.file.fileno(), nbytes, tensor.start + start)
    if len(raw) != nbytes:
        raise IntegrityError(f"{tensor.file} ended while {tensor.name} was read", "the file changed: fetch or copy it again")
    return raw


def first_difference(tensor: Tensor, original: Tensor) -> str:
    """Where a copied tensor is not the source's ("" when it is, byte for byte)."""
    if (tensor.dtype, tensor.shape) != (original.dtype, original.shape):
        return f"is {tensor.dtype} {list(tensor.shape)}, the source has {original.dtype} {list(original.shape)}"
    for start in range(0, tensor.nbytes, _CHUNK_BYTES):
        nbytes = min(_CHUNK_BYTES, tensor.nbytes - start)
        ours, theirs = read(tensor, start, nbytes), read(original, start, nbytes)
        if ours != theirs:
            at = int(np.argmax(np.frombuffer(ours, np.uint8) != np.frombuffer(theirs, np.uint8)))
            return f"differs from the source from byte {start + at} of {tensor.nbytes} on"
    return ""


def decode(raw: bytes, dtype: str) -> Floats:
    """Numbers of a stored float type as float32."""
    if dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype == "F8_E4M3":
        return _E4M3[np.frombuffer(raw, np.uint8)]
    kinds = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}
    if dtype not in kinds:
        raise IntegrityError(f"a weight of dtype {dtype} is no float", "give the unquantized source")
    return np.frombuffer(raw, kinds[dtype]).astype(np.float32)


def _e4m3(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


_E4M3 = np.array([_e4m3(code) for code in range(256)], np.float32)


def unpack(raw: bytes, rows: int, columns: int, num_bits: int) -> NDArray[np.int16]:
    """Signed integers [rows, columns] from rows of little-endian int32 words that hold them bit after bit, lowest first, offset by half."""
    words = np.frombuffer(raw, np.uint8).reshape(rows, -1)
    if num_bits == 8:
        values = words[:, :columns].astype(np.int16)
    elif num_bits == 4:
        values = np.stack([words & 15, words >> 4], axis=-1).reshape(rows, -1)[:, :columns].astype(np.int16)
    else:
        bits = np.unpackbits(words, axis=1, bitorder="little")[:, : columns * num_bits].reshape(rows, columns, num_bits)
        values = (bits.astype(np.int16) << np.arange(num_bits, dtype=np.int16)).sum(-1, dtype=np.int16)
    return values - np.int16(1 << (num_bits - 1))


def scales_of(unit: Unit) -> Floats:
    """The unit's scales [out, groups]."""
    out, groups = unit.shape[0], unit.scheme.groups(unit.shape[1])
    stored = unit.tensors["scales" if unit.scheme.format == "gptq" else "weight_scale"]
    scales = decode(read(stored, 0, stored.nbytes), stored.dtype).reshape(stored.shape)
    return np.broadcast_to(scales.T if unit.scheme.format == "gptq" else scales, (out, groups))


def zero_points_of(unit: Unit) -> Floats | float:
    """The unit's zero points [out, groups], as the stored integers have them; 0 where weights are symmetric."""
    stored = unit.tensors.get("weight_zero_point")
    if stored is None:
        return 0.0
    raw = read(stored, 0, stored.nbytes)
    out, groups = unit.shape[0], unit.scheme.groups(unit.shape[1])
    if unit.scheme.format != "pack-quantized":
        return np.broadcast_to(np.frombuffer(raw, np.int8).reshape(stored.shape), (out, groups)).astype(np.float32)
    columns = np.ascontiguousarray(np.frombuffer(raw, "<i4").reshape(stored.shape).T)
    return unpack(columns.tobytes(), groups, out, unit.scheme.num_bits).T.astype(np.float32)


def integers_of(unit: Unit, first: int, rows: int) -> Floats:
    """What is stored for rows `first` on of a unit's weight: [rows, in], integers around zero or E4M3 numbers."""
    (out, inputs), scheme = unit.shape, unit.scheme
    if scheme.format == "gptq":
        return _columns(unit.tensors["qweight"], first, rows, scheme.num_bits).astype(np.float32)
    body = unit.tensors.get("weight_packed") or unit.tensors["weight"]
    raw = read(body, first * body.nbytes // out, rows * body.nbytes // out)
    if scheme.format == "pack-quantized":
        return unpack(raw, rows, inputs, scheme.num_bits).astype(np.float32)
    return decode(raw, "F8_E4M3") if scheme.type == "float" else np.frombuffer(raw, np.int8).astype(np.float32)


def _columns(qweight: Tensor, first: int, count: int, num_bits: int) -> NDArray[np.int16]:
    """The integers of `count` outputs [count, in] from a gptq unit's words [in * num_bits / 32, out], where an output is a column."""
    words, out = qweight.shape
    raw = b"".join(read(qweight, (row * out + first) * 4, count * 4) for row in range(words))
    columns = np.ascontiguousarray(np.frombuffer(raw, "<i4").reshape(words, count).T)
    return unpack(columns.tobytes(), count, words * 32 // num_bits, num_bits)

"""A second pair of eyes on a checkpoint: its shards, its index and its quantization config, read without gemq's own reader or torch.

Everything here is written from the formats' descriptions: safetensors (8 bytes of little-endian header length, a JSON header, the data)
and, in schemes.py, what `quantization_config` says (which module takes which scheme, and which tensors a scheme stores).
"""

from __future__ import annotations

import json
import math
import re
import struct
import sys
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemq import output
from gemq.errors import IntegrityError, UsageError
from gemq.quantize.matching import is_known, matrix_module, shares_keys_and_values, unmatched
from gemq.quantize.schemes import Quantization, Scheme, quantization_of
from gemq.quantize.seal import Difference

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
              "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1}  # fmt: skip
_OF_UNITS = {"weight_packed", "weight_scale", "qweight"}  # a module with one of these is quantized
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_LONGEST_HEADER_BYTES = 100_000_000
_LARGEST = 2**63 - 1
_KEYS_AND_VALUES = re.compile(r"(?:^|\.)layers\.\d+\.self_attn\.(?:k_proj|v_proj|k_norm|v_norm)\.[a-z_]+$")
# nn.Linear's usual names, where a target says "Linear" and only tensors are at hand
_LINEAR_NAMES = re.compile(r"(.*_proj|linear|lm_head|per_layer_input_gate|per_layer_projection|per_layer_model_projection)$")


@dataclass(frozen=True)
class Tensor:
    """A tensor in a shard: `start` counts from the beginning of `file`, both in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    nbytes: int


def strict_json(raw: bytes, what: str, advice: str = "fetch or copy that file again") -> Any:
    """The document in `raw`; raises IntegrityError on bad UTF-8, bad JSON, NaN, or a key that stands twice in one object."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key stands twice in one object")
        return found

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{what} can't be read as JSON ({str(error)[:100]})", advice) from None


def read_shard(path: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file, in file order; raises IntegrityError unless they fill it without gap or overlap."""

    def broken(why: str) -> IntegrityError:
        return IntegrityError(f"{path.name} is not a whole safetensors file: {why}", "fetch or copy that file again")

    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            first = file.read(8)
            if len(first) != 8:
                raise broken(f"it has only {size} bytes")
            (length,) = struct.unpack("<Q", first)
            if length > _LONGEST_HEADER_BYTES or 8 + length > size:
                raise broken(f"its header claims {length} bytes, the file has {size}")
            raw = file.read(length)
    except OSError as error:
        raise broken(f"{error.strerror}") from None
    if not raw.startswith(b"{"):
        raise broken("its header does not begin with a brace")
    header = strict_json(raw, f"the header of {path.name}")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise broken("its metadata must map text to text")
    placed = []
    for name, entry in header.items():
        problem = _entry_problem(name, entry)
        if problem:
            raise broken(f"{name[:200]!r} {problem}")
        begin, end = entry["data_offsets"]
        placed.append(Tensor(name, entry["dtype"], tuple(entry["shape"]), path, 8 + length + begin, end - begin))
    placed.sort(key=lambda tensor: (tensor.start, tensor.nbytes))
    position = 8 + length
    for tensor in placed:
        if tensor.start != position:
            kind = "overlaps the tensor before it" if tensor.start < position else "leaves a gap before it"
            raise broken(f"{tensor.name} {kind}: it starts at byte {tensor.start}, {position} is right")
        position += tensor.nbytes
    if position != size:
        raise broken(f"its tensors end at byte {position}, the file at {size}")
    return {tensor.name: tensor for tensor in placed}


def _entry_problem(name: str, entry: object) -> str:
    if not name or not name.isprintable():
        return "is no name for a tensor"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        return "must have dtype, shape and data_offsets, and nothing else"
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in ITEM_BYTES:
        return f"has the unknown dtype {str(entry['dtype'])[:40]!r}"
    for key in ("shape", "data_offsets"):
        values = entry[key]
        if not isinstance(values, list) or len(values) > 64 or not all(type(value) is int and 0 <= value <= _LARGEST for value in values):
            return f"has {key} that are no list of sizes"
    if len(entry["data_offsets"]) != 2:
        return "must have two data_offsets"
    needed = math.prod(entry["shape"]) * ITEM_BYTES[entry["dtype"]]
    spanned = entry["data_offsets"][1] - entry["data_offsets"][0]
    if needed != spanned:
        return f"of {entry['dtype']} {entry['shape']} does not fill its {spanned} bytes"
    return ""


def read_tensors(directory: Path) -> tuple[dict[str, Tensor], list[Difference]]:
    """All tensors of a checkpoint by name, and where shards, index and each other disagree. Raises UsageError if there are none."""
    index = directory / INDEX_FILE
    shards = sorted(path for path in directory.rglob("*.safetensors") if path.parent == directory or not path.is_dir())
    if not shards and not index.exists():
        raise UsageError(f"{directory} has no safetensors weights", "give a directory with model.safetensors, or shards and their index")
    tensors, differences = _tensors_of(directory, shards)
    if index.exists():
        weight_map, total, broken = _read_index(index)
        differences += broken or _index_differences(index, weight_map, tensors)
        stored = sum(tensor.nbytes for tensor in tensors.values())
        if not broken and total is not None and total != stored:
            differences.append(Difference(index.name, f"claims a total_size of {str(total)[:40]}, the shards hold {stored}"))
    elif [shard.name for shard in shards] != ["model.safetensors"]:
        differences.append(Difference(index.name, "is missing, and there is more than one shard"))
    return tensors, differences


def read_source_tensors(directory: Path) -> tuple[dict[str, Tensor], list[Difference]]:
    """All tensors of a source by name, and what is wrong with its files, which may be a stranger's work.

    Read are the files that its index names, or model.safetensors; others (adapters, folders, shards left over) are no part of it. A total_size
    that is wrong or missing, which no reader asks for, is a warning. Raises UsageError if there are no weights.
    """
    index = directory / INDEX_FILE
    if not index.exists():
        if not (directory / SINGLE_FILE).exists():
            raise UsageError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}", "give the directory of the unquantized model")
        return _tensors_of(directory, [directory / SINGLE_FILE])
    weight_map, total, broken = _read_index(index)
    if broken:
        return {}, broken
    outside = [name for name, file in weight_map.items() if file != Path(file).name or file in (".", "..", "")]
    if outside:
        return {}, [Difference(outside[0], f"is outside the source, {index.name} places it in {weight_map[outside[0]]!r}")]
    tensors, differences = _tensors_of(directory, [directory / file for file in sorted(set(weight_map.values()))])
    stored = sum(tensor.nbytes for tensor in tensors.values())
    if not differences and total != stored:
        output.warn(f"{index} claims a total_size of {str(total)[:40]}, the shards hold {stored}; nothing depends on it")
    listed = {name: tensor for name, tensor in tensors.items() if name in weight_map}  # readers take the others of a file too
    return tensors, differences + _index_differences(index, weight_map, listed)


def _tensors_of(directory: Path, shards: list[Path]) -> tuple[dict[str, Tensor], list[Difference]]:
    differences: list[Difference] = []
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        try:
            found = read_shard(shard)
        except IntegrityError as error:
            differences.append(Difference(str(shard.relative_to(directory)), error.message))
            continue
        for name, tensor in found.items():
            if name in tensors:
                differences.append(Difference(name, f"stands in {tensors[name].file.name} and in {shard.name}"))
            tensors[name] = tensor
    return tensors, differences


def _read_index(index: Path) -> tuple[dict[str, str], object, list[Difference]]:
    """The weight_map of an index, its total_size (None where it has none), and why it can't be read."""
    try:
        document = strict_json(index.read_bytes(), index.name)
        weight_map = document["weight_map"]
        if not all(isinstance(file, str) for file in weight_map.values()):
            raise TypeError
        return weight_map, (document.get("metadata") or {}).get("total_size"), []
    except IntegrityError as error:
        return {}, None, [Difference(index.name, error.message)]
    except (OSError, KeyError, TypeError, AttributeError):
        return {}, None, [Difference(index.name, "has no weight_map of names to files")]


def _index_differences(index: Path, weight_map: dict[str, str], tensors: dict[str, Tensor]) -> list[Difference]:
    differences = []
    for name in sorted(set(weight_map) | set(tensors)):
        if name not in tensors:
            differences.append(Difference(name, f"is in no shard, {index.name} places it in {weight_map[name]!r}"))
        elif name not in weight_map:
            differences.append(Difference(name, f"is in {tensors[name].file.name}, {index.name} does not list it"))
        elif index.parent / weight_map[name] != tensors[name].file:
            differences.append(Difference(name, f"is in {tensors[name].file.name}, {index.name} places it in {weight_map[name]!r}"))
    return differences


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a checkpoint or source; raises IntegrityError if it is missing or no JSON object."""
    try:
        raw = (directory / "config.json").read_bytes()
    except OSError as error:
        raise IntegrityError(f"{directory / 'config.json'} can't be read: {error.strerror}", "fetch the checkpoint again") from None
    config = strict_json(raw, str(directory / "config.json"))
    if not isinstance(config, dict):
        raise IntegrityError(f"{directory / 'config.json'} is no JSON object", "fetch the checkpoint again")
    return config


@dataclass(frozen=True)
class Unit:
    """A quantized linear of a checkpoint: its module, the shape of its weight [out, in], its scheme and its tensors by suffix."""

    module: str
    shape: tuple[int, int]
    scheme: Scheme
    tensors: dict[str, Tensor]


@dataclass
class Structure:
    """What a checkpoint holds according to its headers and config: every tensor, and the quantized units among them."""

    tensors: dict[str, Tensor]
    units: dict[str, Unit]
    quantization: Quantization
    differences: list[Difference]


def is_redundant(config: dict[str, Any], name: str) -> bool:
    """Whether `config` says that no forward reads this key or value tensor: its layer shares an earlier one's."""
    return _KEYS_AND_VALUES.search(name) is not None and shares_keys_and_values(config, name)


def audit_structure(directory: Path) -> Structure:
    """Read shards, index and config of a checkpoint, and find where they disagree; reads no weights but the few bytes of weight_shape."""
    config = read_config(directory)
    quantization = quantization_of(config)
    tensors, differences = read_tensors(directory)
    modules: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        modules.setdefault(module, {})[suffix] = tensor
    units = {}
    for module, held in modules.items():
        if _OF_UNITS & set(held):
            unit = _unit(module, held, quantization, differences)
            if unit is not None:
                units[module] = unit
        elif "weight" in held and len(held["weight"].shape) == 2:
            scheme = quantization.scheme_of(module, is_linear=_LINEAR_NAMES.search(module) is not None)
            # a layer that shares an earlier one's keys and values has none of its own to serve, whatever the source's files hold
            if scheme is not None and quantization.names_all and not is_redundant(config, held["weight"].name):
                differences.append(Difference(f"{module}.weight", f"is not quantized, the config says {scheme.label()}"))
    if units and not differences and is_known(config):  # what is broken already is not compared with vLLM's rules besides
        matrices = {matrix: None for tensor in tensors.values() if (matrix := matrix_module(tensor.name, tensor.shape))}
        stored = {**matrices, **{module: unit.scheme.label() for module, unit in units.items()}}
        differences += [Difference(module, problem) for module, problem in unmatched(config, stored)]
    return Structure(tensors, units, quantization, differences)


def _unit(module: str, held: dict[str, Tensor], quantization: Quantization, differences: list[Difference]) -> Unit | None:
    scheme = quantization.scheme_of(module, is_linear=True)
    if scheme is None:
        differences.append(Difference(module, f"is quantized, and {quantization.unnamed}"))
        return None
    shape = _shape_of(module, held, scheme, differences)
    if shape is None:
        return None
    if scheme.strategy == "group" and shape[1] % scheme.group_size:
        differences.append(Difference(module, f"has {shape[1]} inputs, which groups of {scheme.group_size} don't divide"))
        return None
    expected, whole = scheme.tensors(shape), True
    for suffix, (dtypes, wanted) in expected.items():
        tensor = held.get(suffix)
        if tensor is None:
            differences.append(Difference(f"{module}.{suffix}", f"is missing, {scheme.label()} needs it"))
            whole = False
        elif tensor.dtype not in dtypes or tensor.shape != wanted:
            differences.append(Difference(tensor.name, f"is {tensor.dtype} {list(tensor.shape)}, {scheme.label()} of "
                                          f"{list(shape)} means {'/'.join(dtypes)} {list(wanted)}"))
            whole = False
    for suffix in sorted(set(held) - set(expected) - {"bias"}):
        differences.append(Difference(f"{module}.{suffix}", f"has no place beside {scheme.label()}"))
    unit = Unit(module, shape, scheme, {suffix: held[suffix] for suffix in expected}) if whole else None
    if unit is not None and scheme.format == "gptq":
        differences += _gptq_differences(unit)
    return unit


def _gptq_differences(unit: Unit) -> list[Difference]:
    """Where zero points or groups are not those that vLLM takes for granted: it looks at neither tensor."""
    scheme, differences = unit.scheme, []
    zeros, order = unit.tensors["qzeros"], unit.tensors["g_idx"]
    word = sum(scheme.stored_zero << shift for shift in range(0, 32, scheme.num_bits)).to_bytes(4, "little")
    if _whole(zeros) != word * (zeros.nbytes // 4):
        differences.append(Difference(zeros.name, f"are not all {scheme.stored_zero}, the zero point of symmetric weights that vLLM assumes"))
    size = unit.shape[1] // max(scheme.groups(unit.shape[1]), 1)
    groups = array("i", (column // size for column in range(unit.shape[1])))
    if sys.byteorder == "big":
        groups.byteswap()
    if _whole(order) != groups.tobytes():
        differences.append(Difference(order.name, f"does not number groups of {size} inputs in their order, which vLLM assumes"))
    return differences


def _whole(tensor: Tensor) -> bytes:
    with open(tensor.file, "rb") as file:
        file.seek(tensor.start)
        return file.read(tensor.nbytes)


def _shape_of(module: str, held: dict[str, Tensor], scheme: Scheme, differences: list[Difference]) -> tuple[int, int] | None:
    """[out, in] of a unit's weight: weight_shape says it where it is packed, else the weight itself."""
    if scheme.format == "gptq":
        return _shape_of_gptq(module, held, scheme, differences)
    stored, needed = ("weight_shape", "weight_packed") if scheme.format == "pack-quantized" else ("weight", "weight")
    for suffix in (stored, needed):
        if suffix not in held:
            differences.append(Difference(f"{module}.{suffix}", f"is missing, {scheme.label()} needs it"))
            return None
    tensor = held[stored]
    if stored == "weight":
        if len(tensor.shape) == 2:
            return tensor.shape[0], tensor.shape[1]
        differences.append(Difference(tensor.name, f"has the shape {list(tensor.shape)}, {scheme.label()} means a matrix"))
        return None
    if tensor.dtype != "I64" or tensor.shape != (2,):
        differences.append(Difference(tensor.name, f"is {tensor.dtype} {list(tensor.shape)}, {scheme.label()} means I64 [2]"))
        return None
    with open(tensor.file, "rb") as file:
        file.seek(tensor.start)
        out, inputs = struct.unpack("<qq", file.read(16))
    if out < 0 or inputs < 0:
        differences.append(Difference(tensor.name, f"says [{out}, {inputs}], which is no shape"))
        return None
    return out, inputs


def _shape_of_gptq(module: str, held: dict[str, Tensor], scheme: Scheme, differences: list[Difference]) -> tuple[int, int] | None:
    tensor = held.get("qweight")
    if tensor is None:
        differences.append(Difference(f"{module}.qweight", f"is missing, {scheme.label()} needs it"))
    elif len(tensor.shape) != 2 or not all(tensor.shape):
        differences.append(Difference(tensor.name, f"has the shape {list(tensor.shape)}, {scheme.label()} means a matrix"))
    else:
        return tensor.shape[1], tensor.shape[0] * 32 // scheme.num_bits
    return None

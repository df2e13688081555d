"""Whatever bytes a stranger sends, the readers of seal, shards, index and config raise gemq's own errors or read what is right."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gemq import shard_headers, shards
from gemq.errors import GemqError, IntegrityError
from gemq.quantize.audit import quantization_of, read_config, read_shard, read_tensors
from gemq.quantize.seal import SealedFile, parse_seal, path_problem, seal_bytes

EXAMPLES = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])

_scalars = (st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
            | st.sampled_from([2**63, -1, 10**400, "F32", "../x", "\ud800", "a\n", "0" * 64]))  # fmt: skip
_any_json = st.recursive(_scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
                         max_leaves=12)  # fmt: skip
_sizes = st.lists(st.integers(-2, 20) | st.sampled_from([2**31, 2**63, 10**4000]) | _scalars, max_size=4)
_dtypes = st.sampled_from([*shards.DTYPES, "U64", "F4"]) | _scalars
_entry = st.fixed_dictionaries({"dtype": _dtypes, "shape": _sizes, "data_offsets": _sizes}, optional={"more": _any_json}) | _any_json
_header = st.dictionaries(st.text(max_size=8) | st.just("__metadata__"), _entry, max_size=4) | _any_json
_no_digits = json.JSONEncoder(ensure_ascii=True)


def dumped(document: object) -> bytes:
    """JSON text of anything, also of integers that Python's own limit on digits would refuse to print."""
    return _no_digits.encode(document).encode() if not _too_long(document) else b'{"a":{"dtype":"U8","shape":[' + b"9" * 4200 + b"]}}"


def _too_long(document: object) -> bool:
    try:
        json.dumps(document)
    except ValueError:
        return True
    return False


@st.composite
def shard_files(draw: st.DrawFn) -> bytes:
    """A safetensors file: sound, with a strange header, or with bytes changed."""
    kind = draw(st.sampled_from(["sound", "header", "bytes"]))
    if kind == "bytes":
        return draw(st.binary(max_size=80))
    if kind == "header":
        header = draw(st.just(b"") | _header.map(dumped) | st.binary(max_size=60))
        length = draw(st.just(len(header)) | st.integers(0, 2**64 - 1))
        return struct.pack("<Q", length) + header + draw(st.binary(max_size=40))
    entries, position = {}, 0
    for name in draw(st.lists(st.text("abc", min_size=1, max_size=3), unique=True, max_size=4)):
        dtype, shape = draw(st.sampled_from(list(shards.DTYPES))), draw(st.lists(st.integers(0, 3), max_size=3))
        size = shards.DTYPES[dtype].itemsize
        for extent in shape:
            size *= extent
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}
        position += size
    raw = bytearray(dumped(entries))
    whole = bytearray(struct.pack("<Q", len(raw)) + raw + bytes(position))
    for _ in range(draw(st.integers(0, 3))):
        whole[draw(st.integers(0, len(whole) - 1))] = draw(st.integers(0, 255))
    return bytes(whole)


@contextmanager
def on_disk(name: str, raw: bytes) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(raw)
        yield path


def sentence_of(read: Callable[[], object], kind: type[GemqError] = GemqError) -> str:
    """What a reader refuses its input with ("" if it accepts it); any other exception goes through, and a message must be printable."""
    try:
        read()
    except kind as error:
        text = error.message
    else:
        return ""
    if not text or not text.encode() or len(text) > 1000:
        pytest.fail(f"{text[:100]!r} is no sentence")
    return text


def described(tensors: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...], int]]:
    return {name: (tensor.dtype, tuple(tensor.shape), tensor.nbytes) for name, tensor in tensors.items()}


HUGE = b'{"a":{"dtype":"U8","shape":[' + b"9" * 4000 + b"," + b"9" * 4000 + b'],"data_offsets":[0,0]}}'


@EXAMPLES
@given(shard_files())
@example(struct.pack("<Q", len(HUGE)) + HUGE)
def test_the_independent_reader_raises_only_integrity_errors(raw: bytes) -> None:
    with on_disk("a.safetensors", raw) as path:
        sentence_of(lambda: read_shard(path), IntegrityError)


@EXAMPLES
@given(shard_files())
@example(struct.pack("<Q", len(HUGE)) + HUGE)
def test_gemqs_reader_raises_only_gemqs_errors(raw: bytes) -> None:
    with on_disk("a.safetensors", raw) as path:
        sentence_of(lambda: shard_headers.read_header(path))


@EXAMPLES
@given(shard_files())
def test_what_the_independent_reader_accepts_gemqs_reader_reads_the_same(raw: bytes) -> None:
    with on_disk("a.safetensors", raw) as path:
        if sentence_of(lambda: read_shard(path)):
            return
        independent = described(read_shard(path))
        if all(dtype in shards.DTYPES for dtype, _, _ in independent.values()):
            assert described(shard_headers.read_header(path)) == independent


@EXAMPLES
@given(shard_files())
def test_what_the_independent_reader_accepts_the_safetensors_library_accepts(raw: bytes) -> None:
    from safetensors import safe_open

    with on_disk("a.safetensors", raw) as path:
        if not sentence_of(lambda: read_shard(path)):
            with safe_open(path, "np") as file:
                assert set(file.keys()) == set(read_shard(path))


_paths = st.text("ab/._\\é\n", max_size=6) | st.sampled_from(["config.json", "a/b", "../a", "gemq.seal.json"])
_seal_entry = st.fixed_dictionaries({
    "executable": st.booleans() | _scalars, "path": _paths | _scalars, "size": st.integers(0, 9) | _scalars,
    "sha256": st.sampled_from(["0" * 64, "F" * 64]) | _scalars}) | _any_json  # fmt: skip
_seal = st.fixed_dictionaries({"files": st.lists(_seal_entry, max_size=3) | _any_json, "version": st.just(1) | _scalars}) | _any_json


def canonical(document: object) -> bytes:
    try:
        return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    except ValueError:  # a lone surrogate, or more digits than Python prints
        return dumped(document)


@EXAMPLES
@given(_seal.map(canonical) | st.binary(max_size=200))
def test_a_seal_is_refused_or_canonical_and_sound(raw: bytes) -> None:
    if not sentence_of(lambda: parse_seal(raw), IntegrityError):
        files = parse_seal(raw)
        assert seal_bytes(files) == raw
        assert [path_problem(file.path) for file in files] == [""] * len(files)


_sealed = st.builds(SealedFile, st.booleans(), st.text(min_size=1, max_size=8).filter(lambda path: not path_problem(path)),
                    st.text("0123456789abcdef", min_size=64, max_size=64), st.integers(0, 2**63 - 1))  # fmt: skip


@EXAMPLES
@given(st.lists(_sealed, max_size=4, unique_by=lambda file: file.path))
def test_a_sound_seal_is_read_back(files: list[SealedFile]) -> None:
    paths = [file.path for file in files]
    if any(other.startswith(path + "/") for path in paths for other in paths):
        with pytest.raises(IntegrityError):
            parse_seal(seal_bytes(files))
    else:
        assert parse_seal(seal_bytes(files)) == sorted(files, key=lambda file: file.path)


@EXAMPLES
@given(st.integers(0, 2**20), st.integers(0, 7))
def test_any_flipped_bit_of_a_seal_is_refused_or_another_seal(position: int, bit: int) -> None:
    files = [SealedFile(False, "config.json", "0a" * 32, 10), SealedFile(True, "größe/launch.sh", "f0" * 32, 7)]
    raw = bytearray(seal_bytes(files))
    raw[position % len(raw)] ^= 1 << bit
    if not sentence_of(lambda: parse_seal(bytes(raw)), IntegrityError):
        assert parse_seal(bytes(raw)) != files


_weight_map = st.dictionaries(st.sampled_from(["a", "b"]), st.sampled_from(["a.safetensors", "../a"]) | _scalars)
_index = st.fixed_dictionaries({"weight_map": _weight_map}, optional={"metadata": _any_json}) | _any_json


@EXAMPLES
@given(_index.map(dumped) | st.binary(max_size=60))
def test_an_index_gives_differences_and_no_exception(raw: bytes) -> None:
    with on_disk("model.safetensors.index.json", raw) as path:
        sound = json.dumps({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
        (path.parent / "a.safetensors").write_bytes(struct.pack("<Q", len(sound)) + sound + b"x")
        tensors, differences = read_tensors(path.parent)
        assert set(tensors) == {"a"}
        for difference in differences:
            assert str(difference).encode()


_targets = st.lists(st.sampled_from(["Linear", "re:(", "re:.*", "a"]) | _scalars, max_size=2) | _any_json
_weights = st.dictionaries(st.sampled_from(["num_bits", "type", "strategy", "group_size", "symmetric"]),
                           st.sampled_from([4, 8, -1, 32, "int", "float", "group", "channel"]) | _scalars) | _any_json
_group = st.fixed_dictionaries({"targets": _targets, "weights": _weights}, optional={"format": _scalars, "input_activations": _any_json})
_groups = st.dictionaries(st.text(max_size=3), _group | _any_json, max_size=2) | _any_json
_forms = st.sampled_from(["pack-quantized", "int-quantized", "float-quantized"]) | _scalars
_config = st.fixed_dictionaries({"quant_method": st.just("compressed-tensors") | _scalars, "config_groups": _groups},
                                optional={"ignore": _any_json, "kv_cache_scheme": _any_json, "format": _forms})


@EXAMPLES
@given(_config | _any_json)
def test_a_quantization_config_is_understood_or_refused(stated: object) -> None:
    def understand() -> None:
        quantization = quantization_of({"quantization_config": stated})
        for linear in (False, True):
            scheme = quantization.scheme_of("model.layers.0.mlp.up_proj", is_linear=linear)
            if scheme is not None:
                assert scheme.tensors((64, 64))

    sentence_of(understand, IntegrityError)


@EXAMPLES
@given(_any_json.map(dumped) | st.binary(max_size=60))
def test_a_config_file_is_an_object_or_refused(raw: bytes) -> None:
    with on_disk("config.json", raw) as path:
        if not sentence_of(lambda: read_config(path.parent), IntegrityError):
            assert isinstance(read_config(path.parent), dict)

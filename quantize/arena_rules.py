"""What an arena asks of a checkpoint's files before it runs anything, as data, and the check of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from gemq.errors import UsageError
from gemq.quantize.audit import Structure
from gemq.quantize.companions import companion_files
from gemq.quantize.seal import Difference
from gemq.quantize.verify import Comparison
from gemq.quantize.verify_files import same_bytes

CODE_SUFFIXES = (".py", ".pyc", ".pyx", ".pth", ".so", ".pyd", ".dll", ".dylib", ".whl", ".egg")
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".ckpt", ".gguf", ".ggml", ".onnx", ".h5", ".hdf5", ".msgpack", ".npz", ".npy", ".pkl",
                   ".pickle", ".tflite", ".mlmodel", ".nemo", ".llamafile", ".zip", ".tar", ".gz", ".xz", ".zst", ".7z")  # fmt: skip
# the first bytes of weights and of what can hold them, whatever the file is called
WEIGHT_MAGIC = (b"GGUF", b"ggml", b"ggjt", b"PK\x03\x04", b"\x89HDF", b"\x93NUMPY", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05",
                b"\x1f\x8b", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"\x7fELF")  # fmt: skip


@dataclass(frozen=True)
class ArenaRules:
    """An arena's rules for a checkpoint; `other_tensors` is the largest share of bytes that is not the task's model (None: no limit)."""

    other_tensors: float | None
    source_code_only: bool


ARENAS = {
    # "The source's weights in any format; other tensors at most 1% of its bytes", sealed with "the source's Python files"
    "lowbarena": ArenaRules(0.01, True),
    # names no share; a checkpoint for it is held to the same
    "efficient-gemma": ArenaRules(0.01, True),
}


def arena_rules(name: str) -> ArenaRules:
    """The rules of the arena `name`; raises UsageError for one that gemq does not know."""
    if name not in ARENAS:
        raise UsageError(f"--arena is {name!r}", f"give one of {', '.join(ARENAS)}")
    return ARENAS[name]


def check_arena(directory: Path, source: Path, name: str, structure: Structure, comparison: Comparison) -> list[Difference]:
    """Where a checkpoint breaks an arena's rules. Regular files only is the seal's own rule and not checked again here."""
    rules, differences = arena_rules(name), []
    shards = {tensor.file for tensor in structure.tensors.values()}
    if rules.source_code_only:
        differences += _code_differences(directory, source)
    for path in sorted(path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()):
        if path not in shards and _holds_weights(path) and not same_bytes(path, source / path.relative_to(directory)):
            differences.append(Difference(str(path.relative_to(directory)), f"holds weights beyond the task's model, which {name} refuses"))
    if rules.other_tensors is not None:
        # "1% of its bytes" may mean the model's or the checkpoint's: the smaller one keeps to both
        whole = min(sum(tensor.nbytes for tensor in structure.tensors.values()), _model_bytes(comparison))
        other = sum(structure.tensors[added].nbytes for added in comparison.added)
        if other > rules.other_tensors * whole:
            largest = max(comparison.added, key=lambda added: structure.tensors[added].nbytes)
            differences.append(Difference(
                largest, f"and {len(comparison.added) - 1} more tensors that are not the task's model have {other} bytes, "
                f"{other / max(whole, 1):.2%} of its {whole}; {name} allows {rules.other_tensors:.0%}"))
    return differences


def _model_bytes(comparison: Comparison) -> int:
    return sum(tally.source_bytes for tally in comparison.kinds.values())


def _code_differences(directory: Path, source: Path) -> list[Difference]:
    ours = _code_files(directory)
    theirs = {path.as_posix() for path in companion_files(source) if path.name.lower().endswith(CODE_SUFFIXES)}
    differences = [Difference(path, "is code that the source does not have") for path in sorted(ours - theirs)]
    differences += [Difference(path, "is the source's code, and missing here") for path in sorted(theirs - ours)]
    differences += [Difference(path, "is code that differs from the source's") for path in sorted(ours & theirs)
                    if not same_bytes(directory / path, source / path)]
    return differences


def _code_files(directory: Path) -> set[str]:
    found = [path for path in directory.rglob("*") if path.name.lower().endswith(CODE_SUFFIXES) and not path.is_dir()]
    return {str(path.relative_to(directory)) for path in found}


def _holds_weights(path: Path) -> bool:
    if path.name.lower().endswith(WEIGHT_SUFFIXES):
        return True
    with open(path, "rb") as file:
        head = file.read(9)
    # a safetensors file under another name: a header length, then a brace
    is_shard = len(head) == 9 and head[8:] == b"{" and int.from_bytes(head[:8], "little") < os.path.getsize(path)
    return is_shard or head.startswith(WEIGHT_MAGIC)

"""What lies on disk, read without gemq: listings, seals, and checkpoints compared with their sources."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open

SEAL = "gemq.seal.json"


def tree(directory: Path) -> dict[str, str]:
    """Every path below `directory` with what it is: a folder, a link's target, or the SHA-256 of a file."""
    found = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_symlink():
            found[name] = f"link to {path.readlink()}"
        elif path.is_dir():
            found[name] = "folder"
        else:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def names(directory: Path) -> set[str]:
    """The names in `directory`."""
    return {path.name for path in directory.iterdir()}


def left_beside(output: Path) -> set[str]:
    """What exists of an output: itself, its partial folder, its lock."""
    found = names(output.parent) if output.parent.exists() else set()
    return {name for name in found if name == output.name or name.startswith(f"{output.name}.")}


def seal_of(checkpoint: Path) -> str:
    """The SHA-256 of a checkpoint's seal: the name of the whole checkpoint."""
    return hashlib.sha256((checkpoint / SEAL).read_bytes()).hexdigest()


def read_json(path: Path) -> Any:
    """A JSON document."""
    return json.loads(path.read_text(encoding="utf-8"))


def edit_json(path: Path, change: Callable[[Any], object]) -> None:
    """Change a JSON document in place; read-only files become writable."""
    document = read_json(path)
    change(document)
    path.chmod(0o644)
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def tensors_of(directory: Path) -> dict[str, Any]:
    """Every tensor of the shards that `directory` holds, by name."""
    found = {}
    for path in sorted(directory.glob("model*.safetensors")):
        with safe_open(path, "pt") as shard:
            found.update({name: shard.get_tensor(name) for name in shard.keys()})  # noqa: SIM118
    return found


def raw(tensor: Any) -> bytes:
    """A tensor's bytes, its type and its shape."""
    import torch

    return f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def unquantized_differences(checkpoint: Path, source: dict[str, Any]) -> list[str]:
    """Tensors of `source` that `checkpoint` neither has byte for byte nor quantized, and what it has besides."""
    made = tensors_of(checkpoint)
    wrong = []
    parts = {"weight_packed", "weight_scale", "weight_shape", "weight_zero_point"}
    for name, tensor in source.items():
        module = name.removesuffix(".weight")
        if f"{module}.weight_packed" in made or (name in made and f"{module}.weight_scale" in made):
            continue
        if name not in made:
            wrong.append(f"{name} is missing")
        elif raw(made[name]) != raw(tensor):
            wrong.append(f"{name} has other bytes")
    for name in made:
        module, _, part = name.rpartition(".")
        if name not in source and not (part in parts and f"{module}.weight" in source):
            wrong.append(f"{name} is not the source's")
    return wrong


def reseal(checkpoint: Path, *, keep_provenance: bool = False) -> None:
    """Write the seal that `checkpoint`'s files would have now, as somebody with bad intent or another tool would.

    Unless kept, provenance.intoto.json is left out: it names the files' digests too.
    """
    if not keep_provenance:
        (checkpoint / "provenance.intoto.json").unlink(missing_ok=True)
    files = [
        {"executable": False, "path": path.relative_to(checkpoint).as_posix(), "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
         "size": path.stat().st_size}
        for path in sorted(checkpoint.rglob("*")) if path.is_file() and path.name != SEAL
    ]  # fmt: skip
    files.sort(key=lambda file: str(file["path"]))
    document = json.dumps({"files": files, "version": 1}, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    seal = checkpoint / SEAL
    seal.chmod(0o644)
    seal.write_text(document, encoding="utf-8")

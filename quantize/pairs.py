"""Which tensor of a source each tensor of a checkpoint comes from; a mixture's experts are fused in the source and apart in the checkpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from gemq.errors import IntegrityError
from gemq.quantize.audit import ITEM_BYTES, Structure, Tensor, Unit, is_redundant, read_config, strict_json

# fused tensors [experts, out, in] and the matrices, in the order of their rows, that each expert's part of them is made of
_FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_FUSED_NAME = re.compile(r"(?P<experts>(?:.*\.)?experts)\.(?P<leaf>gate_up_proj|down_proj)$")


@dataclass(frozen=True)
class ExpertMatrix(Tensor):
    """One expert's matrix [out, in] where it lies in the source's tensor `fused`; `name` is what a checkpoint calls it."""

    fused: str


def expert_matrices(fused: Tensor) -> list[ExpertMatrix]:
    """The matrices in a fused tensor [experts, out, in], expert by expert; none if name or shape are not those of fused experts."""
    found = _FUSED_NAME.match(fused.name)
    if not found or len(fused.shape) != 3 or not fused.nbytes:
        return []
    parts = _FUSED[found["leaf"]]
    experts, rows, inputs = fused.shape
    if rows % len(parts):
        return []
    shape = (rows // len(parts), inputs)
    nbytes = shape[0] * inputs * ITEM_BYTES[fused.dtype]
    return [
        ExpertMatrix(f"{found['experts']}.{expert}.{part}.weight", fused.dtype, shape, fused.file,
                     fused.start + (expert * len(parts) + number) * nbytes, nbytes, fused.name)
        for expert in range(experts) for number, part in enumerate(parts)
    ]  # fmt: skip


def experts_apart(originals: dict[str, Tensor], structure: Structure) -> tuple[dict[str, Tensor], set[str]]:
    """`originals` with those fused experts taken apart that the checkpoint has apart, and the names of the fused.

    Experts that it has fused stay whole, so that more of them beside are additions; so do experts of which it has nothing.
    """
    result: dict[str, Tensor] = {}
    apart: set[str] = set()
    for name, original in originals.items():
        matrices = [] if name in structure.tensors else expert_matrices(original)
        if any(matrix.name in originals for matrix in matrices):  # a source that has experts both ways is compared as it is
            matrices = []
        if any(matrix.name in structure.tensors or matrix.name.removesuffix(".weight") in structure.units for matrix in matrices):
            apart.add(name)
            result.update({matrix.name: matrix for matrix in matrices})
        else:
            result[name] = original
    return result, apart


def _head_of(table: str) -> str:
    """The name of the head's weight in a model whose embedding is called `table`: lm_head stands next to the text model's `model`."""
    prefix = table.removesuffix("embed_tokens.weight")
    return (prefix.removesuffix("model.") if prefix.endswith(".model.") else "") + "lm_head.weight"


class Pairs:
    """The source's tensors as the checkpoint would name them (`originals`), and which of them each tensor of the checkpoint comes from.

    Fused experts that the checkpoint stores one by one stand among `originals` as `ExpertMatrix`es; `apart` has the fused names.
    """

    def __init__(self, directory: Path, source: Path, structure: Structure, originals: dict[str, Tensor]) -> None:
        self.directory, self.source, self.structure = directory, source, structure
        self.originals, self.apart = experts_apart(originals, structure)
        self.source_config = read_config(source)
        self.in_units = {tensor.name for unit in structure.units.values() for tensor in unit.tensors.values()}

    def original_of(self, weight: str) -> Tensor | None:
        """The source's tensor of that name; a head that the source ties comes from its embedding."""
        if weight in self.originals or weight.rpartition("lm_head.weight")[1:] != ("lm_head.weight", ""):
            return self.originals.get(weight)
        # at the top level, where the class that holds the head looks; a text config's own word counts where it is all there is
        untied = self.source_config.get("tie_word_embeddings") is False
        tables = [name for name in self.originals if name == "embed_tokens.weight" or name.endswith(".embed_tokens.weight")]
        if untied or len(tables) != 1 or any(name.endswith("lm_head.weight") for name in self.originals):
            return None
        return self.originals[tables[0]] if weight == _head_of(tables[0]) else None

    def units(self) -> list[tuple[Unit, Tensor]]:
        """The quantized units that the source has a weight of, by name, each with that weight."""
        found = [(unit, self.original_of(f"{module}.weight")) for module, unit in sorted(self.structure.units.items())]
        return [(unit, original) for unit, original in found if original is not None]

    def copies(self) -> list[tuple[Tensor, Tensor]]:
        """The other tensors that the source has too, by name, each with the source's."""
        names = sorted(set(self.structure.tensors) - self.in_units)
        found = [(self.structure.tensors[name], self.original_of(name)) for name in names]
        return [(tensor, original) for tensor, original in found if original is not None]

    def manifest_names(self, key: str) -> set[str]:
        """The tensor names that the checkpoint's manifest lists under `key`; none without a manifest."""
        path = self.directory / "gemq.json"
        if not path.exists():
            return set()
        manifest = strict_json(path.read_bytes(), str(path))
        names = manifest.get(key, []) if isinstance(manifest, dict) else None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise IntegrityError(f"{key} in {path} must be a list of tensor names", "don't use this checkpoint")
        return set(names)

    def is_redundant(self, name: str) -> bool:
        """Whether the source's config says that no forward reads this key or value tensor."""
        return is_redundant(self.source_config, name)

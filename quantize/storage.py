"""The checkpoint formats that a solved matrix can be stored in, behind one protocol; each is a module of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from gemq.recipes.model import Scheme
from gemq.shard_headers import TensorSpec

if TYPE_CHECKING:
    from gemq.quantize.plan import Plan
    from gemq.quantize.skeleton import Matrix


class Storage(Protocol):
    """What a module must offer to be a checkpoint format. The integers and scales are the solver's; only how they lie differs."""

    @property
    def OUTPUT_AXES(self) -> dict[str, int | None]:
        """Suffix -> the axis along which a tensor's outputs lie; None for one that is the same whatever the weights are."""

    def require_expressible(self, recipe: str, matrix: Matrix, scheme: Scheme) -> None:
        """Raise UsageError naming `matrix` and the reason if the format can't store it under `scheme`."""

    def specs(self, module: str, shape: tuple[int, int], scheme: Scheme) -> list[TensorSpec]:
        """The tensors that a matrix [out, in] becomes."""

    def suffixes(self, scheme: Scheme) -> tuple[str, ...]:
        """The names of those tensors behind the module's."""

    def to_tensors(self, stored: torch.Tensor, scales: torch.Tensor, scheme: Scheme, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
        """Suffix -> tensor for rows `stored` [rows, in] with `scales` [rows, groups] of a matrix of `shape` [out, in]."""

    def from_tensors(self, tensors: dict[str, torch.Tensor], scheme: Scheme) -> torch.Tensor:
        """The weight [out, in] float32 that the stored tensors stand for."""

    def quantization_config(self, plan: Plan) -> dict[str, Any]:
        """The `quantization_config` of config.json."""

    def more_files(self, plan: Plan) -> dict[str, dict[str, Any]]:
        """JSON files that the format wants beside config.json."""


def storage_of(name: str) -> Storage:
    """The format that a recipe names: `compressed-tensors` or `gptq`."""
    from gemq.quantize import autogptq, packing

    formats: dict[str, Storage] = {"compressed-tensors": packing, "gptq": autogptq}
    return formats[name]

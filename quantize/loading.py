"""Weights for the text model's skeleton: embeddings whose rows are read when they are asked for, one layer at a time, all in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gemq.errors import IntegrityError
from gemq.quantize.rtn import round_to_nearest
from gemq.quantize.scales import restore
from gemq.quantize.skeleton import Skeleton
from gemq.recipes.model import WeightScheme
from gemq.shards import ShardReader


class RowEmbedding(nn.Module):
    """Gemma's scaled embedding, its rows read from the source when they are asked for: [...] ids -> [..., dim] float32.

    With `scheme`, each row is what its stored form will stand for.
    """

    def __init__(self, reader: ShardReader, tensor: str, scale: float, device: torch.device, scheme: WeightScheme | None = None) -> None:
        super().__init__()
        self._reader, self._tensor, self._device, self.scheme = reader, tensor, device, scheme
        self._scale = torch.tensor(scale, dtype=torch.float32, device=device)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Look `ids` up; each row is read once."""
        unique, places = torch.unique(ids, return_inverse=True)
        return self.rows(unique.tolist())[places] * self._scale

    @property
    def weight(self) -> _Rows:
        """Of the table's weight, what Gemma 4's multimodal forward asks for: the padding token's row, `weight[id, :]`."""
        return _Rows(self)

    def rows(self, ids: list[int]) -> torch.Tensor:
        """The rows `ids` of the table, [ids, dim], before they are scaled."""
        rows = self._reader.read_rows(self._tensor, ids).to(torch.float32).to(self._device)
        return rows if self.scheme is None else restore(*round_to_nearest(rows, self.scheme), self.scheme)


@dataclass(frozen=True)
class _Rows:
    table: RowEmbedding

    def __getitem__(self, place: tuple[int, slice]) -> torch.Tensor:
        return self.table.rows([place[0]])[0][place[1]]


def finite_float32(reader: ShardReader, tensor: str, device: torch.device) -> torch.Tensor:
    """A tensor of the source as float32; raises IntegrityError if it holds a NaN or an infinity."""
    value = reader.read(tensor).to(device).to(torch.float32)
    require_finite(value, tensor)
    return value


def require_finite(value: torch.Tensor, tensor: str) -> None:
    """Raise IntegrityError if `value`, read from `tensor`, holds a NaN or an infinity."""
    if not torch.isfinite(value).all():
        bad = int((~torch.isfinite(value)).sum())
        raise IntegrityError(
            f"{tensor} holds {bad} of {value.numel()} values that are NaN or infinite", "the source is damaged: fetch it again"
        )


def load_layer(
    skeleton: Skeleton, reader: ShardReader, index: int, device: torch.device, replaced: dict[str, torch.Tensor] | None = None
) -> None:
    """Give layer `index` its weights, in float32; `replaced` maps modules to weights that stand for the source's."""
    replaced = replaced or {}
    state = {}
    for name, tensor in skeleton.layer_tensors(index).items():
        weight = replaced.get(f"model.layers.{index}.{name.removesuffix('.weight')}")
        state[name] = finite_float32(reader, tensor, device) if weight is None else weight.to(device)
    _assign(skeleton.decoder.layers[index], state)


def prepare_decoder(skeleton: Skeleton, reader: ShardReader, device: torch.device) -> None:
    """Give the decoder everything outside its layers: embeddings that read from the source, norms, rotary tables, the PLE projection."""
    decoder = skeleton.decoder
    for name, child in list(decoder.named_children()):
        if name == "layers":
            continue
        if isinstance(child, nn.Embedding):
            scale: Any = child.scalar_embed_scale
            setattr(decoder, name, RowEmbedding(reader, skeleton.source_name(f"model.{name}.weight"), scale, device))
        elif not list(child.state_dict()):
            # its buffers are computed, not stored: build it again where they can be
            setattr(decoder, name, type(child)(skeleton.text).to(device))
        else:
            _assign(child, {key: finite_float32(reader, skeleton.source_name(f"model.{name}.{key}"), device) for key in child.state_dict()})


def _assign(module: nn.Module, state: dict[str, torch.Tensor]) -> None:
    module.load_state_dict(state, assign=True)
    left = [name for name, tensor in [*module.named_parameters(), *module.named_buffers()] if tensor.is_meta]
    if left:
        raise AssertionError(f"{type(module).__name__}.{left[0]} has no value: it is neither stored nor computed")

"""Weights for the text model's skeleton: embeddings whose rows are read when they are asked for, one layer at a time.

All in float32, or in bfloat16 where the walk computes in it.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
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
    """Gemma's scaled embedding, its rows read from the source when they are asked for: [...] ids -> [..., dim] in `dtype`.

    With `scheme`, each row is what its stored form will stand for.
    """

    def __init__(
        self, reader: ShardReader, tensor: str, scale: float, device: torch.device, scheme: WeightScheme | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        super().__init__()
        self._dtype = dtype
        self._reader, self._tensor, self._device, self.scheme = reader, tensor, device, scheme
        self._scale = torch.tensor(scale, dtype=torch.float32, device=device)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Look `ids` up; each row is read once."""
        unique, places = torch.unique(ids, return_inverse=True)
        return (self.rows(unique.tolist()) * self._scale).to(self._dtype)[places]

    @property
    def weight(self) -> _Rows:
        """Of the table's weight, what Gemma 4's multimodal forward asks for: the padding token's row, `weight[id, :]`."""
        return _Rows(self)

    def rows(self, ids: list[int]) -> torch.Tensor:
        """The rows `ids` of the table, [ids, dim], before they are scaled."""
        gpu = self._device.type == "cuda"
        found = self._reader.read_rows(self._tensor, ids, threads=4 if gpu else 1, pinned=gpu)
        rows = found.to(self._device, non_blocking=True).to(torch.float32)
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
        _refuse_bad(int((~torch.isfinite(value)).sum()), value.numel(), tensor)


class FiniteCheck:
    """Raises IntegrityError for a NaN or an infinity: at once on a CPU, on a GPU when it is asked to, since each look there waits."""

    def __init__(self) -> None:
        self._counts: list[tuple[str, int, torch.Tensor]] = []

    def add(self, value: torch.Tensor, tensor: str) -> None:
        """Look at `value`, read from `tensor`."""
        self._counts.append((tensor, value.numel(), (~torch.isfinite(value)).sum()))
        if not value.is_cuda:
            self.check()

    def check(self) -> None:
        """Raise for what was added since the last time."""
        counts, self._counts = self._counts, []
        if counts:
            for (tensor, numel, _), bad in zip(counts, torch.stack([count for _, _, count in counts]).tolist(), strict=True):
                _refuse_bad(bad, numel, tensor)


def _refuse_bad(bad: int, numel: int, tensor: str) -> None:
    if bad:
        raise IntegrityError(f"{tensor} holds {bad} of {numel} values that are NaN or infinite", "the source is damaged: fetch it again")


class LayerLoader:
    """Gives decoder layers their weights, in `dtype`; with `ahead`, a thread reads the next layer while this one is computed."""

    def __init__(self, skeleton: Skeleton, reader: ShardReader, device: torch.device, dtype: torch.dtype, *, ahead: bool = False) -> None:
        self._skeleton, self._reader, self._device, self._dtype = skeleton, reader, device, dtype
        self._pool = ThreadPoolExecutor(1) if ahead else None
        self._next: tuple[int, Future[dict[str, torch.Tensor]]] | None = None

    def load(self, index: int, replaced: dict[str, torch.Tensor] | None = None) -> None:
        """Give layer `index` its weights; `replaced` maps modules to weights that stand for the source's.

        Raises IntegrityError if the source's hold a NaN or an infinity.
        """
        replaced = replaced or {}
        found = self._read_ahead(index)
        state, finite = {}, FiniteCheck()
        for name, tensor in self._skeleton.layer_tensors(index).items():
            weight = replaced.get(f"model.layers.{index}.{name.removesuffix('.weight')}")
            if weight is None:
                value = found[name] if name in found else self._reader.read(tensor)
                weight = value.to(self._device, non_blocking=True).to(self._dtype)
                finite.add(weight, tensor)
            state[name] = weight.to(self._device, self._dtype)
        finite.check()
        _assign(self._skeleton.decoder.layers[index], state)

    def close(self) -> None:
        """Stop reading."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._next = None

    def _read_ahead(self, index: int) -> dict[str, torch.Tensor]:
        if self._pool is None:
            return {}
        found = self._next[1].result() if self._next is not None and self._next[0] == index else self._read(index)
        following = index + 1
        self._next = (following, self._pool.submit(self._read, following)) if following < self._skeleton.layer_count else None
        return found

    def _read(self, index: int) -> dict[str, torch.Tensor]:
        pinned = self._device.type == "cuda"
        return {name: self._reader.read(tensor, pinned=pinned) for name, tensor in self._skeleton.layer_tensors(index).items()}


def prepare_decoder(skeleton: Skeleton, reader: ShardReader, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
    """Give the decoder everything outside its layers: embeddings that read from the source, norms, rotary tables, the PLE projection."""
    decoder = skeleton.decoder
    for name, child in list(decoder.named_children()):
        if name == "layers":
            continue
        if isinstance(child, nn.Embedding):
            scale: Any = child.scalar_embed_scale
            setattr(decoder, name, RowEmbedding(reader, skeleton.source_name(f"model.{name}.weight"), scale, device, dtype=dtype))
        elif not list(child.state_dict()):
            # its buffers are computed, not stored: build it again where they can be
            setattr(decoder, name, type(child)(skeleton.text).to(device))
        else:
            names = {key: skeleton.source_name(f"model.{name}.{key}") for key in child.state_dict()}
            _assign(child, {key: finite_float32(reader, source, device).to(dtype) for key, source in names.items()})


def _assign(module: nn.Module, state: dict[str, torch.Tensor]) -> None:
    module.load_state_dict(state, assign=True)
    left = [name for name, tensor in [*module.named_parameters(), *module.named_buffers()] if tensor.is_meta]
    if left:
        raise AssertionError(f"{type(module).__name__}.{left[0]} has no value: it is neither stored nor computed")

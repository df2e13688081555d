"""A solved matrix as the tensors that compressed-tensors stores, and back."""

from __future__ import annotations

import torch

from gemq.quantize.scales import restore
from gemq.recipes.model import Scheme


def to_tensors(stored: torch.Tensor, scales: torch.Tensor, scheme: Scheme, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Suffix -> tensor for rows `stored` [rows, in] with `scales` [rows, groups]; `shape` is the whole matrix's [out, in]."""
    tensors = {"weight_scale": scales.to(torch.bfloat16)}
    if scheme.format == "pack-quantized":
        from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

        tensors["weight_packed"] = pack_to_int32(stored, scheme.weights.num_bits)
        tensors["weight_shape"] = torch.tensor(shape, dtype=torch.int64)
    else:
        tensors["weight"] = stored
    return tensors


def from_tensors(tensors: dict[str, torch.Tensor], scheme: Scheme) -> torch.Tensor:
    """The weight [out, in] float32 that the stored tensors stand for; the inverse of `to_tensors` after rounding."""
    scales = tensors["weight_scale"].to(torch.float32)
    if scheme.format == "pack-quantized":
        from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

        stored = unpack_from_int32(tensors["weight_packed"], scheme.weights.num_bits, torch.Size(tensors["weight_shape"].tolist()))
    else:
        stored = tensors["weight"]
    return restore(stored, scales, scheme.weights)


def suffixes(scheme: Scheme) -> tuple[str, ...]:
    """The tensors that a matrix becomes."""
    return ("weight_packed", "weight_scale", "weight_shape") if scheme.format == "pack-quantized" else ("weight", "weight_scale")

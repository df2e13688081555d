"""Unpack weights of the AutoGPTQ checkpoint format (`quant_method: gptq`).

A linear [out, in] of b bits is stored as (AutoGPTQ's and GPTQModel's layout, which vLLM reads):
qweight [in * b / 32, out] int32, packed along the inputs, low bits first; scales [groups, out]; qzeros [groups, out * b / 32]
int32, packed along the outputs, each zero point minus one in `checkpoint_format: gptq` and as it is in `gptq_v2`; g_idx [in] int32,
the group of each input. Modules may differ in bits (`dynamic`): a module's are read off the shapes of its tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gemq.errors import IntegrityError, UsageError
from gemq.shards import ShardReader

_PARTS = ("qweight", "qzeros", "scales", "g_idx")


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The unsigned integers of an int32 matrix [rows, words], low bits first: [rows, words * 32 / bits] int32."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((packed.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)


def dequantize(
    qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, g_idx: torch.Tensor, bits: int, zero_offset: int
) -> torch.Tensor:
    """The weight [out, in] float32 = scale * (q - zero), with zero = stored + `zero_offset` (1 for format `gptq`, 0 for `gptq_v2`)."""
    levels = unpack(qweight.t().contiguous(), bits)
    zeros = (unpack(qzeros, bits) + zero_offset) & ((1 << bits) - 1) if zero_offset else unpack(qzeros, bits)
    groups = g_idx.long()
    centred = levels - zeros.t()[:, groups]
    return centred.float() * scales.float().t()[:, groups]


def read_state_dict(directory: Path, quantization: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor of a gptq-format checkpoint by its source name, quantized weights dequantized to float32."""
    bits, layout = quantization.get("bits"), quantization.get("checkpoint_format", "gptq")
    if bits not in (2, 4, 8):
        raise UsageError(
            f"{directory} is in gptq format with {bits!r} bits; 2, 4 and 8 can be read", "evaluate it through an endpoint's URL"
        )
    if layout not in ("gptq", "gptq_v2"):
        raise UsageError(
            f"{directory} has the checkpoint_format {layout!r}; gptq and gptq_v2 can be read", "evaluate it through an endpoint's URL"
        )
    reader = ShardReader(directory)
    try:
        return dict(_tensors(reader, 1 if layout == "gptq" else 0))
    finally:
        reader.close()


def _read_parts(reader: ShardReader, stem: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    qweight, qzeros, scales, g_idx = (reader.read(f"{stem}.{part}") for part in _PARTS)
    return qweight, qzeros, scales, g_idx


def _tensors(reader: ShardReader, zero_offset: int) -> Iterator[tuple[str, torch.Tensor]]:
    for name in reader.tensors:
        stem, _, part = name.rpartition(".")
        if f"{stem}.qweight" not in reader or part not in _PARTS:
            yield name, reader.read(name)
        elif part == "qweight":
            parts = qweight, qzeros, scales, g_idx = _read_parts(reader, stem)
            bits = 32 * qweight.shape[0] // max(len(g_idx), 1)
            try:
                if bits not in (2, 4, 8):
                    raise RuntimeError("2, 4 and 8 bits can be read")
                yield f"{stem}.weight", dequantize(qweight, qzeros, scales, g_idx, bits, zero_offset)
            except (RuntimeError, IndexError) as error:
                shapes = ", ".join(f"{each} {tuple(tensor.shape)}" for each, tensor in zip(_PARTS, parts, strict=True))
                raise IntegrityError(
                    f"{stem} does not fit together at {bits} bits: {shapes} ({error})", "quantize the source again"
                ) from error

"""Launches of the kernels: what a matrix is multiplied with, by the number of rows, and how the work is cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton

from gemq_int4.kernel import expand, gemv
from gemq_int4.layout import Layout
from gemq_int4.tensor import expand_tile, gemv_tensor

ROWS = 8  # the most rows of x that the matrix-vector kernel takes
_EXPANDED_BYTES = 256 << 20  # of weights in bf16 at a time
_CHUNKED_ROWS = 32  # up to here reading the packed weights several times costs less than writing them out once


@dataclass(frozen=True)
class Cut:
    """How the work is cut: `rows` of W a thread, `blocks` of K side by side, `warps` a program, `stages` of loads in flight.

    unroll: rounds of the loop over K that are one; registers: the most a thread may have, 0 for the compiler's choice.
    """

    rows: int
    blocks: int
    warps: int
    stages: int
    unroll: int = 1
    registers: int = 0

    def fits(self, layout: Layout) -> bool:
        return self.blocks * layout.lanes <= 32 * self.warps

    def program_rows(self, layout: Layout) -> int:
        """Rows of W that a program owns."""
        return self.rows * (32 * self.warps // (self.blocks * layout.lanes))


def _at_most(registers: int) -> dict[str, int]:
    return {"maxnreg": registers} if registers else {}


def padded_rows(m: int) -> int:
    """The number of rows that the kernel is compiled for: 1, 2, 4 or 8."""
    return 1 << (m - 1).bit_length()


def matvec(x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, layout: Layout, cut: Cut,
           dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:  # fmt: skip
    """y [M, N] = x [M, K] bf16 times the matrix that `layout.arrange` laid out, M from 1 to 8, summed in float32."""
    m, n = x.shape[0], words.shape[0]
    y = torch.empty((m, n), dtype=dtype, device=x.device)
    pairs = x.contiguous().view(torch.int32)
    grid = (triton.cdiv(n, cut.program_rows(layout)),)
    gemv[grid](pairs, words, scales, scales if bias is None else bias, y, n, m, layout.k, layout.bits, layout.groups, layout.lanes,
               padded_rows(m), cut.rows, cut.blocks, cut.stages, cut.unroll, bias is not None, cut.warps, num_warps=cut.warps,
               **_at_most(cut.registers))  # fmt: skip
    return y


@dataclass(frozen=True)
class TensorCut:
    """How the tensor cores' kernel cuts its work: `warps` share K, `eights` of rows of W a program (even), `chunks` of K on their way at once.

    registers: the most a thread may have, 0 for the compiler's choice, which saves them and so reads late; spread, which only one row of x can be:
    see `gemv_tensor`.
    """

    warps: int
    eights: int
    chunks: int
    registers: int = 0
    spread: bool = False


def tensor_matvec(x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, k: int, group: int, cut: TensorCut,
                  dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:  # fmt: skip
    """y [M, N] = x [M, K] bf16 times the int4 matrix that `layout.tile` laid out, scales [N, K / group] or [N], M from 1 to 8."""
    m, n = x.shape[0], words.shape[0] * 8
    y = torch.empty((m, n), dtype=dtype, device=x.device)
    pairs = x.contiguous().view(torch.int32)
    groups, grid = 0 if group == -1 else 128 // group, (triton.cdiv(n, 8 * cut.eights),)
    gemv_tensor[grid](pairs, words, scales, scales if bias is None else bias, y, n, m, k, groups, cut.warps, cut.eights, cut.chunks,
                      cut.spread and m == 1, bias is not None, num_warps=cut.warps, **_at_most(cut.registers))  # fmt: skip
    return y


def tensor_expanded(words: torch.Tensor, scales: torch.Tensor, k: int, group: int) -> torch.Tensor:
    """The weights [N, K] bf16 of a tiled matrix."""
    out = torch.empty((words.shape[0] * 8, k), dtype=torch.bfloat16, device=words.device)
    expand_tile[(out.shape[0],)](words, scales, out, k, 0 if group == -1 else 128 // group, num_warps=4)
    return out


def expanded(words: torch.Tensor, scales: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The weights [N, K] bf16."""
    out = torch.empty((words.shape[0], layout.k), dtype=torch.bfloat16, device=words.device)
    expand[(words.shape[0], triton.cdiv(layout.blocks, 4))](words, scales, out, layout.k, layout.bits, layout.groups, layout.lanes, 4, num_warps=2)
    return out


def product(x: torch.Tensor, bias: torch.Tensor | None, rows: int, few: Callable[[torch.Tensor], torch.Tensor],
            written_out: Callable[[slice], torch.Tensor]) -> torch.Tensor:  # fmt: skip
    """y [M, N] bf16 for any M without another copy of the weights: by eights (`few`), or with weights written out in bf16 for the library.

    rows: N; `written_out(part)` gives a part of the weights [rows, K] without a bias, `few` multiplies and adds the bias.
    """
    if x.shape[0] <= _CHUNKED_ROWS:
        return torch.cat([few(part) for part in x.split(ROWS)])
    y = torch.empty((x.shape[0], rows), dtype=torch.bfloat16, device=x.device)
    step = max(8, _EXPANDED_BYTES // (2 * x.shape[1]) // 8 * 8)
    for first in range(0, rows, step):
        part = slice(first, min(rows, first + step))
        y[:, part] = torch.nn.functional.linear(x, written_out(part), None if bias is None else bias[part])
    return y

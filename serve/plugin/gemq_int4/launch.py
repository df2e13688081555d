"""Launches of the kernels: what a matrix is multiplied with, by the number of rows, and how the work is cut."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from gemq_int4.kernel import expand, gemv
from gemq_int4.layout import Layout

ROWS = 8  # the most rows of x that the matrix-vector kernel takes
_EXPANDED_BYTES = 256 << 20  # of weights in bf16 at a time
_CHUNKED_ROWS = 32  # up to here reading the packed weights several times costs less than writing them out once


@dataclass(frozen=True)
class Cut:
    """How the work is cut: `rows` of W a thread, `blocks` of K side by side, `warps` a program, `stages` of loads in flight."""

    rows: int
    blocks: int
    warps: int
    stages: int

    def fits(self, layout: Layout) -> bool:
        return self.blocks * layout.lanes <= 32 * self.warps

    def program_rows(self, layout: Layout) -> int:
        """Rows of W that a program owns."""
        return self.rows * (32 * self.warps // (self.blocks * layout.lanes))


def padded_rows(m: int) -> int:
    """The number of rows that the kernel is compiled for: 1, 2, 4 or 8."""
    return 1 << (m - 1).bit_length()


def matvec(x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, layout: Layout, cut: Cut,
           dtype: torch.dtype = torch.bfloat16, early: bool = False) -> torch.Tensor:  # fmt: skip
    """y [M, N] = x [M, K] bf16 times the matrix that `layout.arrange` laid out, M from 1 to 8, summed in float32.

    early: start before the launch before it has ended (compute capability 90 and up).
    """
    m, n = x.shape[0], words.shape[0]
    y = torch.empty((m, n), dtype=dtype, device=x.device)
    pairs = x.contiguous().view(torch.int32)
    grid = (triton.cdiv(n, cut.program_rows(layout)),)
    options = {"num_warps": cut.warps, **({"launch_pdl": True} if early else {})}
    gemv[grid](pairs, words, scales, scales if bias is None else bias, y, n, m, layout.k, layout.bits, layout.groups, layout.lanes,
               padded_rows(m), cut.rows, cut.blocks, cut.stages, bias is not None, cut.warps, early, **options)  # fmt: skip
    return y


def expanded(words: torch.Tensor, scales: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The weights [N, K] bf16."""
    out = torch.empty((words.shape[0], layout.k), dtype=torch.bfloat16, device=words.device)
    expand[(words.shape[0], triton.cdiv(layout.blocks, 4))](words, scales, out, layout.k, layout.bits, layout.groups, layout.lanes, 4, num_warps=2)
    return out


def product(x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, layout: Layout, cut: Cut) -> torch.Tensor:
    """y [M, N] bf16 for any M without another copy of the weights: by eights, or weights written out in bf16 for the library's product."""
    if x.shape[0] <= _CHUNKED_ROWS:
        return torch.cat([matvec(part, words, scales, bias, layout, cut) for part in x.split(ROWS)])
    y = torch.empty((x.shape[0], words.shape[0]), dtype=torch.bfloat16, device=x.device)
    step = max(1, _EXPANDED_BYTES // (2 * layout.k))
    for first in range(0, words.shape[0], step):
        weights = expanded(words[first : first + step], scales[first : first + step], layout)
        y[:, first : first + step] = torch.nn.functional.linear(x, weights, None if bias is None else bias[first : first + step])
    return y

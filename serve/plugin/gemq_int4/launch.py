"""Launches of the kernel: how its work is cut, by shape and card, and the call itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from gemq_int4.kernel import gemv
from gemq_int4.layout import Layout

ROWS = 8  # the most rows of x
MAGIC = {4: (0x43000000, 0x45000000), 8: (0x47000000, 0x47000000)}


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


def matvec(x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, layout: Layout, cut: Cut) -> torch.Tensor:
    """y [M, N] bf16 = x [M, K] bf16 times the matrix that `layout.arrange` laid out, M from 1 to 8."""
    m, n = x.shape[0], words.shape[0]
    y = torch.empty((m, n), dtype=torch.bfloat16, device=x.device)
    pairs = x.contiguous().view(torch.int32)
    grid = (triton.cdiv(n, cut.program_rows(layout)),)
    first, second = MAGIC[layout.bits]
    gemv[grid](pairs, words, scales, scales if bias is None else bias, y, n, m, first, second, layout.k, layout.bits, layout.groups, layout.lanes,
               padded_rows(m), cut.rows, cut.blocks, cut.stages, bias is not None, cut.warps, num_warps=cut.warps)  # fmt: skip
    return y

"""How weights lie in memory for the kernel: compressed-tensors' words, sorted so that 16 bytes a thread meet 16 bytes of x a thread.

A row of words [K / 8] (int4: 8 nibbles along K, low first, offset by 8; int8: 4 bytes, offset by 128) is cut into blocks of 4 quarters of LANES
words, and a block is stored transposed, [LANES, 4]: thread l reads words l, LANES + l, 2 LANES + l, 3 LANES + l in one load, and neighbours read
neighbouring x. Scales [K / G] are sorted the same way, one 4-vector a group of a quarter. Nothing is computed: `arrange` only moves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GROUPS = (32, 64, 128, -1)  # weights a scale; -1: one scale a row


@dataclass(frozen=True)
class Layout:
    """What the kernel must know of a matrix [out, in]: `groups` is the number of groups in a quarter of a block, 0 for one scale a row."""

    bits: int
    k: int
    group: int

    @property
    def per_word(self) -> int:
        return 32 // self.bits

    @property
    def lanes(self) -> int:
        """Words in a quarter: 16, or 8 where K is no multiple of 16's block but of 8's (or shorter than it)."""
        words = self.k // self.per_word
        return 8 if words % 64 and (words % 32 == 0 or words < 64) else 16

    @property
    def quarter(self) -> int:
        """Weights in a quarter of a block."""
        return self.lanes * self.per_word

    @property
    def blocks(self) -> int:
        return -(-self.k // (4 * self.quarter))

    @property
    def groups(self) -> int:
        return 0 if self.group == -1 else max(1, self.quarter // self.group)


def why_not(bits: int, k: int, group: int) -> str | None:
    """Why the kernel can't take a matrix of these bits, K and group size; None if it can."""
    if bits not in (4, 8):
        return f"{bits} bits, and the kernel takes 4 and 8"
    if group not in GROUPS and group != k:
        return f"groups of {group}, and the kernel takes {', '.join(map(str, GROUPS[:-1]))} and one scale a row"
    if k % 32:
        return f"K = {k}, and the kernel takes multiples of 32"
    if group > 0 and k % group:
        return f"K = {k} is no multiple of the group size {group}"
    return None


def arrange(packed: torch.Tensor, scales: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """Words [N, blocks, LANES, 4] int32 and scales [N, blocks, groups, 4] ([N] for one scale a row) from compressed-tensors' two tensors.

    packed: [N, K / per word] int32; scales: [N, K / group] or [N, 1], of any float type, which is kept.
    """
    rows, words = packed.shape
    short = layout.blocks * 4 * layout.lanes - words
    if short:  # K no multiple of a block: x is read as 0 there, so that any words do
        packed = torch.nn.functional.pad(packed, (0, short))
    sorted_words = packed.view(rows, layout.blocks, 4, layout.lanes).transpose(2, 3).contiguous()
    if layout.groups == 0:
        return sorted_words, scales.reshape(rows).contiguous()
    if layout.group > layout.quarter:
        scales = scales.repeat_interleave(layout.group // layout.quarter, dim=1)
    short = layout.blocks * 4 * layout.groups - scales.shape[1]
    if short > 0:
        scales = torch.nn.functional.pad(scales, (0, short))
    scales = scales[:, : layout.blocks * 4 * layout.groups]
    return sorted_words, scales.reshape(rows, layout.blocks, 4, layout.groups).transpose(2, 3).contiguous()


def can_tile(bits: int, n: int, k: int, group: int) -> bool:
    """Whether the tensor cores' kernel takes a matrix: int4, and chunks of 128 of K that hold whole groups."""
    return bits == 4 and n % 8 == 0 and k % 32 == 0 and (group in (-1, 32, 64, 128) and (group == -1 or k % 128 == 0))


def tile(packed: torch.Tensor) -> torch.Tensor:
    """Words [N / 8, chunks, 8, 4, 4] from compressed-tensors' [N, K / 8], for the tensor cores' kernel: [rows by eight, chunk of 128 of K, row,
    thread, word]. Thread t of four holds words t, 4 + t, 8 + t, 12 + t of a chunk, and nibble i of a word becomes that of k = 2 i, nibble
    4 + i that of k = 2 i + 1: neighbours in K make a pair in the low and the high half.
    """
    rows, words = packed.shape
    if words % 16:  # x is read as 0 there
        packed = torch.nn.functional.pad(packed, (0, 16 - words % 16))
    paired = torch.zeros_like(packed)
    for i in range(4):
        paired |= ((packed >> (8 * i)) & 15) << (4 * i)
        paired |= ((packed >> (8 * i + 4)) & 15) << (16 + 4 * i)
    return paired.view(rows // 8, 8, -1, 4, 4).permute(0, 2, 1, 4, 3).contiguous()


def restore(words: torch.Tensor, scales: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The weights [N, K] that `arrange`d tensors stand for, in the scales' type: (q - offset) * scale."""
    rows = words.shape[0]
    flat = words.view(rows, layout.blocks, layout.lanes, 4).transpose(2, 3).reshape(rows, -1, 1)
    shifts = torch.arange(layout.per_word, dtype=torch.int32, device=words.device) * layout.bits
    stored = ((flat >> shifts) & ((1 << layout.bits) - 1)) - (1 << (layout.bits - 1))
    if layout.groups == 0:
        return (stored.reshape(rows, -1)[:, : layout.k]).to(scales.dtype) * scales[:, None]
    by_group = stored.reshape(rows, layout.blocks * 4 * layout.groups, -1).to(scales.dtype)
    each = scales.transpose(2, 3).reshape(rows, -1, 1)
    return (by_group * each).reshape(rows, -1)[:, : layout.k]

"""Which cut a matrix gets: what was measured on this card and ships in tuned/, else a rule, else a search when it is asked for.

The order of a sum along K follows from the shape alone (`blocks_of`), not from the card or a search, so that neither changes a result's bits.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from functools import cache
from pathlib import Path

import torch

from gemq_int4.launch import Cut, TensorCut, padded_rows, tensor_matvec
from gemq_int4.layout import Layout

Table = dict[tuple[int, int, int, int], dict[int, Cut]]  # (bits, N, K, group) -> rows of x -> cut
TensorTable = dict[tuple[int, int, int], TensorCut]  # (N, K, group) -> cut
_MANY_ROWS = 8192
_COMPILED = ((0, False), (96, True), (128, True))  # registers, spread
_WANTED = 528  # programs that fill a large card: four on each of 132 multiprocessors


@cache
def tuned(card: str) -> tuple[Table, TensorTable]:
    """The cuts measured on `card` (as the driver calls it), of the plain kernel and of the tensor cores'; empty for a card without any."""
    table: Table = {}
    tensors: TensorTable = {}
    for path in sorted((Path(__file__).parent / "tuned").glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["card"] == card:
            for key, by_rows in document.get("cuts", {}).items():
                n, k, group = map(int, key.split(","))
                table[document["bits"], n, k, group] = {int(m): Cut(*cut) for m, cut in by_rows.items()}
            for key, cut in document.get("tensor", {}).items():
                n, k, group = map(int, key.split(","))
                tensors[n, k, group] = TensorCut(*cut)
    return table, tensors


def tensor_rule(n: int, k: int) -> TensorCut:
    """The tensor cores' cut of a shape that was not measured: K shared by the fewest warps that leave each at most ten chunks of 128."""
    chunks = -(-k // 128)
    warps = 1
    while warps < 8 and (chunks > 10 * warps or (chunks > warps and n // 16 * warps < 4 * _WANTED)):
        warps *= 2
    each = -(-chunks // warps)
    at_once = next(count for count in (5, 4, 3, 2, 1) if each % count == 0)
    return TensorCut(warps, 2, at_once)


def blocks_of(layout: Layout, n: int) -> int:
    """How many blocks of K lie side by side: more where W has few rows, so that all threads have work."""
    wanted = 1 if n >= 8192 else 2 if n >= 4096 else 4 if n >= 1024 else 8
    while wanted > 1 and wanted >= 2 * layout.blocks:
        wanted //= 2
    return wanted


def rule(layout: Layout, n: int, m: int) -> Cut:
    """The cut of a shape that was not measured."""
    blocks = blocks_of(layout, n)
    warps = max(4, blocks * layout.lanes // 32)
    rows = 4 if m <= 2 else 2 if m <= 4 else 1
    while rows > 1 and n // Cut(rows, blocks, warps, 1).program_rows(layout) < _WANTED:
        rows //= 2
    return Cut(rows, blocks, warps, 1)


class Chooser:
    """Cuts for one card; `budget` seconds may be spent on shapes that are in no table, in all."""

    def __init__(self, card: str, budget: float = 0.0) -> None:
        plain, tensors = tuned(card)
        self.table: Table = dict(plain)
        self.tensors: TensorTable = dict(tensors)
        self.left = budget

    def cut(self, layout: Layout, n: int, m: int) -> Cut:
        """How the plain kernel multiplies m rows."""
        found = self.table.get((layout.bits, n, layout.k, layout.group))
        rows = padded_rows(m)
        return found[rows] if found and rows in found else rule(layout, n, rows)

    def by_tensor(self, layout: Layout, n: int) -> bool:
        """Whether the tensor cores' kernel is the one for a matrix: where it was measured to win, else for many rows of W.

        Its programs own sixteen rows or more: a matrix of few rows leaves it too few of them (H200: 2,560 x 2,048 in 4.6 us against 3.0).
        """
        if (n, layout.k, layout.group) in self.tensors:
            return True
        return (layout.bits, n, layout.k, layout.group) not in self.table and n >= _MANY_ROWS

    def tensor_cut(self, n: int, k: int, group: int) -> TensorCut:
        """How the tensor cores' kernel multiplies any rows."""
        return self.tensors.get((n, k, group)) or tensor_rule(n, k)

    def search(self, words: torch.Tensor, scales: torch.Tensor, k: int, group: int) -> None:
        """Measure cuts of the tensor cores' kernel for this shape while there is time, if it is in no table.

        Only what leaves the order of sums alone is tried: how many rows a program owns and how many loads are on their way.
        """
        n = words.shape[0] * 8
        if self.left <= 0 or (n, k, group) in self.tensors:
            return
        began, usual = time.monotonic(), tensor_rule(n, k)
        x = torch.randn((1, k), device=words.device).to(torch.bfloat16)
        best = (_microseconds(x, words, scales, k, group, usual), usual)
        each = math.ceil(math.ceil(k / 128) / usual.warps)
        for eights, chunks, (registers, spread) in itertools.product((2, 4), (1, 2, 3, 4, 5, 8, 10), _COMPILED):
            cut = TensorCut(usual.warps, eights, chunks, registers, spread)
            if each % chunks == 0 and cut != usual and time.monotonic() - began < self.left:
                best = min(best, (_microseconds(x, words, scales, k, group, cut), cut), key=lambda pair: pair[0])
        self.tensors[n, k, group] = best[1]
        self.left -= time.monotonic() - began


def _microseconds(x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, k: int, group: int, cut: TensorCut) -> float:
    """What a launch takes: the least of five, the weights driven from the cache in between."""
    flush = torch.empty(32 << 20, dtype=torch.int32, device=words.device)
    tensor_matvec(x, words, scales, None, k, group, cut)
    least = float("inf")
    for _ in range(5):
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        tensor_matvec(x, words, scales, None, k, group, cut)
        end.record()
        end.synchronize()
        least = min(least, start.elapsed_time(end) * 1e3)
    return least

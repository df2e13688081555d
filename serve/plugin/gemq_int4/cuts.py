"""Which cut a matrix gets: what was measured on this card and ships in tuned/, else a rule, else a search when it is asked for.

The order of a sum along K follows from the shape alone (`blocks_of`), not from the card or a search, so that neither changes a result's bits.
"""

from __future__ import annotations

import json
import time
from functools import cache
from pathlib import Path

import torch

from gemq_int4.launch import ROWS, Cut, matvec, padded_rows
from gemq_int4.layout import Layout

Table = dict[tuple[int, int, int, int], dict[int, Cut]]  # (bits, N, K, group) -> rows of x -> cut
_WANTED = 528  # programs that fill a large card: four on each of 132 multiprocessors


@cache
def tuned(card: str) -> Table:
    """The cuts measured on `card` (as the driver calls it); empty for a card without any."""
    table: Table = {}
    for path in sorted((Path(__file__).parent / "tuned").glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["card"] == card:
            for key, by_rows in document["cuts"].items():
                n, k, group = map(int, key.split(","))
                table[document["bits"], n, k, group] = {int(m): Cut(*cut) for m, cut in by_rows.items()}
    return table


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
    """Cuts for one card: `cut(layout, n, m)`; `budget` seconds may be spent on shapes that are in no table, in all."""

    def __init__(self, card: str, budget: float = 0.0) -> None:
        self.table: Table = dict(tuned(card))
        self.left = budget

    def cut(self, layout: Layout, n: int, m: int) -> Cut:
        found = self.table.get((layout.bits, n, layout.k, layout.group))
        rows = padded_rows(m)
        return found[rows] if found and rows in found else rule(layout, n, rows)

    def search(self, words: torch.Tensor, scales: torch.Tensor, layout: Layout) -> None:
        """Measure cuts for this shape while there is time, if it is in no table; only what leaves the order of sums alone is tried."""
        key = (layout.bits, words.shape[0], layout.k, layout.group)
        if self.left <= 0 or key in self.table:
            return
        began, n = time.monotonic(), words.shape[0]
        self.table[key] = {}
        for m in (1, 2, 4, ROWS):
            x = torch.randn((m, layout.k), device=words.device).to(torch.bfloat16)
            usual = rule(layout, n, m)
            best = (_microseconds(x, words, scales, layout, usual), usual)
            for rows in (1, 2, 4, 8):
                for warps in (1, 2, 4, 8):
                    cut = Cut(rows, usual.blocks, warps, 1)
                    if time.monotonic() - began >= self.left or not cut.fits(layout) or rows * m > 16:
                        continue
                    best = min(best, (_microseconds(x, words, scales, layout, cut), cut), key=lambda pair: pair[0])
            self.table[key][m] = best[1]
        self.left -= time.monotonic() - began


def _microseconds(x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, layout: Layout, cut: Cut) -> float:
    """What a launch takes: the least of five, the weights driven from the cache in between."""
    flush = torch.empty(32 << 20, dtype=torch.int32, device=words.device)
    matvec(x, words, scales, None, layout, cut)
    least = float("inf")
    for _ in range(5):
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        matvec(x, words, scales, None, layout, cut)
        end.record()
        end.synchronize()
        least = min(least, start.elapsed_time(end) * 1e3)
    return least

"""Whether records that a checkpoint is judged on stand in the windows that it was fitted to."""

from __future__ import annotations

from collections.abc import Sequence

from gemq.errors import UsageError

RUN = 16  # tokens in a row that two texts hardly share by chance
_SEEN = 0.5


def overlap(record: Sequence[int], known: set[tuple[int, ...]]) -> float:
    """The share of the distinct runs of 16 tokens in `record` that `known` has; 0 for a record that is shorter."""
    runs = runs_of(record)
    return len(runs & known) / len(runs) if runs else 0.0


def runs_of(tokens: Sequence[int]) -> set[tuple[int, ...]]:
    """The distinct runs of 16 tokens in `tokens`."""
    return {tuple(tokens[start : start + RUN]) for start in range(len(tokens) - RUN + 1)}


def require_disjoint(windows: Sequence[Sequence[int]], records: Sequence[Sequence[int]]) -> float:
    """The largest share of a record that stands in the calibration windows; raises UsageError where that is more than half of one."""
    known: set[tuple[int, ...]] = set().union(*map(runs_of, windows)) if windows else set()
    shares = [overlap(record, known) for record in records]
    seen = sum(share > _SEEN for share in shares)
    if seen:
        raise UsageError(f"{seen} of the {len(records)} records that the budget is held to stand in the calibration set",
                         "judge on other text than the checkpoint is fitted to: --eval-data self, or another file")  # fmt: skip
    return max(shares, default=0.0)

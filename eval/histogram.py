"""How KL is spread over positions: counts in bins of a logarithmic scale that are the same for every measurement."""

from __future__ import annotations

import math
from collections.abc import Sequence

DECADES = (-6, 1)
BINS_PER_DECADE = 4
EDGES = tuple(10 ** (DECADES[0] + step / BINS_PER_DECADE) for step in range((DECADES[1] - DECADES[0]) * BINS_PER_DECADE + 1))
"""Where the bins begin and end, in nats."""
_LEAST = 1e-12


def kl_histogram(values: Sequence[float]) -> list[int]:
    """How many of `values`, in nats, lie in each bin of EDGES; what is outside is in the first or the last."""
    counts = [0] * (len(EDGES) - 1)
    for value in values:
        step = math.floor((math.log10(max(value, _LEAST)) - DECADES[0]) * BINS_PER_DECADE)
        counts[min(max(step, 0), len(counts) - 1)] += 1
    return counts

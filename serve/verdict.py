r"""Whether one configuration of a server beats another: faster beyond the noise, and its greedy ids the same.

Runs come in pairs. With d_i = ln(B_i / A_i) there are two looks at most, each at half of the error that is allowed:

- after the planned n pairs Student's bound, mean(d) - t_{n-1} s_d / sqrt(n). On a quiet machine it decides with few pairs.
- where that doesn't decide, and its upper bound leaves room for a gain of 1% beyond the floor, after 24 pairs (or three times the planned) the
  bound of Wilcoxon's signed ranks (Hollander, Wolfe and Chicken, Nonparametric Statistical Methods, 3rd ed., section 3.3): the k-th smallest of
  the averages (d_i + d_j) / 2, i <= j, whose median is the estimate (Hodges and Lehmann 1963). On a shared machine some runs are slowed by a
  fifth: they cost the first bound everything and this one little. It needs only that equal servers differ as often one way as the other,
  and they run in turn.

B is faster if the lower bound is above the floor, which is how far two servers of one and the same configuration lay apart (at least 1). The
error of m candidates is shared out (Bonferroni), so that among all of them noise wins at most once in twenty tunes. A candidate whose upper
bound is below 1 is slower, and is not measured to the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from gemq.eval.statistics import t_quantile

FAMILY_ERROR = 0.05
LEAST_PAIRS = 2
UNQUIET = 1.02  # two servers of one configuration that lie further apart are measured on
_PROMISE = 1.01
_FURTHER = 24  # pairs at least, where the first look doesn't decide: with that many the bound stands two or three slow runs


@dataclass(frozen=True)
class Ratio:
    """The paired ratio B / A of `pairs` pairs with its two one-sided bounds (None where there are too few pairs for one)."""

    pairs: int
    ratio: float
    lower: float | None
    upper: float | None


def paired_ratio(pairs: Sequence[tuple[float, float]], confidence: float) -> Ratio:
    """The geometric mean of B / A over pairs (A, B), and Student's bounds on it, each one-sided at `confidence`."""
    logs = [math.log(b / a) for a, b in pairs]
    n = len(logs)
    mean = math.fsum(logs) / n
    if n < 2:
        return Ratio(n, math.exp(mean), None, None)
    reach = t_quantile(n - 1, confidence) * math.sqrt(math.fsum((each - mean) ** 2 for each in logs) / (n - 1) / n)
    return Ratio(n, math.exp(mean), math.exp(mean - reach), math.exp(mean + reach))


def ranked_ratio(pairs: Sequence[tuple[float, float]], confidence: float) -> Ratio:
    """Hodges and Lehmann's estimate of B / A over pairs (A, B), and the bounds of Wilcoxon's signed ranks, each one-sided at `confidence`."""
    logs = [math.log(b / a) for a, b in pairs]
    n = len(logs)
    averages = sorted((one + other) / 2 for place, one in enumerate(logs) for other in logs[place:])
    left_out = _left_out(n, 1 - confidence)
    lower, upper = (None, None) if left_out == 0 else (math.exp(averages[left_out - 1]), math.exp(averages[-left_out]))
    return Ratio(n, math.exp(median(averages)), lower, upper)


def _left_out(n: int, error: float) -> int:
    """The largest k for which a sum of signed ranks of n pairs that differ by nothing is below k with probability `error` at most."""
    ways = [1] + [0] * (n * (n + 1) // 2)  # how many choices among the ranks 1 to n come to each sum
    for rank in range(1, n + 1):
        for total in range(len(ways) - 1, rank - 1, -1):
            ways[total] += ways[total - rank]
    below, k = 0, 0
    while (below + ways[k]) <= error * 2**n:
        below += ways[k]
        k += 1
    return k


@dataclass(frozen=True)
class Divergence:
    """A prompt on which ids part: where, and how far the reference's token lies behind there (nats; None where nothing tells)."""

    id: str
    at: int
    margin_nats: float | None


@dataclass
class Trial:
    """One candidate against one incumbent: speeds of its pairs (A, B), what failed, where ids part, and what vLLM took for it.

    `checked` is the number of prompts whose ids were compared: 0 where it wasn't worth it, since it was no faster.
    """

    switch: str
    value: str
    settings: dict[str, str]
    against: dict[str, str]
    words: str = ""
    pairs: list[tuple[float, float]] = field(default_factory=list)
    failure: str = ""
    checked: int = 0
    divergences: list[Divergence] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """A line of the journal."""
        return asdict(self)

    @classmethod
    def from_json(cls, line: dict[str, Any]) -> Trial:
        """The trial that `to_json` wrote; raises KeyError, TypeError or ValueError on anything else."""
        made = cls(**line)
        made.pairs = [(float(a), float(b)) for a, b in made.pairs]
        made.divergences = [Divergence(**each) for each in line["divergences"]]
        return made


@dataclass(frozen=True)
class Criterion:
    """The decision: `confidence` of each bound over both looks, the first of which is after `planned` pairs; the `floor` that a lower bound must
    exceed; near-ties up to `tolerance` nats are no divergence."""

    confidence: float
    floor: float = 1.0
    tolerance: float = 0.0
    planned: int = 6

    @property
    def each_look(self) -> float:
        """The confidence of one look's bound."""
        return 1 - (1 - self.confidence) / 2

    @property
    def furthest(self) -> int:
        """The pairs of the second look."""
        return max(_FURTHER, 3 * self.planned)

    def ratio(self, pairs: Sequence[tuple[float, float]]) -> Ratio:
        """The ratio with the bounds of the look that so many pairs belong to."""
        return (paired_ratio if len(pairs) <= self.planned else ranked_ratio)(pairs, self.each_look)

    def further(self, pairs: Sequence[tuple[float, float]]) -> bool:
        """Whether a second look is worth its pairs: the first doesn't decide, and leaves room for a gain."""
        return not self.faster(pairs) and (self.ratio(pairs).upper or math.inf) > _PROMISE * self.floor

    def divergent(self, trial: Trial) -> list[Divergence]:
        """The divergences that count: without a tolerance all of them, a tie of two scores too."""
        return [each for each in trial.divergences if not self.tolerance or each.margin_nats is None or each.margin_nats > self.tolerance]

    def faster(self, pairs: Sequence[tuple[float, float]]) -> bool:
        """Whether B is faster than A beyond the noise."""
        return len(pairs) >= LEAST_PAIRS and (self.ratio(pairs).lower or 0.0) > self.floor

    def slower(self, pairs: Sequence[tuple[float, float]]) -> bool:
        """Whether B can be given up already."""
        return len(pairs) >= LEAST_PAIRS and (self.ratio(pairs).upper or math.inf) < 1

    def verdict(self, trial: Trial) -> tuple[bool, str]:
        """Whether the trial's candidate is kept, and why or why not, in words."""
        if trial.failure:
            return False, trial.failure
        if self.slower(trial.pairs):
            return False, "slower"
        if not self.faster(trial.pairs):
            return False, "not faster beyond the noise"
        bad = self.divergent(trial)
        if bad:
            apart = "" if bad[0].margin_nats is None else f" ({bad[0].margin_nats:.3f} nats apart)"
            return False, f"faster, but {len(bad)} of {trial.checked} prompts decode to other ids, {bad[0].id} from token {bad[0].at}{apart}"
        ties = len(trial.divergences)
        return True, "kept" + (f"; {ties} of {trial.checked} prompts part at near-ties within {self.tolerance:g} nats" if ties else "")


class LookAtAll(Criterion):
    """The test of a configuration against itself: measured to the end, further where the two lie apart, ids compared whatever the speed."""

    def faster(self, pairs: Sequence[tuple[float, float]]) -> bool:
        return True

    def slower(self, pairs: Sequence[tuple[float, float]]) -> bool:
        return False

    def further(self, pairs: Sequence[tuple[float, float]]) -> bool:
        return self.apart(pairs) > UNQUIET

    def apart(self, pairs: Sequence[tuple[float, float]]) -> float:
        """How far the two lie apart, as a ratio from 1 on."""
        ratio = ranked_ratio(pairs, self.each_look).ratio
        return max(ratio, 1 / ratio)

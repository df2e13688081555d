r"""The arenas' scores and gates: every formula that decides about an entry, in one file.

LowBArena, as its page for participants states it (protocol 1.0). m and s are the solution's gains in peak memory and throughput over BF16,
measured beside it in one run, L is the relative difference in generated tokens, drops are in points of accuracy, KL in nats a token:

    E = \sqrt{m s / max(1, 1 + L)}        D = 0.79 (mean drop) + 0.21 * 42.8 * KL        LowBScore = E exp(-max(D, 0) / 10)

A failed gate keeps a tenth of it; KL above 0.15, KL that can't be measured, a broken contract or engine rule scores 0. One of the rules: served
again under a hard cap of each workload's peak memory, it must hold its requests or keep 90% of its speed. The board ranks
LowBScore * exp(-GPU hours / 100). The page says that the three workloads weigh equally and that speed's mean is geometric; that memory's
is geometric too is gemq's reading.

Efficient Gemma, as its workspace page states it: the score is TPS = generated tokens / wall time at one request in flight; an entry is valid
if its perplexity is at most the reference's + 5% and its greedy ids are those of plain decoding; what it reports must be met by a private
re-run, and one more than 5% slower invalidates it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gemq.errors import UsageError
from gemq.eval.statistics import t_quantile

DROP_WEIGHT, KL_WEIGHT, POINTS_PER_NAT, DRIFT_SCALE = 0.79, 0.21, 42.8, 10.0
DROP_LIMIT_POINTS, SPEED_LIMIT, LENGTH_LIMIT, KL_LIMIT_NATS = 5.0, 0.95, 0.10, 0.15
SPEED_QUANTILE, SPEED_DEVIATION, WORKLOADS = 1.645, 0.05, 3
KEPT_BY_A_FAILED_GATE = 0.1
CAPPED_SPEED_LIMIT = 0.9
GPU_HOURS_SCALE = 100.0

PPL_MARGIN = 0.05
RERUN_MARGIN = 0.05


@dataclass(frozen=True)
class Gate:
    """One condition: `value` against `limit`, whether it is kept, and `margin`, what is left until it isn't (negative where it isn't)."""

    name: str
    value: float | None
    limit: float
    kept: bool
    margin: float | None

    def row(self) -> tuple[str, ...]:
        """The gate's line in the verdict table: name, kept, value, limit, margin."""
        value, margin = ("not measured" if number is None else f"{number:.5g}" for number in (self.value, self.margin))
        return self.name, "yes" if self.kept else "NO", value, f"{self.limit:.5g}", margin


@dataclass(frozen=True)
class Verdict:
    """An arena's judgement: its gates, the score they leave, and what the score was made of."""

    arena: str
    gates: tuple[Gate, ...]
    score: float
    parts: Mapping[str, float]

    @property
    def valid(self) -> bool:
        """Whether every gate is kept."""
        return all(gate.kept for gate in self.gates)

    def to_json(self) -> dict[str, Any]:
        """The verdict as JSON types."""
        return {"arena": self.arena, "valid": self.valid, "score": self.score, "parts": dict(self.parts),
                "gates": [asdict(gate) for gate in self.gates]}  # fmt: skip


def at_most(name: str, value: float | None, limit: float) -> Gate:
    """A gate that is kept up to and including `limit`; not measured or not finite is not kept."""
    known = value is not None and math.isfinite(value)
    return Gate(name, value if known else None, limit, bool(known and value <= limit), limit - value if known else None)  # type: ignore[operator]


def at_least(name: str, value: float | None, limit: float) -> Gate:
    """A gate that is kept from `limit` on; not measured or not finite is not kept."""
    known = value is not None and math.isfinite(value)
    return Gate(name, value if known else None, limit, bool(known and value >= limit), value - limit if known else None)  # type: ignore[operator]


def geometric_mean(ratios: Sequence[float]) -> float:
    """The geometric mean of positive ratios; raises UsageError on none, or on one that is not positive and finite."""
    if not ratios or not all(math.isfinite(ratio) and ratio > 0 for ratio in ratios):
        raise UsageError(f"{list(ratios)} has no geometric mean: positive ratios are needed", "measure both sides on every workload")
    return math.exp(math.fsum(map(math.log, ratios)) / len(ratios))


def efficiency(memory_gain: float, speed_gain: float, length_drift: float) -> float:
    """LowBArena's E = sqrt(m s / max(1, 1 + L)): answers that grew longer are charged, shorter ones earn nothing."""
    return math.sqrt(memory_gain * speed_gain / max(1.0, 1.0 + length_drift))


def quality_drift(mean_drop_points: float, kl_nats: float) -> float:
    """LowBArena's D in points: 0.79 of the mean accuracy drop, 0.21 of KL in nats a token at 42.8 points a nat."""
    return DROP_WEIGHT * mean_drop_points + KL_WEIGHT * POINTS_PER_NAT * kl_nats


def lowb_score(memory_gain: float, speed_gain: float, length_drift: float, mean_drop_points: float, kl_nats: float) -> float:
    """LowBScore = E exp(-max(D, 0) / 10) before any gate; BF16 against itself scores 1."""
    drift = quality_drift(mean_drop_points, kl_nats)
    return efficiency(memory_gain, speed_gain, length_drift) * math.exp(-max(drift, 0.0) / DRIFT_SCALE)


def board_score(score: float, gpu_hours: float) -> float:
    """What LowBArena's board ranks: LowBScore * exp(-GPU hours / 100)."""
    return score * math.exp(-gpu_hours / GPU_HOURS_SCALE)


def speed_bound(speed_gains: Sequence[float]) -> float:
    """The lower bound that LowBArena's speed gate looks at: the geometric mean less 1.645 * 0.05 / sqrt(3)."""
    return geometric_mean(speed_gains) - SPEED_QUANTILE * SPEED_DEVIATION / math.sqrt(WORKLOADS)


def judge_lowbarena(
    *, memory_gains: Sequence[float], speed_gains: Sequence[float], length_drift: float, mean_drop_points: float,
    drop_bounds_points: Mapping[str, float | None], kl_nats: float | None, contract_kept: bool = True,
    capped: Mapping[str, float] | None = None,
) -> Verdict:  # fmt: skip
    """LowBArena's verdict from gains over BF16 (a workload each), the mean drop, and each domain's 95% upper bound on it.

    `capped` has, by workload, the share of its speed that was left under the cap of memory (1 where all requests were held).
    `kl_nats` is None where the endpoint gave no prompt_logprobs. Raises UsageError where a gain is not positive or no domain was measured.
    """
    if not drop_bounds_points:
        raise UsageError("no domain's accuracy was measured", "measure at least one; gemq eval-accuracy does GSM8K")
    m, s = geometric_mean(memory_gains), geometric_mean(speed_gains)
    domains = [at_most(f"accuracy drop, {name}, upper bound, points", bound, DROP_LIMIT_POINTS)
               for name, bound in drop_bounds_points.items()]  # fmt: skip
    kl_gate = at_most("KL, nats a token", kl_nats, KL_LIMIT_NATS)
    rules = [at_least("contract", float(contract_kept), 1.0),
             *(at_least(f"requests held, or speed kept, under the memory cap, {name}", share, CAPPED_SPEED_LIMIT)
               for name, share in (capped or {}).items())]  # fmt: skip
    graded = [
        *domains, at_least("speed over BF16, lower bound", speed_bound(speed_gains), SPEED_LIMIT),
        at_most("generated tokens, difference from BF16's", abs(length_drift), LENGTH_LIMIT),
    ]  # fmt: skip
    parts = {"memory_gain": m, "speed_gain": s, "length_drift": length_drift, "efficiency": efficiency(m, s, length_drift)}
    score = 0.0
    if kl_nats is not None and kl_gate.kept and all(rule.kept for rule in rules):
        parts["drift_points"] = quality_drift(mean_drop_points, kl_nats)
        score = lowb_score(m, s, length_drift, mean_drop_points, kl_nats)
        parts["score_before_gates"] = score
        score *= 1.0 if all(gate.kept for gate in graded) else KEPT_BY_A_FAILED_GATE
    return Verdict("lowbarena", (*rules, *graded, kl_gate), score, parts)


def ppl_cap(reference_ppl: float) -> float:
    """Efficient Gemma's cap on perplexity: the reference's + 5%."""
    return reference_ppl * (1 + PPL_MARGIN)


def rerun_floor(reported_tps: float) -> float:
    """The slowest private re-run that Efficient Gemma takes for a reported TPS: 5% below it."""
    return reported_tps * (1 - RERUN_MARGIN)


def judge_efficient_gemma(
    *, tps: float, ppl: float | None, reference_ppl: float, completed: int, requests: int, greedy_identical: bool | None,
    reported_tps: float | None = None, contract_kept: bool = True,
) -> Verdict:  # fmt: skip
    """Efficient Gemma's verdict: the score is TPS, and 0 where a gate fails; with `reported_tps`, `tps` is taken as the private re-run."""
    gates = [
        at_least("contract", float(contract_kept), 1.0),
        at_least("requests completed", float(completed), float(requests)),
        at_most("PPL", ppl, ppl_cap(reference_ppl)),
        at_least("greedy ids identical", None if greedy_identical is None else float(greedy_identical), 1.0),
    ]
    if reported_tps is not None:
        gates.append(at_least("TPS of a re-run", tps, rerun_floor(reported_tps)))
    kept = all(gate.kept for gate in gates)
    return Verdict("efficient-gemma", tuple(gates), tps if kept else 0.0, {"tps": tps, "reference_ppl": reference_ppl})


@dataclass(frozen=True)
class Spread:
    """Several runs of one measure: mean, standard deviation, extremes, and `lower_95`, above which one more run lies with 95% confidence."""

    runs: int
    mean: float
    deviation: float | None
    lowest: float
    highest: float
    lower_95: float | None


def spread(values: Sequence[float]) -> Spread:
    """Mean, spread and lower prediction bound of a rate measured several times; deviation and bound are None for a single run.

    The bound is for one more run, as a judge's: mean - t s sqrt(1 + 1/n), t of n - 1 degrees of freedom, one-sided 95% (Hahn & Meeker,
    Statistical Intervals, 1991, section 4.7). It knows the spread between these runs, not between machines or prompts.
    """
    if not values:
        raise UsageError("no run was finished", "run at least one")
    n, mean = len(values), statistics.fmean(values)
    if n < 2:
        return Spread(n, mean, None, mean, mean, None)
    deviation = statistics.stdev(values)
    return Spread(n, mean, deviation, min(values), max(values), max(0.0, mean - t_quantile(n - 1) * deviation * math.sqrt(1 + 1 / n)))

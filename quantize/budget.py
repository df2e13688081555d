"""A budget of perplexity or KL, and what a finished checkpoint spends of it on the records that it is judged on and on those held out."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from gemq.errors import UsageError
from gemq.eval.ppl import PplResult, RecordScore
from gemq.eval.statistics import CONFIDENCE, cluster_mean, upper_bound
from gemq.quantize.decisions import HEAD, HEAD_SCHEMES, KEEP, SCHEMES
from gemq.quantize.journal import canonical
from gemq.quantize.looks import confidence_of

Objective = Literal["decode", "size", "throughput"]
OBJECTIVES: tuple[str, ...] = get_args(Objective)
HELD_OUT_ONE_IN = 4  # of the records: never looked at while the search decides, reported for the winner
FEWEST_TO_HOLD_OUT = 8
_MOST_DECIMALS = 12
_MOST_NATS = 20.0  # a bound above it is printed as "more than"


@dataclass(frozen=True)
class Budget:
    """How much worse a checkpoint may be: PPL(checkpoint) / PPL(source) - 1, or KL(source || checkpoint) in nats a token."""

    kind: Literal["ppl", "kl"]
    limit: float

    @classmethod
    def parse(cls, ppl: str | None, kl: float | None) -> Budget | None:
        """From --ppl-budget (such as 5%) and --kl-budget (nats); None for neither. Raises UsageError for both, or one that is no budget."""
        if ppl is not None and kl is not None:
            raise UsageError("--ppl-budget and --kl-budget are both given", "give one of them")
        if ppl is None and kl is None:
            return None
        name, value, kind = "--kl-budget", kl, "kl"
        if ppl is not None:
            name, kind = "--ppl-budget", "ppl"
            try:
                value = float(ppl.removesuffix("%")) / 100 if ppl.endswith("%") else float(ppl)
            except ValueError:
                raise UsageError(f"--ppl-budget is {ppl!r}", "give a percentage such as 5%") from None
        assert value is not None
        if not (math.isfinite(value) and 0 < value <= 1):
            raise UsageError(f"{name} is {ppl if ppl is not None else kl}", "give more than 0 and at most 100% (or 1 nat)")
        return cls(kind, value)  # type: ignore[arg-type]

    @property
    def nats(self) -> float:
        """The budget as a mean difference of log-probabilities."""
        return math.log1p(self.limit) if self.kind == "ppl" else self.limit

    @property
    def label(self) -> str:
        return f"ppl-{self.limit * 100:g}pct" if self.kind == "ppl" else f"kl-{self.limit:g}"

    def show(self, nats: float) -> str:
        """`nats` as a percentage of perplexity, or in nats, with enough digits for the budget and for a difference from it."""
        digits, fewest = -math.floor(math.log10(self.limit)), 2 if self.kind == "ppl" else 4
        decimals = max(fewest, digits if self.kind == "ppl" else digits + 2)
        while nats != self.nats and decimals < _MOST_DECIMALS and self._text(nats, decimals) == self._text(self.nats, decimals):
            decimals += 1
        return self._text(nats, decimals)

    def _text(self, nats: float, decimals: int) -> str:
        if nats > _MOST_NATS:
            return f"more than {self._text(_MOST_NATS, decimals)}"
        form = f".{decimals}f" if decimals <= _MOST_DECIMALS else ".3g"
        return f"{math.expm1(nats) * 100:+{form}}%" if self.kind == "ppl" else f"{nats:{form}} nats"


@dataclass(frozen=True)
class Spent:
    """A checkpoint compared with its source on some records, in nats a token: log of the ratio of perplexities, and KL; with upper bounds."""

    records: int
    tokens: int
    log_ratio: float
    log_ratio_upper: float | None
    kl: float
    kl_upper: float | None

    @classmethod
    def of(cls, records: Sequence[RecordScore], confidence: float = CONFIDENCE) -> Spent | None:
        """From records that were scored by both, with KL, bounds at `confidence`, one-sided; None for no records."""
        if not records:
            return None
        counts = [record.tokens for record in records]
        ratios = [record.nll_nats - (record.reference_nll_nats or 0.0) for record in records]
        kls = [record.kl_nats or 0.0 for record in records]
        return cls(len(records), sum(counts), cluster_mean(ratios, counts).value, upper_bound(ratios, counts, confidence),
                   cluster_mean(kls, counts).value, upper_bound(kls, counts, confidence, positive=True))  # fmt: skip

    def of_budget(self, budget: Budget) -> tuple[float, float]:
        """(value, upper bound) of what `budget` limits; raises UsageError where the data is too little for a bound."""
        value, upper = (self.log_ratio, self.log_ratio_upper) if budget.kind == "ppl" else (self.kl, self.kl_upper)
        if upper is None:
            raise UsageError("one record gives no upper bound to compare with a budget", "give at least two: --eval-records")
        return value, upper


def judged_and_held_out(result: PplResult) -> tuple[list[RecordScore], list[RecordScore]]:
    """The records that a search decides by, and every fourth, which it doesn't look at. With fewer than eight none is held out."""
    records = list(result.per_record)
    if any(record.reference_nll_nats is None or record.kl_nats is None for record in records):
        raise UsageError("a budget needs the source's log-probabilities and KL on the same records", "measure with the source as --reference")
    if len(records) < FEWEST_TO_HOLD_OUT:
        return records, []
    held_out = records[HELD_OUT_ONE_IN - 1 :: HELD_OUT_ONE_IN]
    return [record for place, record in enumerate(records) if place % HELD_OUT_ONE_IN != HELD_OUT_ONE_IN - 1], held_out


@dataclass(frozen=True)
class Trial:
    """A mix that was built and measured: its predicted harm in nats a token, what it costs, and what it spends of a budget.

    `look` is its number among the mixes measured on the same records, from 1. The bounds of `judged` account for the number of looks
    (`looks`); those of `held_out` are plain 95% bounds.
    """

    mix: dict[str, str]
    predicted: float
    cost: float
    bytes_per_token: int
    bits_per_decoder_weight: float
    reference_ppl: float
    judged: Spent
    held_out: Spent | None
    look: int = 1

    @classmethod
    def of(
        cls, mix: dict[str, str], predicted: float, cost: float, size: tuple[int, float], result: PplResult, look: int
    ) -> Trial:  # fmt: skip
        """From what was measured; `size` is (bytes a token, bits a decoder weight)."""
        judged, held_out = judged_and_held_out(result)
        spent = Spent.of(judged, confidence_of(look))
        assert spent is not None
        assert result.reference_ppl is not None
        return cls(mix, predicted, cost, *size, result.reference_ppl.value, spent, Spent.of(held_out), look)

    @property
    def digest(self) -> str:
        return mix_digest(self.mix)

    @property
    def described(self) -> str:
        """How many decisions take each scheme, and the head's."""
        return describe_mix(self.mix)

    def upper(self, budget: Budget) -> float:
        """The bound that counts."""
        return self.judged.of_budget(budget)[1]

    def meets(self, budget: Budget) -> bool:
        """Whether the bound is within `budget`."""
        return self.upper(budget) <= budget.nats


def describe_mix(mix: dict[str, str]) -> str:
    """How many decisions take each scheme, and the head's: "int4-g128 × 40, int8 × 8; head int8"."""
    units = [label for name, label in mix.items() if name != HEAD]
    counts = {label: units.count(label) for label in [*SCHEMES, *HEAD_SCHEMES, KEEP]}
    text = ", ".join(f"{label} × {count}" for label, count in counts.items() if count)
    return text if HEAD not in mix else f"{text}; head {'as in the source' if mix[HEAD] == KEEP else mix[HEAD]}"


def mix_digest(mix: dict[str, str]) -> str:
    """A short name of `mix` (decision -> candidate): 12 hexadecimal digits."""
    return hashlib.sha256(canonical(mix)).hexdigest()[:12]

"""The 95% bound of the mix that a search chooses: how often it is exceeded, simulated through the search's own decisions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gemq.errors import OverBudgetError
from gemq.eval.ppl import PplResult, RecordScore
from gemq.eval.statistics import Estimate, cluster_mean, upper_bound
from gemq.quantize.allocation import Choice
from gemq.quantize.budget import Budget, Spent, Trial
from gemq.quantize.explore import Space, explore, winner
from gemq.quantize.looks import ERROR, SPENT, confidence_of, error_of

UNITS, RECORDS, TOKENS = 12, 16, 200
CORRELATION = 0.5  # between the errors of two mixes on a record
BUDGET = {"kl": Budget("kl", 0.05), "ppl": Budget("ppl", 0.05)}


def test_what_all_looks_may_spend_together_is_five_percent() -> None:
    assert sum(error_of(look) for look in range(1, 200)) == pytest.approx(SPENT, rel=1e-12)
    assert SPENT < ERROR == 0.05
    assert all(error_of(look) >= error_of(look + 1) > 0 for look in range(1, 60))
    assert confidence_of(1) == pytest.approx(1 - 0.04 / 6)
    with pytest.raises(ValueError, match="from 1"):
        confidence_of(0)


class World:
    """A model of which every mix has a true harm and, on some records, a measured one. The errors of two mixes are correlated.

    all_over: every mix is truly just over the budget, so that whatever a search publishes is wrong: the worst case for a bound that is
    looked at several times.
    """

    def __init__(self, seed: int, kind: str, *, all_over: bool) -> None:
        self.draw, self.kind, self.all_over = np.random.default_rng(seed), kind, all_over
        worst = self.draw.uniform(0.5, 2.0, UNITS) * 0.1 / UNITS
        self.choices = {
            f"unit{number}": [Choice("int4-g128", 4.2, worst[number]), Choice("int4-g32", 4.5, 0.7 * worst[number]),
                              Choice("int8", 8.0, 0.01 * worst[number]), Choice("keep", 16.0, 0.0)]
            for number in range(UNITS)
        }  # fmt: skip
        self.scale = self.draw.lognormal(0.3, 0.2)  # of what is measured over what is predicted
        self.ease = self.draw.normal(0, 1, RECORDS)  # of a record, the same for every mix
        self.trials: list[Trial] = []

    def truth(self, predicted: float) -> float:
        """The true harm in nats a token of a mix with this predicted one."""
        return 1.001 * BUDGET[self.kind].nats if self.all_over else predicted * self.scale

    def build(self, mix: dict[str, str], predicted: float, cost: float) -> Trial:
        """What 16 records, of which the search uses 12, say of a mix."""
        truth = self.truth(predicted)
        error = math.sqrt(CORRELATION) * self.ease + math.sqrt(1 - CORRELATION) * self.draw.normal(0, 1, RECORDS)
        if self.kind == "kl":
            values = truth * np.exp(0.3 * error - 0.045)  # log-normal between records, with mean `truth`
        else:
            values = truth + 0.3 * BUDGET[self.kind].nats * error
        scores = tuple(RecordScore(str(place), TOKENS, 100 + TOKENS * value, 100.0, TOKENS * abs(value)) for place, value in enumerate(values))
        none = Estimate(1.0, None, None)
        result = PplResult("t", "d", "0", "float32", TOKENS * RECORDS, RECORDS, none, "r", none, none, none, scores)
        trial = Trial.of(mix, predicted, cost, (1, 1.0), result, len(self.trials) + 1)
        self.trials.append(trial)
        return trial


def searches(kind: str, builds: int, known: int, count: int, *, all_over: bool) -> tuple[float, float, float]:
    """Of `count` searches that begin with `known` trials near the budget: (the share that published, the share that published a mix
    that is truly over the budget, the mean share of the budget that the published mixes use)."""
    over, used, budget = 0, [], BUDGET[kind]
    for seed in range(count):
        world = World(1000 * builds + 100 * known + seed, kind, all_over=all_over)
        space = Space(world.choices)
        for number in range(known):  # of an earlier search
            mix = space.mix(budget.nats / world.scale * (0.75 + 0.1 * number))
            assert mix is not None
            world.build({name: choice.label for name, choice in mix.items()}, sum(c.harm for c in mix.values()), sum(c.cost for c in mix.values()))
        before = list(world.trials)
        tried = explore(space, budget, before, builds, 0.6 * budget.nats, world.build)
        try:
            best = winner([*tried, *(trial for trial in before if trial not in tried)], budget)
        except OverBudgetError:
            continue
        over += world.truth(best.predicted) > budget.nats
        used.append(world.truth(best.predicted) / budget.nats)
    return len(used) / count, over / count, float(np.mean(used)) if used else 0.0


CASES = [(3, 0), (3, 2), (4, 0), (4, 2), (6, 0), (3, 3)]
"""(new builds, known trials): 3 to 6 checkpoints near the budget."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kl", "ppl"])
@pytest.mark.parametrize(("builds", "known"), CASES)
def test_at_most_one_search_in_twenty_publishes_a_mix_over_its_budget_even_where_every_mix_is_over(kind: str, builds: int, known: int) -> None:
    _, over, _ = searches(kind, builds, known, 600, all_over=True)
    assert over <= 0.05


@pytest.mark.parametrize("kind", ["kl", "ppl"])
def test_where_some_mixes_are_within_the_budget_a_search_finds_one_and_is_hardly_ever_wrong(kind: str) -> None:
    published, over, _ = searches(kind, 3, 2, 400, all_over=False)
    assert published > 0.95
    assert over <= 0.05


@pytest.mark.slow
def test_single_bounds_are_exceeded_by_far_more_searches_and_the_correction_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, corrected = searches("ppl", 3, 0, 300, all_over=False)
    monkeypatch.setattr("gemq.quantize.budget.confidence_of", lambda look: 0.95)
    for builds, known in CASES:
        assert searches("ppl", builds, known, 600, all_over=True)[1] > 0.06, (builds, known)
    _, _, single = searches("ppl", 3, 0, 300, all_over=False)
    assert single - corrected < 0.12  # of the budget


def test_a_bound_is_as_wide_as_its_look_asks_for() -> None:
    counts, sums = [10] * 12, [float(value) for value in range(12)]
    scores = [RecordScore(str(place), count, total, 0.0, total) for place, (count, total) in enumerate(zip(counts, sums, strict=True))]
    for look in (1, 4, 7):
        spent = Spent.of(scores, confidence_of(look))
        assert spent is not None
        assert spent.log_ratio_upper == upper_bound(sums, counts, confidence_of(look))
        assert spent.kl_upper == upper_bound(sums, counts, confidence_of(look), positive=True)
    assert upper_bound(sums, counts, 0.95) == cluster_mean(sums, counts).upper_95
    assert upper_bound([1.0], [4], 0.99) is None
    widths = [upper_bound(sums, counts, confidence_of(look)) or 0.0 for look in (1, 3, 4, 7)]
    assert widths[0] == widths[1] < widths[2] < widths[3]


def test_two_records_have_a_finite_bound_at_every_look() -> None:
    scores = [RecordScore("a", 10, 1.0, 0.9, 0.001), RecordScore("b", 10, 5.0, 0.9, 4.0)]
    for look in (1, 5, 30):
        spent = Spent.of(scores, confidence_of(look))
        assert spent is not None
        assert all(math.isfinite(bound or math.nan) for bound in (spent.log_ratio_upper, spent.kl_upper))
        assert all(Budget(kind, 0.05).show(value) for kind in ("kl", "ppl") for value in (spent.log_ratio_upper, spent.kl_upper))

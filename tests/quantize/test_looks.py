"""The 95% bound of the mix that a search chooses: how often it is exceeded, simulated through the search's own decisions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gemq.errors import OverBudgetError
from gemq.eval.ppl import PplResult, RecordScore
from gemq.eval.statistics import Estimate, cluster_mean
from gemq.quantize.allocation import Choice
from gemq.quantize.budget import Budget, Trial
from gemq.quantize.explore import Space, explore, winner
from gemq.quantize.looks import ERROR, confidence_of, error_of

UNITS, RECORDS, TOKENS = 30, 16, 200
BUDGET = {"kl": Budget("kl", 0.05), "ppl": Budget("ppl", 0.05)}


def test_what_all_looks_may_spend_together_is_five_percent() -> None:
    assert sum(error_of(look) for look in range(1, 200)) == pytest.approx(ERROR, rel=1e-12)
    assert all(error_of(look) >= error_of(look + 1) > 0 for look in range(1, 60))
    assert confidence_of(1) == pytest.approx(1 - 0.05 * 2 / 9)
    with pytest.raises(ValueError, match="from 1"):
        confidence_of(0)


class World:
    """A model of which every mix has a true harm and, on some records, a measured one. The errors of two mixes are correlated, not equal."""

    def __init__(self, seed: int) -> None:
        self.draw = np.random.default_rng(seed)
        worst = self.draw.uniform(0.5, 2.0, UNITS) * 0.1 / UNITS
        self.choices = {
            f"unit{number}": [Choice("int4-g128", 4.2, worst[number]), Choice("int4-g32", 4.5, 0.7 * worst[number]),
                              Choice("int8", 8.0, 0.01 * worst[number]), Choice("keep", 16.0, 0.0)]
            for number in range(UNITS)
        }  # fmt: skip
        self.scale = self.draw.lognormal(0.3, 0.2)  # of what is measured over what is predicted
        self.ease = self.draw.normal(0, 1, RECORDS)  # of a record, the same for every mix
        self.trials: list[Trial] = []

    def truth(self, mix: dict[str, str]) -> float:
        """The true harm, nats a token: what is predicted, off by what the units do to each other."""
        predicted = sum(choice.harm for name, options in self.choices.items() for choice in options if choice.label == mix[name])
        return predicted * self.scale * float(np.exp(np.random.default_rng(abs(hash_of(mix))).normal(0, 0.04)))

    def build(self, mix: dict[str, str], predicted: float, cost: float, kind: str) -> Trial:
        truth, own = self.truth(mix), self.draw.normal(0, 1, RECORDS)
        error = 0.8 * self.ease + 0.6 * own  # two mixes correlate by 0.64
        if kind == "kl":
            values = truth * np.exp(0.5 * error - 0.125)  # log-normal between records, mean `truth`
        else:
            values = truth + 0.6 * truth * error
        scores = tuple(RecordScore(str(place), TOKENS, 100 + TOKENS * value, 100.0, TOKENS * abs(value)) for place, value in enumerate(values))
        none = Estimate(1.0, None, None)
        result = PplResult("t", "d", "0", "float32", TOKENS * RECORDS, RECORDS, none, "r", none, none, none, scores)
        trial = Trial.of(mix, predicted, cost, (1, 1.0), result, len(self.trials) + 1)
        self.trials.append(trial)
        return trial


def hash_of(mix: dict[str, str]) -> int:
    return int.from_bytes("".join(label[-1] for label in mix.values()).encode(), "little") % (2**63)


def searches(kind: str, builds: int, known: int, count: int) -> tuple[int, int, float]:
    """(searches that published, of these over the budget in truth, mean share of the budget that is truly used); a search from `known` earlier trials."""
    published = over = 0
    used = []
    for seed in range(count):
        world, budget = World(1000 * builds + seed), BUDGET[kind]

        def build(mix: dict[str, str], predicted: float, cost: float, world: World = world) -> Trial:
            return world.build(mix, predicted, cost, kind)

        for number in range(known):  # mixes of an earlier search for a budget nearby
            reach = budget.nats / world.scale * (0.75 + 0.1 * number)
            mix = Space(world.choices).mix(reach)
            assert mix is not None
            build({name: choice.label for name, choice in mix.items()}, sum(c.harm for c in mix.values()), sum(c.cost for c in mix.values()))
        before = list(world.trials)
        tried = explore(Space(world.choices), budget, before, builds, 0.6 * budget.nats, build)
        try:
            best = winner([*tried, *(trial for trial in before if trial not in tried)], budget)
        except OverBudgetError:
            continue
        published += 1
        over += world.truth(best.mix) > budget.nats
        used.append(world.truth(best.mix) / budget.nats)
    return published, over, float(np.mean(used))


@pytest.mark.parametrize("kind", ["kl", "ppl"])
@pytest.mark.parametrize(("builds", "known"), [(3, 0), (3, 2), (4, 2), (6, 0), (3, 3)])
def test_at_most_one_search_in_twenty_publishes_a_mix_that_is_over_its_budget(kind: str, builds: int, known: int) -> None:
    published, over, _ = searches(kind, builds, known, 400)
    assert published > 200
    assert over / published <= 0.05


def test_without_the_correction_more_are_over_and_the_correction_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    with_it = searches("ppl", 4, 2, 400)
    monkeypatch.setattr("gemq.quantize.budget.confidence_of", lambda look: 0.95)
    without = searches("ppl", 4, 2, 400)
    assert without[1] / without[0] > 0.05 > with_it[1] / with_it[0]
    # of the budget; the bits follow its logarithm
    assert without[2] - with_it[2] < 0.15


def test_a_look_s_bound_is_wider_than_a_single_one_s_and_keeps_its_width() -> None:
    world = World(7)
    mix = {name: "int8" for name in world.choices}
    first = world.build(mix, 0.01, 1.0, "ppl")
    scores = [(first.judged.log_ratio, first.judged.log_ratio_upper)]
    assert scores[0][1] is not None
    plain = cluster_mean([TOKENS * 0.01, TOKENS * 0.02, TOKENS * 0.03], [TOKENS] * 3)
    assert plain.upper_95 is not None
    assert math.isfinite(scores[0][1])

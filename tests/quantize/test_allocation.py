"""The knapsack against all combinations."""

from __future__ import annotations

import itertools
import random

import pytest

from gemq.quantize.allocation import Choice, allocate


def problem(seed: int, units: int = 5) -> dict[str, list[Choice]]:
    draw = random.Random(seed)
    return {
        f"unit {number}": [
            Choice(label, size * bits, size * draw.uniform(0.5, 2) * 4.0 ** (4 - bits))
            for label, bits in (("int4", 4.125), ("int4 g32", 4.5), ("int8", 8.0), ("as it is", 16.0))
        ]
        for number, size in enumerate(draw.choice([1, 2, 4, 8]) for _ in range(units))
    }


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("share", [0.05, 0.2, 0.6, 1.0])
def test_within_the_limit_and_close_to_the_best_of_all_combinations(seed, share):
    choices = problem(seed)
    limit = share * sum(max(option.harm for option in options) for options in choices.values())
    found = allocate(choices, limit)
    feasible = [combination for combination in itertools.product(*choices.values()) if sum(option.harm for option in combination) <= limit]
    assert found is not None
    assert sum(option.harm for option in found.values()) <= limit
    best = min(sum(option.cost for option in combination) for combination in feasible)
    largest_step = max(max(option.cost for option in options) for options in choices.values())
    assert best <= sum(option.cost for option in found.values()) + 1e-9
    assert sum(option.cost for option in found.values()) <= best + largest_step


def test_on_the_hull_the_answer_is_the_best():
    """At a limit that a multiplier meets exactly, no combination of that harm is cheaper (Everett's theorem)."""
    for seed in range(20):
        choices = problem(seed)
        for multiplier in (1.0, 10.0, 100.0):
            chosen = {unit: min(options, key=lambda option: option.cost + multiplier * option.harm) for unit, options in choices.items()}
            limit = sum(option.harm for option in chosen.values())
            found = allocate(choices, limit * (1 + 1e-12))
            assert sum(option.cost for option in found.values()) == pytest.approx(sum(option.cost for option in chosen.values()))


def test_a_tighter_limit_never_costs_less():
    choices = problem(3, units=8)
    most = sum(max(option.harm for option in options) for options in choices.values())
    costs = [sum(option.cost for option in allocate(choices, most * share / 50).values()) for share in range(2, 51)]
    assert all(tight >= loose - max(o.cost for os in choices.values() for o in os) * 0.25 for tight, loose in itertools.pairwise(costs))
    assert costs[0] > costs[-1]


def test_no_combination_is_good_enough():
    assert allocate({"a": [Choice("int4", 4, 1.0), Choice("int8", 8, 0.5)]}, 0.4) is None


def test_what_costs_more_and_harms_more_is_never_taken():
    found = allocate({"a": [Choice("good", 4, 0.1), Choice("worse", 5, 0.2), Choice("as it is", 16, 0.0)]}, 0.15)
    assert found["a"].label == "good"

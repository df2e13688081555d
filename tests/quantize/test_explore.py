"""A search on what earlier searches measured: known trials shorten it and never keep it from a mix that costs less."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from gemq.quantize.allocation import Choice
from gemq.quantize.budget import Budget, Spent, Trial
from gemq.quantize.explore import Space, explore, winner

UNITS = 60
BUDGET = Budget("kl", 0.05)
BOUND_OVER_PREDICTED = 1.5
FIRST_REACH = 0.6 * BUDGET.nats
HARMS = {"int4-g128": 0.0012, "int4-g32": 0.0008, "int8": 0.00004, "keep": 0.0}
COSTS = {"int4-g128": 4.2, "int4-g32": 4.5, "int8": 8.0, "keep": 16.0}


def space(labels: Sequence[str] = tuple(HARMS), *, heavy: Sequence[int] = ()) -> Space:
    """Units that take `labels`; those of `heavy` cost a hundred times as much, as a tied head does where bytes a token are counted."""
    return Space({
        f"unit{place}": [Choice(label, COSTS[label] * (100 if place in heavy else 1), HARMS[label] * (1 + place / UNITS)) for label in labels]
        for place in range(UNITS)
    })  # fmt: skip


def of(mix: dict[str, str], where: Space, bound_over_predicted: float = BOUND_OVER_PREDICTED) -> Trial:
    """What `where` says of `mix`, measured with a bound that is this multiple of what is predicted."""
    taken = [next(choice for choice in where.choices[name] if choice.label == label) for name, label in mix.items()]
    harm, cost = (math.fsum(getattr(choice, what) for choice in taken) for what in ("harm", "cost"))
    upper = harm * bound_over_predicted
    return Trial(mix, harm, cost, int(cost), 4.0, 20.0, Spent(12, 1200, 0.8 * upper, upper, 0.8 * upper, upper), None)


def searched(
    where: Space, known: Sequence[Trial] = (), builds: int = 3, bounds: Sequence[float] = (BOUND_OVER_PREDICTED,) * 3
) -> tuple[Trial, list[dict[str, str]]]:  # fmt: skip
    """The winner, and the mixes that were built; `bounds`: of each build over what is predicted."""
    built: list[dict[str, str]] = []

    def build(mix: dict[str, str], predicted: float, cost: float) -> Trial:
        built.append(mix)
        return of(mix, where, bounds[len(built) - 1])

    tried = explore(where, BUDGET, known, builds, FIRST_REACH, build)
    return winner([*tried, *(trial for trial in known if trial not in tried)], BUDGET), built


def under(reach: float, where: Space) -> dict[str, str]:
    """The mix that `where` gives for this harm."""
    mix = where.mix(reach)
    assert mix is not None
    return {name: choice.label for name, choice in mix.items()}


def of_another_objective(where: Space, reach: float = 0.95 * BUDGET.nats / BOUND_OVER_PREDICTED) -> dict[str, str]:
    """A mix of this harm that makes the cost small without the heavy units of `where`, and leaves those as they are."""
    light = {name: options for name, options in where.choices.items() if options[0].cost < 100}
    heavy = {name: "keep" for name in where.choices if name not in light}
    return under(reach, Space(light)) | heavy


@pytest.mark.parametrize("builds", [2, 3])
def test_a_known_trial_of_another_objective_does_not_settle_a_search(builds: int) -> None:
    where = space(heavy=(50, 51, 52))
    known = of(of_another_objective(where), where)
    assert 0.9 * BUDGET.nats <= known.upper(BUDGET) <= BUDGET.nats
    fresh, _ = searched(where, builds=builds)
    used, built = searched(where, [known], builds)
    assert known.cost > 1.5 * fresh.cost
    assert used.cost <= 1.02 * fresh.cost
    assert known.mix not in built


def test_a_known_trial_of_fewer_candidates_does_not_settle_a_search() -> None:
    narrow, where = space(("int4-g128", "keep")), space()
    known = of(under(0.95 * BUDGET.nats / BOUND_OVER_PREDICTED, narrow), where)
    assert 0.9 * BUDGET.nats <= known.upper(BUDGET) <= BUDGET.nats
    fresh, _ = searched(where)
    used, built = searched(where, [known])
    assert known.cost > 1.05 * fresh.cost
    assert used.cost <= 1.02 * fresh.cost
    assert known.mix not in built


def test_a_costly_known_trial_does_not_make_the_last_build_bolder() -> None:
    """Where nothing of this search met the budget yet, its last build keeps a distance from it, whatever an expensive known mix meets."""
    where = space(heavy=(50, 51, 52))
    # over its prediction by as much as makes the search begin where a fresh one does
    known = of(of_another_objective(where, 0.5 * BUDGET.nats), where, 0.97 * BUDGET.nats / FIRST_REACH)
    assert known.meets(BUDGET)
    fresh, built = searched(where, builds=2, bounds=(2.0, 2.2))
    assert not of(built[0], where, 2.0).meets(BUDGET)
    used, _ = searched(where, [known], 2, (2.0, 2.2))
    assert known.cost > 1.5 * fresh.cost
    assert used.cost <= 1.02 * fresh.cost


def test_a_known_trial_that_this_search_would_have_tried_settles_it_without_a_build() -> None:
    where = space(heavy=(50, 51, 52))
    first, built = searched(where, bounds=(1.6,))
    assert built
    assert 0.9 * BUDGET.nats <= first.upper(BUDGET)
    again, built = searched(where, [first])
    assert again == first
    assert not built

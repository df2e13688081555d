"""Which scheme each unit takes, so that the predicted harm stays within a limit and the cost is least: a knapsack over a multiplier.

For a multiplier m each unit takes the choice that minimizes cost + m * harm; as m grows, units move along the lower convex hull of their
choices, one step at a time, the step with the largest fall of harm for its cost first (Everett 1963; Shoham & Gersho 1988 for bits). So the
whole sweep is one sorted list of steps. What the hulls leave of the limit is then spent on single choices off them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """A scheme for a unit by its label: what it costs (the objective's unit, such as bytes a token) and the harm predicted, in nats a token."""

    label: str
    cost: float
    harm: float


def allocate(choices: Mapping[str, Sequence[Choice]], limit: float) -> dict[str, Choice] | None:
    """Unit -> choice with total harm at most `limit` and the least cost the method finds; None if even the most careful choices exceed it."""
    hulls = {unit: _hull(options) for unit, options in choices.items()}
    taken = {unit: 0 for unit in hulls}
    harm = sum(hull[0].harm for hull in hulls.values())
    steps = sorted(
        (
            ((hull[index].harm - hull[index + 1].harm) / (hull[index + 1].cost - hull[index].cost), unit, index)
            for unit, hull in hulls.items()
            for index in range(len(hull) - 1)
        ),
        key=lambda step: (-step[0], step[1], step[2]),
    )
    for _, unit, index in steps:
        if harm <= limit:
            break
        harm += hulls[unit][index + 1].harm - hulls[unit][index].harm
        taken[unit] = index + 1
    if harm > limit:
        return None
    found = {unit: hulls[unit][index] for unit, index in taken.items()}
    return _spend(choices, found, limit)


def _hull(options: Sequence[Choice]) -> list[Choice]:
    """The lower convex hull, cheapest first: each next choice costs more and harms less, at falling rates."""
    kept: list[Choice] = []
    for choice in sorted(options, key=lambda option: (option.cost, option.harm)):
        if kept and choice.harm >= kept[-1].harm:
            continue
        while len(kept) > 1 and (kept[-1].harm - choice.harm) * (kept[-1].cost - kept[-2].cost) >= (kept[-2].harm - kept[-1].harm) * (
            choice.cost - kept[-1].cost
        ):
            kept.pop()
        kept.append(choice)
    return kept


def _spend(choices: Mapping[str, Sequence[Choice]], found: dict[str, Choice], limit: float) -> dict[str, Choice]:
    """Move single units to cheaper choices while the limit allows, the largest saving first."""
    while True:
        slack = limit - sum(choice.harm for choice in found.values())
        best = max(
            (
                (found[unit].cost - option.cost, unit, option)
                for unit, options in choices.items()
                for option in options
                if option.cost < found[unit].cost and option.harm - found[unit].harm <= slack
            ),
            key=lambda move: (move[0], move[1]),
            default=None,
        )
        if best is None:
            return found
        found = {**found, best[1]: best[2]}

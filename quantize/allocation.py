"""Which scheme each unit takes, so that the predicted harm stays within a limit and the cost is least: a knapsack over a multiplier.

For a multiplier m each unit takes the choice that minimizes cost + m * harm; as m grows, units move along the lower convex hull of their
choices, one step at a time, the step with the largest fall of harm for its cost first (Everett 1963; Shoham & Gersho 1988 for bits). So the
whole sweep is one sorted list of steps. What the hulls leave of the limit is then spent on single choices off them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Choice:
    """A scheme for a unit by its label: what it costs (the objective's unit, such as bytes a token) and the harm predicted, in nats a token."""

    label: str
    cost: float
    harm: float


@dataclass(frozen=True)
class Step:
    """A unit's move to the next choice on its hull."""

    name: str
    before: Choice
    after: Choice

    @property
    def rate(self) -> float:
        """The fall of harm for its cost."""
        return (self.before.harm - self.after.harm) / (self.after.cost - self.before.cost)


def hull_steps(choices: Mapping[str, Sequence[Choice]]) -> tuple[dict[str, Choice], list[Step]]:
    """Unit -> cheapest choice, and every step from there to the least harm, the step that buys most for its cost first."""
    hulls = {unit: _hull(options) for unit, options in choices.items()}
    steps = [Step(unit, before, after) for unit, hull in hulls.items() for before, after in pairwise(hull)]
    # rates fall along a hull, so a unit's own steps stay in their order; equal ones keep it too, for the sort is stable within a unit
    return {unit: hull[0] for unit, hull in hulls.items()}, sorted(steps, key=lambda step: (-step.rate, step.name))


def allocate(choices: Mapping[str, Sequence[Choice]], limit: float) -> dict[str, Choice] | None:
    """Unit -> choice with total harm at most `limit` and the least cost the method finds; None if even the most careful choices exceed it."""
    found, steps = hull_steps(choices)
    harm = sum(choice.harm for choice in found.values())
    for step in steps:
        if harm <= limit:
            break
        harm += step.after.harm - step.before.harm
        found[step.name] = step.after
    if harm > limit:
        return None
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

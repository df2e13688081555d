"""Which mixes a search builds: allocate by predicted harms, measure, move the limit by what came out, until the budget binds from below.

Nothing here reads or writes a file: `build` makes and measures a mix. Given the same known trials and measurements the same mixes are tried in the
same order, so that an interrupted search goes on where it was by going through its measured mixes again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gemq import output
from gemq.errors import OverBudgetError
from gemq.quantize.allocation import Choice, allocate
from gemq.quantize.budget import Budget, Trial, mix_digest
from gemq.quantize.decisions import KEEP

Build = Callable[[dict[str, str], float, float], Trial | None]
"""(mix, predicted harm in nats a token, cost) -> what was measured; None where no further build is allowed."""

_BINDS = 0.9  # a bound this near the budget, from below, is near enough
FIRST_AIM = 0.93  # where in the budget the first build's bound is aimed at, on a guess of what bounds are over predictions
_AIM = 0.97  # and the next one's, on what came out: that share falls with the harm, so a mix of less harm lands a little lower
_LAST_AIM = 0.8  # and that of the last one, as long as none has met it
_WORTH_A_BUILD = 0.01  # of the cost: where something meets the budget, less to win is no reason for another build
_ROUNDING = 1e-9  # of a predicted harm: `allocate` adds in another order
# What bounds on ground truth have been over predictions, where no build has said it yet. Predictions are of windows like the calibration's, and on
# what the model writes itself the same harm shows as more nats: 0.63 there, on text 1.53 to 1.60 with w4a16-best and 2.0 with w4a16. Those were
# bounds of single measurements; the ones that account for several looks are about 3% higher on 30 records.
BOUND_OVER_PREDICTED_ON_ITS_OWN = 0.67
BOUND_OVER_PREDICTED_ON_TEXT = 1.65


@dataclass(frozen=True)
class Space:
    """What a search may choose: `choices` of each decision; `always_something`: whether a mix of kept weights alone still quantizes something."""

    choices: Mapping[str, Sequence[Choice]]
    always_something: bool = False

    def mix(self, reach: float) -> dict[str, Choice] | None:
        """The cheapest mix of at most `reach` nats a token predicted; where that quantizes nothing, the one of least harm that does."""
        found = allocate(self.choices, reach)
        if found is None or self.always_something or any(choice.label != KEEP for choice in found.values()):
            return found
        single = [(choice.harm, choice.cost, name, choice) for name, options in self.choices.items() for choice in options if choice.label != KEEP]
        if not single:
            return None
        _, _, name, choice = min(single, key=lambda one: one[:3])
        return {**found, name: choice}


def explore(space: Space, budget: Budget, known: Sequence[Trial], builds: int, first_reach: float, build: Build) -> list[Trial]:
    """The trials that a search goes through, in order: mixes of `known`, and at most `builds` further ones that `build` measures.

    `first_reach`: the predicted harm to allow at first, in nats a token, where no trial is known.
    """
    by_digest = {trial.digest: trial for trial in known}
    reach, tried, built = _first_reach(known, budget, first_reach), list[Trial](), 0
    while not _settled(space, known, tried, budget):
        mix = space.mix(reach)
        if mix is None:
            output.note(f"no mix is predicted to stay within {reach:.4g} nats a token")
            break
        labels = {name: choice.label for name, choice in mix.items()}
        if any(mix_digest(labels) == trial.digest for trial in tried):
            break
        trial = by_digest.get(mix_digest(labels))
        if trial is None:
            cost, predicted = _cost(mix), math.fsum(choice.harm for choice in mix.values())
            if built == builds or not _worth_a_build(cost, [*known, *tried], budget):
                break
            output.note(f"build {built + 1} of at most {builds}: a KL of {predicted:.4g} nats is predicted")
            trial = build(labels, predicted, cost)
            if trial is None:
                break
            built += 1
        tried.append(trial)
        value, upper = trial.judged.of_budget(budget)
        output.note(f"measured {budget.show(value)}, bound {budget.show(upper)}, budget {budget.show(budget.nats)}: "
                    f"{'met' if trial.meets(budget) else 'not met'} at {trial.bits_per_decoder_weight:.2f} bits")  # fmt: skip
        # what was predicted against what came out decides how far the next prediction may go
        if upper <= 0:
            reach = 2 * max(reach, trial.predicted)
            continue
        careful = _reach(trial, budget, _LAST_AIM)
        last_hope = built + 1 == builds and not any(one.meets(budget) for one in tried) and _is_cheaper(space.mix(careful), known, budget)
        reach = careful if last_hope else _reach(trial, budget, _AIM)
    return tried


def winner(trials: Sequence[Trial], budget: Budget) -> Trial:
    """The cheapest trial whose bound meets the budget; raises OverBudgetError, with the nearest, if there is none."""
    good = [trial for trial in trials if trial.meets(budget)]
    if good:
        return min(good, key=lambda trial: (trial.cost, trial.upper(budget)))
    nearest = min(trials, key=lambda trial: trial.upper(budget), default=None)
    came = "nothing could be built" if nearest is None else (
        f"the nearest of {len(trials)} builds has the bound {budget.show(nearest.upper(budget))} "
        f"at {nearest.bits_per_decoder_weight:.2f} bits a weight"
    )  # fmt: skip
    raise OverBudgetError(f"no mix meets the budget of {budget.show(budget.nats)}: {came}",
                          "measure on more records (--eval-records) for a tighter bound, or allow a larger budget")  # fmt: skip


def _cost(mix: Mapping[str, Choice]) -> float:
    return math.fsum(choice.cost for choice in mix.values())


def _least_cost(trials: Sequence[Trial], budget: Budget) -> float | None:
    return min((one.cost for one in trials if one.meets(budget)), default=None)


def _is_cheaper(mix: Mapping[str, Choice] | None, known: Sequence[Trial], budget: Budget) -> bool:
    """Whether `mix` costs less than every known trial that meets the budget, by enough for a build."""
    best = _least_cost(known, budget)
    return best is None or (mix is not None and _cost(mix) <= (1 - _WORTH_A_BUILD) * best)


def _worth_a_build(cost: float, trials: Sequence[Trial], budget: Budget) -> bool:
    best = _least_cost(trials, budget)
    if best is None or cost <= (1 - _WORTH_A_BUILD) * best:
        return True
    if cost < best:
        output.note(f"another build is predicted to cost {100 * (1 - cost / best):.1f}% less than the one that meets the budget: not worth one")
    else:
        output.note("another build is predicted to cost no less than the one that meets the budget: not worth one")
    return False


def _first_reach(known: Sequence[Trial], budget: Budget, unknown: float) -> float:
    """The harm to allow at first: the budget's, by what the build nearest to it had over its prediction."""
    seen = [trial for trial in known if trial.predicted > 0 and trial.upper(budget) > 0]
    nearest = min(seen, key=lambda trial: abs(trial.upper(budget) - budget.nats), default=None)
    return unknown if nearest is None else _reach(nearest, budget, _AIM)


def _reach(trial: Trial, budget: Budget, aim: float) -> float:
    """The harm to allow so that a bound lands at the share `aim` of the budget, if it is as far over its prediction as `trial`'s was."""
    return trial.predicted * aim * budget.nats / trial.upper(budget)


def _settled(space: Space, known: Sequence[Trial], tried: Sequence[Trial], budget: Budget) -> bool:
    """Whether a trial meets the budget, leaves little of it, and is one that this search would try.

    A known trial can be of another objective or of fewer candidates: it counts only if it costs about what `space` gives for the same harm.
    """
    if any(_binds(trial, budget) for trial in tried):
        return True
    for trial in known:
        if _binds(trial, budget):
            mix = space.mix(trial.predicted * (1 + _ROUNDING))
            if mix is not None and (1 - _WORTH_A_BUILD) * trial.cost <= _cost(mix):
                return True
    return False


def _binds(trial: Trial, budget: Budget) -> bool:
    return _BINDS * budget.nats <= trial.upper(budget) <= budget.nats

r"""How sure a bound must be when several checkpoints are measured on the same records and one of them is chosen.

A 95% bound is too low with a probability of 5%. Of several checkpoints that are near a budget, the one whose bound is too low is the one that
looks best, so choosing among K bounds errs with a probability of up to K * 5%. Bonferroni's inequality repairs this: if the bound of look k
is too low with probability a_k at most, then, whatever is chosen and however the looks depend on each other,

    P(the chosen one's bound is too low) <= P(any bound is too low) <= \sum_k a_k.

The number of looks is not known in advance: a search stops when its budget is met, and later searches look at the same records again. So
the error is spent (Lan & DeMets, Biometrika 70, 1983, for interim looks at one trial): the a_k are fixed in advance for every k, and their
infinite sum is 4%. Half of what is left is spent in equal parts on every three looks: a_k = 4% * (1/2)^(b + 1) / 3 with
b = (k - 1) // 3, that is 0.67% for looks 1 to 3 (confidence 99.33%), 0.33% for looks 4 to 6, 0.17% for looks 7 to 9. The last of the 5% is
kept back, because a bound from few records of a skewed quantity is itself exceeded a little too often: with all 5% spent, 5.3% of simulated
searches were wrong in the worst case. A look keeps
its number for ever, so a bound does not change when more is tried. Looks are counted for one source and one file of records in
one search directory, whatever the recipe, the calibration or the seed (`trials.Trials.look`).

What this does not cover: the mix of a later look is chosen by what earlier ones measured on the same records. Its bound has the stated
confidence for a mix that is chosen without them. tests/quantize/test_looks.py simulates searches with that choice in them; there the rate of
budgets that are exceeded stays below 5%.
"""

from __future__ import annotations

ERROR = 0.05
SPENT = 0.04  # of it, on all looks together
MOST_LOOKS = 60  # at one file of records: the error of number 60 is 1.6e-8, its t quantile on 12 records four times the first look's
_LOOKS_TOGETHER = 3
_SHARE = 1 / 2


def error_of(look: int) -> float:
    """The probability with which the bound of look number `look` (from 1) may be too low; all of them sum to `SPENT`."""
    if look < 1:
        raise ValueError(f"looks are counted from 1, not {look}")
    return SPENT * _SHARE * (1 - _SHARE) ** ((look - 1) // _LOOKS_TOGETHER) / _LOOKS_TOGETHER


def confidence_of(look: int) -> float:
    """The confidence of one bound by itself at look number `look`, so that all bounds together hold with 95%."""
    return 1 - error_of(look)

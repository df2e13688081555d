r"""Perplexity, its standard error, and upper bounds, with records as clusters.

Tokens of one record are not independent, records are. So each statistic is a ratio of sums over records, R = \sum_i y_i / \sum_i
n_i, with y_i a record's sum (NLL, difference of two NLLs, or KL) and n_i its tokens: Cochran, Sampling Techniques (1977), section
9A.1, clusters of unequal size.

- Variance: the jackknife that leaves out one record at a time, v = (k-1)/k \sum_i (R_(i) - R)^2 with R_(i) = (Y - y_i)/(N - n_i)
  (Wolter, Introduction to Variance Estimation, 2007, chapter 4). It is biased upwards where the linearized (delta) variance is
  biased downwards for few records (Efron & Stein, Annals of Statistics 9, 1981), which is the side on which a budget should err.
  For equal n_i both are s^2 / k.
- Upper 95% bound, one-sided: R + se * c with c the t quantile of k - 1 degrees of freedom and, where the records are skewed to the
  right, Hall's second-order term in addition: g (2 t^2 + 1) / (6 sqrt(k)), g being the skewness of the jackknife's pseudo-values (Hall,
  The Bootstrap and Edgeworth Expansion, 1992, section 3.4; with t where he has z). It is never used to lower a bound. For what can't be
  negative (KL) the bound is taken on the logarithm, R exp(c se / R), by the delta method.
- What they cover, simulated (as in tests/eval/test_statistics.py): paired log-ratios 0.947 to 0.950 for 4 to 128 records; a KL that is
  log-normal between records with sigma 0.5: 0.92 for 8, 0.93 for 16, 0.94 for 40 and 128 (plain t: 0.87, 0.89, 0.91, 0.93); with
  sigma 0.8: 0.88, 0.90, 0.93, 0.93 (plain t: 0.82, 0.84, 0.88, 0.90), so a few very divergent records still make the bound too low.
- PPL = exp(R), its standard error PPL * se (delta method); a ratio of two PPLs on the same records is exp of the mean of paired
  differences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gemq.errors import IntegrityError

CONFIDENCE = 0.95
_LARGEST_EXPONENT = 500.0


@dataclass(frozen=True)
class Estimate:
    """A mean per token, its standard error and its one-sided upper 95% bound; the last two are None for a single record."""

    value: float
    standard_error: float | None
    upper_95: float | None


def cluster_mean(sums: Sequence[float], counts: Sequence[int], *, positive: bool = False) -> Estimate:
    """The mean per token of `sums` (one a record) over `counts` tokens, with cluster-jackknife error and upper bound.

    `positive` says that a sum can't be negative but by rounding, and takes the bound on the logarithm.
    """
    y, n = np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    if len(y) != len(n) or not len(y) or (n <= 0).any():
        raise ValueError("one sum and one positive token count a record are needed")
    records = len(y)
    value = math.fsum(sums) / float(n.sum())
    if records < 2:
        return Estimate(value, None, None)
    left_out = (y.sum() - y) / (n.sum() - n)
    error = math.sqrt((records - 1) / records * float(((left_out - value) ** 2).sum()))
    return Estimate(value, error, _upper(value, error, left_out, CONFIDENCE, positive=positive))


def upper_bound(sums: Sequence[float], counts: Sequence[int], confidence: float, *, positive: bool = False) -> float | None:
    """The one-sided upper bound of `cluster_mean` at another confidence than 95%, such as a Bonferroni correction asks for; None for one record."""
    y, n = np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    estimate = cluster_mean(sums, counts, positive=positive)
    if estimate.standard_error is None:
        return None
    return _upper(estimate.value, estimate.standard_error, (y.sum() - y) / (n.sum() - n), confidence, positive=positive)


def _upper(value: float, error: float, left_out: np.ndarray, confidence: float, *, positive: bool) -> float:
    records = len(left_out)
    quantile = t_quantile(records - 1, confidence)
    pseudo = (records - 1) * (value - left_out)
    correction = max(_skewness(pseudo), 0.0) * (2 * quantile**2 + 1) / (6 * math.sqrt(records))
    reach = error * (quantile + correction)
    # two records and a confidence near 1 give a quantile whose exponential is no float
    return value * math.exp(min(reach / value, _LARGEST_EXPONENT)) if positive and value > 0 else value + reach


def t_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """Student's t quantile with `degrees` degrees of freedom, one-sided."""
    from scipy.special import stdtrit  # scipy.stats would take a second to import

    return float(stdtrit(degrees, confidence))


def _skewness(values: np.ndarray) -> float:
    centred = values - values.mean()
    spread = math.sqrt(float((centred**2).mean()))
    # values that are equal up to rounding have no shape
    if spread <= 1e-12 * max(float(np.abs(values).max()), 1e-300):
        return 0.0
    return float(((centred / spread) ** 3).mean())


def perplexity(mean_nll: float) -> float:
    """exp of a mean NLL in nats a token; raises IntegrityError where that is no finite number."""
    try:
        return math.exp(mean_nll)
    except OverflowError:
        raise IntegrityError(f"a mean of {mean_nll:.1f} nats a token is no perplexity: the target is broken",
                             "compare its first tokens with the source's") from None  # fmt: skip

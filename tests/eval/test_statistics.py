"""Errors and bounds: equal to hand-worked cases, and right as often as they claim, in simulations with fixed seeds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from gemq.errors import IntegrityError
from gemq.eval.statistics import cluster_mean, perplexity, t_quantile


def test_equal_clusters_are_a_plain_t_interval() -> None:
    values = np.array([1.0, 2.0, 4.0, 5.0])  # symmetric: no correction for skewness
    found = cluster_mean((values * 10).tolist(), [10] * 4)
    error = values.std(ddof=1) / 2
    assert found.value == pytest.approx(3.0)
    assert found.standard_error == pytest.approx(error)
    assert found.upper_95 == pytest.approx(3.0 + stats.t.ppf(0.95, 3) * error)


def test_unequal_clusters_by_hand() -> None:
    # left out one by one: 12/4, 10/3, 4/3 around 13/5... with sums 1, 3, 9 and counts 1, 2, 2
    found = cluster_mean([1.0, 3.0, 9.0], [1, 2, 2])
    deviations = [12 / 4 - 2.6, 10 / 3 - 2.6, 4 / 3 - 2.6]
    assert found.value == pytest.approx(2.6)
    assert found.standard_error == pytest.approx(math.sqrt(2 / 3 * sum(d * d for d in deviations)))


def test_order_and_scale_do_not_matter() -> None:
    rng = np.random.default_rng(1)
    sums, counts = rng.lognormal(size=20), rng.integers(5, 50, 20)
    order = rng.permutation(20)
    a = cluster_mean(sums.tolist(), counts.tolist())
    b = cluster_mean((3 * sums[order]).tolist(), counts[order].tolist())
    assert b.value == pytest.approx(3 * a.value)
    assert (b.standard_error or 0) == pytest.approx(3 * (a.standard_error or 0))
    assert (b.upper_95 or 0) == pytest.approx(3 * (a.upper_95 or 0))


def test_a_single_record_has_no_error() -> None:
    found = cluster_mean([12.0], [4])
    assert (found.value, found.standard_error, found.upper_95) == (3.0, None, None)


def test_records_without_difference() -> None:
    found = cluster_mean([0.0] * 5, [3, 4, 5, 6, 7])
    assert (found.value, found.standard_error, found.upper_95) == (0.0, 0.0, 0.0)


def test_t_quantile_is_scipys() -> None:
    for degrees in (1, 2, 7, 127, 10_000):
        assert t_quantile(degrees) == pytest.approx(stats.t.ppf(0.95, degrees))


def test_perplexity_without_a_number() -> None:
    assert perplexity(0.0) == 1.0
    with pytest.raises(IntegrityError):
        perplexity(5000.0)


def _cover(records: int, draw, trials: int = 4000, positive: bool = False) -> tuple[float, float]:  # type: ignore[no-untyped-def]
    """Share of trials whose upper bound is at or above the true mean per token, and mean standard error over the true one."""
    rng = np.random.default_rng(3)
    estimates, errors, bounds, truth = [], [], [], math.nan
    for _ in range(trials):
        sums, counts, truth = draw(rng, records)
        found = cluster_mean(sums.tolist(), counts.tolist(), positive=positive)
        estimates.append(found.value)
        errors.append(found.standard_error)
        bounds.append(found.upper_95)
    return float(np.mean(np.array(bounds) >= truth)), float(np.mean(errors) / np.std(estimates))


def _differences(rng: np.random.Generator, records: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Paired log-ratios: an effect a record (as between subjects) and noise a token, lengths from 60 to 512, as in the arena's data."""
    counts = rng.integers(60, 513, records)
    effect = 0.03 + 0.04 * rng.standard_normal(records)
    return counts * effect + 0.3 * np.sqrt(counts) * rng.standard_normal(records), counts, 0.03


def _divergences(rng: np.random.Generator, records: int) -> tuple[np.ndarray, np.ndarray, float]:
    """KL: positive, skewed to the right, log-normal between records."""
    counts = rng.integers(60, 513, records)
    sigma = 0.5
    return counts * 0.15 * rng.lognormal(-(sigma**2) / 2, sigma, records), counts, 0.15


@pytest.mark.parametrize("records", [8, 16, 40, 128])
def test_bound_on_a_paired_ratio_covers(records: int) -> None:
    covered, error_ratio = _cover(records, _differences)
    assert 0.935 <= covered <= 0.97
    assert 0.94 <= error_ratio <= 1.1


@pytest.mark.parametrize(("records", "least"), [(8, 0.905), (16, 0.915), (40, 0.925), (128, 0.93)])
def test_bound_on_a_divergence_covers(records: int, least: float) -> None:
    covered, _ = _cover(records, _divergences, positive=True)
    assert least <= covered <= 0.97


def test_bound_on_a_divergence_is_positive_and_wider() -> None:
    sums, counts = [0.1, 0.4, 3.0, 0.2], [10, 12, 9, 30]
    plain, on_the_logarithm = cluster_mean(sums, counts), cluster_mean(sums, counts, positive=True)
    assert (plain.upper_95 or 0) < (on_the_logarithm.upper_95 or 0)
    assert plain.standard_error == on_the_logarithm.standard_error
    assert cluster_mean([0.0, 0.0], [3, 4], positive=True).upper_95 == 0.0

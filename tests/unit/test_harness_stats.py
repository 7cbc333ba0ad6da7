"""The statistics against values that are known otherwise, and by simulation."""

from __future__ import annotations

import numpy as np
import pytest

from harness import stats


def test_cluster_bootstrap_covers_the_population_mean() -> None:
    """Beta-binomial tasks with within-task correlation 0.5, 100 x 4: the 95 % interval covers about 95 %."""
    rng = np.random.default_rng(1)
    mean, correlation, covered, repeats = 0.275, 0.5, 0, 200
    scale = 1 / correlation - 1
    for _ in range(repeats):
        rates = rng.beta(mean * scale, (1 - mean) * scale, size=100)
        estimate = stats.weighted_mean(rng.binomial(4, rates) / 4)
        covered += estimate.low <= mean <= estimate.high
    assert 0.89 <= covered / repeats <= 0.99  # 200 repeats: three standard errors are 4.6 points


def test_sign_flip_finds_a_difference_and_not_a_null() -> None:
    rng = np.random.default_rng(2)
    base = rng.binomial(4, 0.1, size=100) / 4
    better = rng.binomial(4, 0.4, size=100) / 4
    estimate, p = stats.paired_difference(better, base)
    assert p < 0.001
    assert estimate.low > 0.15
    _, p_null = stats.paired_difference(rng.binomial(4, 0.1, size=100) / 4, base)
    assert p_null > 0.05


def test_false_alarms_of_the_paired_test_are_at_most_nominal() -> None:
    rng = np.random.default_rng(3)
    alarms = 0
    for _ in range(200):
        rates = rng.beta(0.5, 1.5, size=100)
        _, p = stats.paired_difference(rng.binomial(4, rates) / 4, rng.binomial(4, rates) / 4)
        alarms += p < 0.05
    assert alarms / 200 <= 0.10


@pytest.mark.parametrize("bad", [np.array([]), np.array([0.5, np.nan])])
def test_missing_values_fail_closed(bad: np.ndarray) -> None:
    with pytest.raises(ValueError):
        stats.weighted_mean(bad)


def test_weights_count() -> None:
    estimate = stats.weighted_mean(np.array([1.0, 0.0]), np.array([3.0, 1.0]))
    assert estimate.value == pytest.approx(0.75)


def test_wilson_matches_the_published_example() -> None:
    """Newcombe 1998, table I: 15 of 148 gives 0.0624 to 0.1605 (score method without continuity correction)."""
    estimate = stats.wilson(15, 148)
    assert (estimate.low, estimate.high) == pytest.approx((0.0624, 0.1605), abs=5e-4)

"""By simulation: a 95 % interval holds the truth 93-97 % of the time, and a test's false alarms are its level.

Tasks are beta-binomial with within-task correlation rho, 100 tasks x 4 attempts, as in the statistics page. With 1,000
repeats the standard error of a coverage of 95 % is 0.7 points.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from harness import stats

REPEATS, TASKS, ATTEMPTS = 1_000, 100, 4
Bounds = tuple[float, float]


def coverage(rate: float, rho: float, interval: Callable[[np.ndarray], Bounds], *, repeats: int, seed: int) -> float:
    rng = np.random.default_rng(seed)
    scale = 1 / rho - 1
    held = 0
    for _ in range(repeats):
        tasks = rng.beta(rate * scale, (1 - rate) * scale, size=TASKS)
        low, high = interval(rng.binomial(ATTEMPTS, tasks).astype(np.float64))
        held += low <= rate <= high
    return held / repeats


def scored(passed: np.ndarray) -> Bounds:
    estimate = stats.pass_rate(passed, np.full(TASKS, float(ATTEMPTS))).estimate
    return estimate.low, estimate.high


def modelled(passed: np.ndarray) -> Bounds:
    return stats.mean_interval(passed, np.full(TASKS, float(ATTEMPTS)))


@pytest.mark.parametrize(("rate", "rho"), [(0.073, 0.5), (0.128, 0.5), (0.275, 0.3), (0.275, 0.7), (0.4, 0.5)])
def test_the_score_s_interval_covers(rate: float, rho: float) -> None:
    assert 0.93 <= coverage(rate, rho, scored, repeats=REPEATS, seed=1) <= 0.97


def test_the_beta_binomial_interval_covers_at_low_rates() -> None:
    assert 0.93 <= coverage(0.03, 0.3, modelled, repeats=150, seed=2) <= 0.98


def test_a_binomial_interval_over_attempts_does_not_cover() -> None:
    def naive(passed: np.ndarray) -> Bounds:
        estimate = stats.wilson(int(passed.sum()), TASKS * ATTEMPTS)
        return estimate.low, estimate.high

    assert coverage(0.275, 0.5, naive, repeats=REPEATS, seed=3) < 0.85


def test_the_standard_errors_are_the_spread_that_is_seen() -> None:
    """For such tasks over fresh tasks, for these tasks over fresh attempts at the same ones."""
    rng = np.random.default_rng(4)
    attempts = np.full(TASKS, float(ATTEMPTS))
    same = rng.beta(0.275, 0.725, size=TASKS)
    fresh = rng.beta(0.275, 0.725, size=(400, TASKS))
    for tasks, field in ((np.tile(same, (400, 1)), "error_these_tasks"), (fresh, "error_such_tasks")):
        found = [stats.pass_rate(rng.binomial(ATTEMPTS, row).astype(float), attempts) for row in tasks]
        spread = np.std([rate.estimate.value for rate in found], ddof=1)
        stated = np.sqrt(np.mean([getattr(rate, field) ** 2 for rate in found]))
        assert stated == pytest.approx(spread, rel=0.12)  # three standard errors of a spread from 400


def test_the_paired_difference_covers() -> None:
    rng = np.random.default_rng(5)
    held = 0
    for _ in range(REPEATS):
        base = rng.beta(0.275, 0.725, size=TASKS)
        new = base * 0.8  # 5.5 points less
        estimate = stats.weighted_mean((rng.binomial(ATTEMPTS, new) - rng.binomial(ATTEMPTS, base)) / ATTEMPTS)
        held += estimate.low <= -0.2 * 0.275 <= estimate.high
    assert 0.93 <= held / REPEATS <= 0.97


@pytest.mark.parametrize("losing", [0.01, 0.02])
def test_the_paired_difference_covers_where_few_tasks_differ(losing: float) -> None:
    """And its interval leaves zero out only where the test says so. (Wider than 95 %: counts this small are coarse.)"""
    rng = np.random.default_rng(8)
    held, base = 0, np.full(TASKS, 0.5)
    for _ in range(200):
        estimate, p = stats.paired_difference(base - 0.25 * (rng.random(TASKS) < losing), base)
        held += estimate.low <= -0.25 * losing <= estimate.high
        assert p < 0.05 or estimate.low <= 0.0 <= estimate.high
        assert estimate.low < estimate.high
    assert held / 200 >= 0.95


@pytest.mark.parametrize("carried", [-0.8, 0.0, 0.3])
def test_the_ratio_of_two_series_covers_however_neighbours_hang_together(carried: float) -> None:
    """Batches leave a little of a positive correlation, and all the more room with a negative one."""
    rng = np.random.default_rng(7)
    held = 0
    for _ in range(REPEATS):
        steps = rng.gamma(2.0, 1.0, size=(2, 50)) - 2.0
        for n in range(1, 50):
            steps[1, n] += carried * steps[1, n - 1]
        estimate = stats.series_ratio(40.0 + steps[0, 30:], 20.0 + steps[1, 30:])
        held += estimate.low <= 2.0 <= estimate.high
    assert 0.91 <= held / REPEATS <= 0.99


def test_the_sign_flip_test_keeps_its_level() -> None:
    rng = np.random.default_rng(6)
    alarms = 0
    for _ in range(400):
        rates = rng.beta(0.275, 0.725, size=TASKS)
        alarms += stats.sign_flip((rng.binomial(ATTEMPTS, rates) - rng.binomial(ATTEMPTS, rates)) / ATTEMPTS) < 0.05
    assert alarms / 400 <= 0.083  # 5 % and three standard errors

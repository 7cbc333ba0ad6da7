"""The statistics against published values, exact enumeration and arithmetic that is known otherwise."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from harness import stats


def counts(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)


@pytest.mark.parametrize("bad", [np.array([]), np.array([0.5, np.nan])])
def test_missing_values_fail_closed(bad: np.ndarray) -> None:
    for estimate in (stats.weighted_mean, stats.median, stats.sign_flip):
        with pytest.raises(ValueError):
            estimate(bad)
    with pytest.raises(ValueError):
        stats.pass_rate(bad, np.ones(len(bad)))


def test_impossible_counts_fail_closed() -> None:
    for passed, attempts in ((counts(5), counts(4)), (counts(-1), counts(4)), (counts(0), counts(0))):
        with pytest.raises(ValueError):
            stats.pass_rate(passed, attempts)
    with pytest.raises(ValueError, match="at least 3 attempts"):
        stats.pass_at_k(counts(1, 1), counts(4, 2), 3)


def test_weights_count() -> None:
    estimate = stats.weighted_mean(np.array([1.0, 0.0]), np.array([3.0, 1.0]))
    assert estimate.value == pytest.approx(0.75)
    with pytest.raises(ValueError):
        stats.weighted_mean(np.array([1.0, 0.0]), np.array([1.0, -1.0]))


def test_equal_values_have_no_spread() -> None:
    estimate = stats.weighted_mean(np.full(10, 0.5))
    assert (estimate.low, estimate.value, estimate.high) == (0.5, 0.5, 0.5)


def test_wilson_matches_the_published_example() -> None:
    """Newcombe 1998, table I: 15 of 148 gives 0.0624 to 0.1605 (score method without continuity correction)."""
    estimate = stats.wilson(15, 148)
    assert (estimate.low, estimate.high) == pytest.approx((0.0624, 0.1605), abs=5e-4)


def test_sign_flip_matches_fishers_example() -> None:
    """Fisher 1935 on Darwin's maize: 863 of 32,768 arrangements in each tail reach the sum, p = 5.267 %."""
    darwin = counts(49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48)
    assert stats.sign_flip(darwin) == pytest.approx(2 * 863 / 32_768)


def test_many_random_arrangements_agree_with_all_of_them() -> None:
    """25 equal differences: all signs must agree, p = 2 / 2^25; the random ones can't go below one in 10,001."""
    assert stats.sign_flip(np.ones(25)) == pytest.approx(1 / 10_001)
    darwin = counts(49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48)
    both = np.concatenate([darwin, [0.01, -0.01]])  # 17 differences: no longer exact, and nearly the same
    assert stats.sign_flip(both) == pytest.approx(2 * 863 / 32_768, abs=0.008)


def test_zero_differences_are_certain_of_nothing() -> None:
    assert stats.sign_flip(np.zeros(40)) == 1.0


def test_pass_at_k_is_the_share_of_subsets_with_a_success() -> None:
    """Chen et al. 2021 define it as the mean over all subsets of k of the n attempts."""
    for n, c in ((4, 1), (6, 2), (6, 0), (5, 5)):
        outcomes = [1] * c + [0] * (n - c)
        for k in range(1, n + 1):
            subsets = list(combinations(outcomes, k))
            at_least_one = np.mean([any(s) for s in subsets])
            all_of_them = np.mean([all(s) for s in subsets])
            assert stats.pass_at_k(counts(c), counts(n), k)[0] == pytest.approx(at_least_one)
            assert stats.pass_hat_k(counts(c), counts(n), k)[0] == pytest.approx(all_of_them)


def test_pass_at_k_is_unbiased_where_the_plug_in_is_not() -> None:
    """Over the binomial distribution of c the expectation is exactly 1 - (1-p)^k."""
    n, k, p = 8, 4, 0.2
    c = np.arange(n + 1.0)
    ways = np.array([len(list(combinations(range(n), int(i)))) for i in c])
    chance = ways * p**c * (1 - p) ** (n - c)
    truth = 1 - (1 - p) ** k
    assert (chance * stats.pass_at_k(c, np.full(n + 1, float(n)), k)).sum() == pytest.approx(truth)
    assert (chance * (1 - (1 - c / n) ** k)).sum() < truth - 0.03


def test_beta_binomial_fit_matches_the_published_example() -> None:
    """Geissler's families of 12 children (Lindsey and Altham 1998): alpha 34.096, beta 31.572, AIC 24989.74."""
    families = [3, 24, 104, 286, 670, 1033, 1343, 1112, 829, 478, 181, 45, 7]
    boys = np.repeat(np.arange(13.0), families)
    model = stats.fit(boys, np.full(len(boys), 12.0))
    assert (model.alpha, model.beta) == pytest.approx((34.096, 31.572), rel=1e-3)
    assert 4 - 2 * model.log_likelihood == pytest.approx(24989.74, abs=0.01)


def test_beta_binomial_interval_at_nothing_passed_is_the_rule_of_three_over_tasks() -> None:
    """Two-sided by likelihood: (1 - p)^100 = exp(-1.92), so 1.9 %; tasks count, not their attempts."""
    low, high = stats.mean_interval(np.zeros(100), np.full(100, 4.0))
    assert (low, high) == pytest.approx((0.0, 0.0190), abs=3e-4)
    low, high = stats.mean_interval(np.full(100, 4.0), np.full(100, 4.0))
    assert (low, high) == pytest.approx((1 - 0.0190, 1.0), abs=3e-4)


def test_pass_rate_of_very_few_successes_uses_the_model_and_says_so() -> None:
    passed = np.zeros(100)
    rate = stats.pass_rate(passed, np.full(100, 4.0))
    assert rate.interval.startswith("beta-binomial")
    assert (rate.estimate.value, rate.estimate.low) == (0.0, 0.0)
    assert 0.01 < rate.estimate.high < 0.03
    passed[:30] = 2
    assert stats.pass_rate(passed, np.full(100, 4.0)).interval.startswith("cluster bootstrap")


def test_standard_errors_for_these_and_for_such_tasks() -> None:
    """Half of the tasks always pass, half never: exactly known for these tasks, a coin's toss for such tasks."""
    rate = stats.pass_rate(np.repeat([4.0, 0.0], 50), np.full(100, 4.0))
    assert rate.error_these_tasks == 0.0
    assert rate.error_such_tasks == pytest.approx(0.5 / np.sqrt(99))
    assert rate.correlation == 1.0
    # Every task passes half the time: all of the error is in the attempts, p(1-p)/(m-1) each.
    rate = stats.pass_rate(np.full(100, 2.0), np.full(100, 4.0))
    assert rate.error_these_tasks == pytest.approx(np.sqrt(0.25 / 3 / 100))
    assert rate.error_such_tasks == 0.0
    assert stats.pass_rate(np.repeat([1.0, 0.0], 50), np.ones(100)).error_these_tasks is None


# The planned errors, in points, of the statistics page: (rate, correlation) -> 100x4 such, these; 500x4 these.
PLANNED = [
    (0.073, 0.5, 2.06, 0.92, 0.41),
    (0.128, 0.5, 2.64, 1.18, 0.53),
    (0.275, 0.3, 3.08, 1.87, 0.84),
    (0.275, 0.5, 3.53, 1.58, 0.71),
    (0.275, 0.7, 3.93, 1.22, 0.55),
    (0.400, 0.5, 3.87, 1.73, 0.77),
]


@pytest.mark.parametrize(("rate", "correlation", "such", "these", "large"), PLANNED)
def test_planned_errors(rate: float, correlation: float, such: float, these: float, large: float) -> None:
    assert 100 * np.array(stats.design_errors(rate, correlation, 100, 4)) == pytest.approx([such, these], abs=0.006)
    assert 100 * stats.design_errors(rate, correlation, 500, 4)[1] == pytest.approx(large, abs=0.006)


def test_smallest_drops_that_are_found() -> None:
    """27.5 %, correlation 0.5, these tasks: 11.1 points with 100x1, 5.6 with 100x4, 2.8 with 100x16, 5.0 with 500x1."""
    for tasks, attempts, points in ((100, 1, 11.1), (100, 4, 5.6), (100, 8, 3.9), (100, 16, 2.8), (500, 1, 5.0)):
        error = stats.design_errors(0.275, 0.5, tasks, attempts)[1]
        assert 100 * stats.minimal_detectable_effect(error) == pytest.approx(points, abs=0.06)


def shaped(mean: float, variance: float, n: int) -> np.ndarray:
    """``n`` values with exactly this mean and sample variance."""
    ramp = np.arange(n, dtype=np.float64)
    return mean + (ramp - ramp.mean()) / ramp.std(ddof=1) * np.sqrt(variance)


def test_stratified_estimate_matches_the_published_example() -> None:
    """Lohr, Sampling, agstrat: acres of farms in 3,078 counties; total 909,736,035 with standard error 50,417,248."""
    published = {
        "north central": (1054, 103, 300_504.2, 29_618_183_543),
        "northeast": (220, 21, 97_629.8, 7_647_472_708),
        "south": (1382, 135, 211_315.0, 53_587_487_856),
        "west": (422, 41, 662_295.5, 396_185_950_266),
    }
    values = np.concatenate([shaped(mean, variance, n) for _, n, mean, variance in published.values()])
    strata = [name for name, (_, n, _, _) in published.items() for _ in range(n)]
    sizes = {name: size for name, (size, _, _, _) in published.items()}
    found = stats.stratified(values, strata, shares={k: float(v) for k, v in sizes.items()}, sizes=sizes)
    assert 3078 * found.value == pytest.approx(909_736_035, rel=1e-6)
    assert 3078 * found.error == pytest.approx(50_417_248, rel=1e-4)


def test_the_correction_takes_off_the_tasks_part_only() -> None:
    """100 of 500: the between-task part shrinks by the root of 0.8, the attempts' part stays (statistics page)."""
    rates, strata = shaped(0.4, 0.04, 100), ["a"] * 50 + ["b"] * 50
    noise = np.full(100, 0.01)
    shares = {"a": 0.5, "b": 0.5}
    free = stats.stratified(rates, strata, shares=shares, attempt_variances=noise)
    held = stats.stratified(rates, strata, shares=shares, sizes={"a": 250, "b": 250}, attempt_variances=noise)
    assert held.error_these_tasks == pytest.approx(0.01)
    between, corrected = free.error**2 - 1e-4, held.error**2 - 1e-4
    assert corrected / between == pytest.approx(0.8)
    all_of_them = stats.stratified(rates, strata, shares=shares, sizes={"a": 50, "b": 50}, attempt_variances=noise)
    assert all_of_them.error == pytest.approx(all_of_them.error_these_tasks)


@pytest.mark.parametrize(
    ("strata", "shares", "sizes"),
    [
        (["a", "a", "b"], {"a": 0.5, "b": 0.5}, None),  # one task can't tell its stratum's spread
        (["a", "a", "a"], {"a": 0.5, "b": 0.5}, None),  # a stratum without a task
        (["a", "a", "a"], {"b": 1.0}, None),
        (["a", "a", "a"], {"a": 1.0}, {"a": 2}),  # more tasks than there are
    ],
)
def test_strata_that_say_nothing(strata: list[str], shares: dict[str, float], sizes: dict[str, int] | None) -> None:
    with pytest.raises(ValueError):
        stats.stratified(counts(0.1, 0.2, 0.3), strata, shares=shares, sizes=sizes)


def test_holm_matches_the_published_example() -> None:
    """0.01, 0.04, 0.03, 0.005 at 5 %: the first and last are rejected (the textbook example of the step-down)."""
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert stats.holm([0.9, 0.8]) == [1.0, 1.0]
    with pytest.raises(ValueError):
        stats.holm([0.1, float("nan")])


def test_the_interval_of_few_differences_agrees_with_their_test() -> None:
    """Three of 100 tasks lose a quarter: no reason yet (p = 0.25) to say that the difference is not zero."""
    base = np.full(100, 0.5)
    estimate, p = stats.paired_difference(base - 0.25 * (np.arange(100) < 3), base)
    assert (estimate.value, p) == (pytest.approx(-0.0075), 0.25)
    assert estimate.low < estimate.value < 0 <= estimate.high
    none, p = stats.paired_difference(base, base)
    z2 = 1.959964**2
    assert (none.low, none.high, p) == (pytest.approx(-z2 / (100 + z2)), pytest.approx(z2 / (100 + z2)), 1.0)
    gained, _ = stats.paired_difference(base + 0.25 * (np.arange(100) < 3), base)
    assert (gained.low, gained.high) == (pytest.approx(-estimate.high), pytest.approx(-estimate.low))

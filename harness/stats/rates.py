"""Pass rates: pass@1, pass@k, pass^k, and the score with all that a reader needs to judge it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.stats.beta_binomial import mean_interval
from harness.stats.bootstrap import weighted_mean
from harness.stats.core import Z95, Estimate, Floats, checked_counts, checked_weights, mean_error
from harness.stats.power import minimal_detectable_effect

FEW_TASKS = 10  # with fewer tasks that passed (or failed) at all, resampling them says too little


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRate:
    """pass@1 of a policy on a benchmark: the mean over each task's attempts, then the weighted mean over tasks.

    ``error_such_tasks`` is the standard error for the population the tasks were drawn from, ``error_these_tasks`` for
    exactly these tasks (only the attempts are random; None when a task has a single attempt). The detectable drops are
    what a comparison with an equally measured score finds, one-sided 5 %, power 80 %: on the same tasks and policy
    behaviour for ``these``, on another draw of tasks for ``such``. ``interval`` names how ``estimate`` got its bounds.
    """

    estimate: Estimate
    interval: str
    error_such_tasks: float
    error_these_tasks: float | None
    detectable_such_tasks: float
    detectable_these_tasks: float | None
    correlation: float | None  # of two attempts at one task, around the mean


def pass_rate(passed: Floats, attempts: Floats, weights: Floats | None = None) -> PassRate:
    """pass@1 with its 95 % interval for such tasks. All [T]; raises ValueError on impossible or missing counts.

    The interval is the BCa cluster bootstrap over tasks; with fewer than ten tasks that passed at least once (or failed
    at least once) it is the profile likelihood of the beta-binomial model."""
    checked_counts(passed, attempts)
    rates = passed / attempts
    weights = checked_weights(rates, weights)
    estimate, interval = weighted_mean(rates, weights), "cluster bootstrap (BCa)"
    if min((passed > 0).sum(), (passed < attempts).sum()) < FEW_TASKS:
        low, high = mean_interval(passed, attempts, weights)
        # The model's maximum and the weighted mean differ a little; the bounds must hold the value they belong to.
        low, high = min(low, estimate.value), max(high, estimate.value)
        estimate = Estimate(value=estimate.value, low=low, high=high, n=estimate.n)
        interval = "beta-binomial profile likelihood"
    such = mean_error(rates, weights)
    these = _error_these_tasks(rates, attempts, weights)
    return PassRate(
        estimate=estimate,
        interval=interval,
        error_such_tasks=such,
        error_these_tasks=these,
        detectable_such_tasks=minimal_detectable_effect(such),
        detectable_these_tasks=None if these is None else minimal_detectable_effect(these),
        correlation=_correlation(rates, attempts),
    )


def pass_at_k(passed: Floats, attempts: Floats, k: int) -> Floats:
    """Unbiased estimate, task by task, that at least one of ``k`` attempts passes: 1 - C(n-c, k) / C(n, k). All [T].

    Chen et al. 2021 (arXiv 2107.03374), in the product form that does not overflow. Raises ValueError when a task has
    fewer than ``k`` attempts."""
    return 1.0 - pass_hat_k(attempts - passed, attempts, k)


def pass_hat_k(passed: Floats, attempts: Floats, k: int) -> Floats:
    """Unbiased estimate, task by task, that all of ``k`` attempts pass (pass^k): C(c, k) / C(n, k). All [T]."""
    if k < 1:
        raise ValueError(f"k must be at least 1, given {k}")
    checked_counts(passed, attempts, at_least=k)
    steps = np.arange(k)[:, None]
    factors = np.clip(passed - steps, 0, None) / (attempts - steps)
    product: Floats = factors.prod(axis=0)
    return product


def wilson(hits: int, n: int) -> Estimate:
    """A proportion of independent trials with Wilson's 95 % interval. Raises ValueError when n < 1."""
    if n < 1 or not 0 <= hits <= n:
        raise ValueError(f"a proportion needs 0 <= hits <= n and n >= 1; got {hits} of {n}")
    z, p = Z95, hits / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * ((p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5) / (1 + z * z / n)
    return Estimate(value=p, low=max(0.0, centre - half), high=min(1.0, centre + half), n=n)


def _error_these_tasks(rates: Floats, attempts: Floats, weights: Floats) -> float | None:
    """p(1-p)/(m-1) is the unbiased variance of a task's mean over m attempts."""
    if (attempts < 2).any():
        return None
    variance = rates * (1 - rates) / (attempts - 1)
    return float(np.sqrt((weights**2 * variance).sum()) / weights.sum())


def _correlation(rates: Floats, attempts: Floats) -> float | None:
    """Intraclass correlation by moments: the share of a single attempt's variance that lies between tasks."""
    mean = rates.mean()
    total = mean * (1 - mean)
    if len(rates) < 2 or (attempts < 2).any() or total == 0:
        return None
    within = (rates * (1 - rates) * attempts / (attempts - 1)).mean()
    return float(np.clip(1 - within / total, 0.0, 1.0))

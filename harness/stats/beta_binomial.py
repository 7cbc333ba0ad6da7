"""The beta-binomial model: each task has its own pass rate, drawn from a beta distribution.

Parameters are the mean and the correlation of two attempts at one task (1 / (alpha + beta + 1)): the two that a
benchmark's error depends on. Used where so few tasks pass that resampling them says too little.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq, minimize, minimize_scalar
from scipy.special import betaln, expit, gammaln, logit

from harness.stats.core import Floats, checked_counts, checked_weights

_LOWEST, _HIGHEST = 1e-6, 1 - 1e-6
_DROP = 3.841459 / 2  # half the 95 % point of chi-square with one degree of freedom


@dataclass(frozen=True, slots=True, kw_only=True)
class BetaBinomial:
    """A fitted model. ``log_likelihood`` includes the binomial coefficients."""

    mean: float
    correlation: float
    log_likelihood: float

    @property
    def alpha(self) -> float:
        return self.mean * (1 / self.correlation - 1)

    @property
    def beta(self) -> float:
        return (1 - self.mean) * (1 / self.correlation - 1)


def fit(passed: Floats, attempts: Floats, weights: Floats | None = None) -> BetaBinomial:
    """Maximum likelihood. ``passed``, ``attempts``, ``weights``: [T]; a weight counts a task so many times."""
    table = _Table(passed, attempts, weights)
    found = minimize(
        lambda x: -table.log_likelihood(*expit(x)),
        x0=logit([table.pooled, 0.3]),
        method="Nelder-Mead",
        options={"xatol": 1e-8, "fatol": 1e-10, "maxiter": 2_000},
    )
    mean, correlation = np.clip(expit(found.x), _LOWEST, _HIGHEST)
    return BetaBinomial(mean=float(mean), correlation=float(correlation), log_likelihood=-float(found.fun))


def mean_interval(passed: Floats, attempts: Floats, weights: Floats | None = None) -> tuple[float, float]:
    """95 % profile-likelihood interval of the mean, for such tasks; [T] each. Open at 0 (1) when nothing (all) passed.

    Weights are scaled to the effective number of tasks, (sum w)^2 / sum w^2."""
    if weights is not None:
        weights = checked_weights(passed, weights)
        weights = weights * weights.sum() / (weights**2).sum()
    table = _Table(passed, attempts, weights)
    peak = minimize_scalar(lambda m: -table.profile(expit(m)), bounds=logit([_LOWEST, _HIGHEST]), method="bounded").x
    top = table.profile(expit(peak))

    def height(m: float) -> float:
        return table.profile(expit(m)) - top + _DROP

    lowest, highest = logit([_LOWEST, _HIGHEST])
    low = expit(brentq(height, lowest, peak, xtol=1e-6)) if passed.any() and height(lowest) < 0 else 0.0
    high = expit(brentq(height, peak, highest, xtol=1e-6)) if (passed < attempts).any() and height(highest) < 0 else 1.0
    return float(low), float(high)


class _Table:
    """Tasks with equal counts are one row: the likelihood then costs next to nothing."""

    def __init__(self, passed: Floats, attempts: Floats, weights: Floats | None) -> None:
        checked_counts(passed, attempts)
        weights = checked_weights(passed, weights)
        pairs, index = np.unique(np.stack([passed, attempts]), axis=1, return_inverse=True)
        self._passed, self._attempts = pairs
        self._weights = np.bincount(index.ravel(), weights=weights)
        ways = gammaln(self._attempts + 1) - gammaln(self._passed + 1) - gammaln(self._attempts - self._passed + 1)
        self._constant = float((self._weights * ways).sum())
        share = (weights * passed).sum() / (weights * attempts).sum()
        self.pooled = float(np.clip(share, 0.5 / attempts.sum(), 1 - 0.5 / attempts.sum()))

    def log_likelihood(self, mean: float, correlation: float) -> float:
        mean, correlation = np.clip([mean, correlation], _LOWEST, _HIGHEST)
        alpha, beta = np.array([mean, 1 - mean]) * (1 / correlation - 1)
        terms = betaln(self._passed + alpha, self._attempts - self._passed + beta) - betaln(alpha, beta)
        return float((self._weights * terms).sum()) + self._constant

    def profile(self, mean: float) -> float:
        """The likelihood at ``mean``, at its best correlation."""
        best = minimize_scalar(
            lambda c: -self.log_likelihood(mean, float(expit(c))), bounds=(-9.0, 9.0), method="bounded"
        )
        return -float(best.fun)

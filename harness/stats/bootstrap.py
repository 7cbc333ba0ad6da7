"""Bootstrap intervals: the weighted mean over tasks (bias-corrected and accelerated), medians (percentile)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from scipy.special import ndtr, ndtri

from harness.stats.core import Estimate, Floats, checked_weights, finite, rng

RESAMPLES = 4_000
MEDIAN_RESAMPLES = 2_000
_TAILS = np.array([0.025, 0.975])


def weighted_mean(values: Floats, weights: Floats | None = None) -> Estimate:
    """Weighted mean over tasks with a BCa cluster bootstrap (Efron 1987). ``values``, ``weights``: [T].

    The percentile bootstrap of a low pass rate sits too low (92 % coverage at 7 %); BCa corrects its bias and skewness.
    Raises ValueError on an empty array or a value that is not finite."""
    weights = checked_weights(values, weights)
    total = weights.sum()
    value = float((values * weights).sum() / total)
    counts = _resample_counts(len(values))
    # A resample in which every weight is zero has no mean; it can only come up where weights may be zero.
    mass = counts @ weights
    drawn = (counts @ (values * weights))[mass > 0] / mass[mass > 0]
    if np.ptp(drawn) < 1e-12:
        return Estimate(value=value, low=value, high=value, n=len(values))
    below = ((drawn < value - 1e-12).sum() + 0.5 * (np.abs(drawn - value) <= 1e-12).sum()) / len(drawn)
    bias = ndtri(np.clip(below, 1 / len(drawn), 1 - 1 / len(drawn)))
    tails = bias + ndtri(_TAILS)
    low, high = np.quantile(drawn, ndtr(bias + tails / (1 - _acceleration(values, weights) * tails)))
    return Estimate(value=value, low=float(low), high=float(high), n=len(values))


def median(values: Floats) -> Estimate:
    """Median with a percentile bootstrap over independent units. ``values``: [N]."""
    finite(values)
    draws = rng().integers(0, len(values), size=(MEDIAN_RESAMPLES, len(values)))
    low, high = np.quantile(np.median(values[draws], axis=1), _TAILS)
    return Estimate(value=float(np.median(values)), low=float(low), high=float(high), n=len(values))


def mean_ratio(numerator: Floats, denominator: Floats) -> Estimate:
    """Ratio of the means of two independent samples, both resampled; ``n`` is the smaller sample's size."""
    finite(numerator)
    finite(denominator)
    stream = rng()
    above = np.mean(numerator[stream.integers(0, len(numerator), (MEDIAN_RESAMPLES, len(numerator)))], axis=1)
    below = np.mean(denominator[stream.integers(0, len(denominator), (MEDIAN_RESAMPLES, len(denominator)))], axis=1)
    low, high = np.quantile(above / below, _TAILS)
    value = float(numerator.mean() / denominator.mean())
    return Estimate(value=value, low=float(low), high=float(high), n=min(len(numerator), len(denominator)))


@lru_cache(maxsize=4)
def _resample_counts(n: int) -> Floats:
    """How often each of ``n`` units is in each resample, [RESAMPLES, n]. The same for every call: see ``rng``."""
    draws = rng().multinomial(n, np.full(n, 1 / n), size=RESAMPLES)
    counts: Floats = draws.astype(np.float64)
    counts.setflags(write=False)
    return counts


def _acceleration(values: Floats, weights: Floats) -> float:
    """Skewness of the estimate by the jackknife over tasks."""
    rest = weights.sum() - weights
    if len(values) < 3 or (rest <= 0).any():
        return 0.0
    left_out = ((values * weights).sum() - values * weights) / rest
    deviation = left_out.mean() - left_out
    scale = (deviation**2).sum() ** 1.5
    return float((deviation**3).sum() / (6 * scale)) if scale > 0 else 0.0

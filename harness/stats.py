"""Pure statistics for pass rates and paired differences.

A benchmark score rests on tasks (clusters) with several attempts each; attempts at one task are correlated, so every
interval resamples tasks, not attempts (a binomial interval over attempts covers only 72-85 % where 95 % is asked for).
All functions take arrays indexed by task and a seed, and are deterministic.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

RESAMPLES = 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A value with its 95 % interval; ``n`` counts the units that were resampled."""

    value: float
    low: float
    high: float
    n: int


def weighted_mean(values: Floats, weights: Floats | None = None) -> Estimate:
    """Weighted mean over tasks with a percentile cluster bootstrap. ``values``, ``weights``: [T].

    Raises ValueError on an empty array or a value that is not finite (a missing metric must not become a number)."""
    weights = _checked(values, weights)
    draws = _rng().integers(0, len(values), size=(RESAMPLES, len(values)))
    sampled = (values[draws] * weights[draws]).sum(1) / weights[draws].sum(1)
    low, high = np.quantile(sampled, [0.025, 0.975])
    value = float((values * weights).sum() / weights.sum())
    return Estimate(value=value, low=float(low), high=float(high), n=len(values))


def paired_difference(new: Floats, base: Floats, weights: Floats | None = None) -> tuple[Estimate, float]:
    """Mean of ``new - base`` task by task, and the two-sided p-value of the sign-flip permutation test. All [T]."""
    if new.shape != base.shape:
        raise ValueError(f"paired arrays differ in shape: {new.shape} and {base.shape}")
    difference = new - base
    weights = _checked(difference, weights)
    estimate = weighted_mean(difference, weights)
    signs = _rng().choice([-1.0, 1.0], size=(RESAMPLES, len(difference)))
    flipped = np.abs((signs * difference * weights).sum(1) / weights.sum())
    # The observed arrangement is one of the permutations: (hits + 1) / (draws + 1) never claims p = 0.
    hits = int((flipped >= abs(estimate.value) - 1e-12).sum())
    return estimate, (hits + 1) / (RESAMPLES + 1)


def median(values: Floats) -> Estimate:
    """Median with a percentile bootstrap over independent units. ``values``: [N]."""
    _checked(values, None)
    draws = _rng().integers(0, len(values), size=(2_000, len(values)))
    low, high = np.quantile(np.median(values[draws], axis=1), [0.025, 0.975])
    return Estimate(value=float(np.median(values)), low=float(low), high=float(high), n=len(values))


def median_ratio(numerator: Floats, denominator: Floats) -> Estimate:
    """Ratio of the medians of two independent samples, both resampled; ``n`` is the smaller sample's size."""
    _checked(numerator, None)
    _checked(denominator, None)
    rng = _rng()
    above = np.median(numerator[rng.integers(0, len(numerator), size=(2_000, len(numerator)))], axis=1)
    below = np.median(denominator[rng.integers(0, len(denominator), size=(2_000, len(denominator)))], axis=1)
    low, high = np.quantile(above / below, [0.025, 0.975])
    value = float(np.median(numerator) / np.median(denominator))
    return Estimate(value=value, low=float(low), high=float(high), n=min(len(numerator), len(denominator)))


def wilson(hits: int, n: int) -> Estimate:
    """A proportion of independent trials with Wilson's 95 % interval. Raises ValueError when n < 1."""
    if n < 1 or not 0 <= hits <= n:
        raise ValueError(f"a proportion needs 0 <= hits <= n and n >= 1; got {hits} of {n}")
    z, p = 1.959964, hits / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * ((p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5) / (1 + z * z / n)
    return Estimate(value=p, low=max(0.0, centre - half), high=min(1.0, centre + half), n=n)


def _rng() -> np.random.Generator:
    return np.random.default_rng(20261129)


def _checked(values: Floats, weights: Floats | None) -> Floats:
    if len(values) == 0:
        raise ValueError("no values to estimate from")
    if not np.isfinite(values).all():
        raise ValueError("a value is not finite; a missing measurement can't be averaged")
    return np.ones(len(values)) if weights is None else weights

"""The record that every estimate is, and the checks that fail closed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

Z95 = 1.959964
SEED = 20261129


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A value with its 95 % interval; ``n`` counts the units that were resampled."""

    value: float
    low: float
    high: float
    n: int


def rng() -> np.random.Generator:
    """The same stream at every call: equal input gives equal output."""
    return np.random.default_rng(SEED)


def finite(values: Floats) -> None:
    """Raises ValueError on an empty array, or a value that is not finite."""
    if len(values) == 0:
        raise ValueError("no values to estimate from")
    if not np.isfinite(values).all():
        raise ValueError("a value is not finite; a missing measurement can't be averaged")


def checked_weights(values: Floats, weights: Floats | None) -> Floats:
    """The weights, [T]; ones when there are none. Raises ValueError as :func:`finite` does, and on a wrong weight."""
    finite(values)
    if weights is None:
        return np.ones(len(values))
    if weights.shape != values.shape or not np.isfinite(weights).all() or (weights < 0).any() or not weights.sum() > 0:
        raise ValueError("weights must be finite, not negative, not all zero, and one for each value")
    return weights


def checked_counts(passed: Floats, attempts: Floats, *, at_least: int = 1) -> None:
    """Raises ValueError unless ``0 <= passed <= attempts`` and ``attempts >= at_least``, task by task. All [T]."""
    finite(passed)
    finite(attempts)
    if passed.shape != attempts.shape:
        raise ValueError(f"passed and attempts differ in shape: {passed.shape} and {attempts.shape}")
    if (passed < 0).any() or (passed > attempts).any():
        raise ValueError("a task passed more often than it was attempted")
    if (attempts < at_least).any():
        raise ValueError(f"every task needs at least {at_least} attempts, the least is {attempts.min():g}")


def mean_error(values: Floats, weights: Floats) -> float:
    """Standard error of the weighted mean of independent values (linearised, with n/(n-1)); inf for a single one."""
    n = len(values)
    if n < 2:
        return float("inf")
    mean = (weights * values).sum() / weights.sum()
    squares = (weights**2 * (values - mean) ** 2).sum()
    return float(np.sqrt(squares * n / (n - 1)) / weights.sum())

"""Means of what was measured one after the other, where neighbours are not independent: batch means.

Batches long enough are nearly independent however their members hang together; a bootstrap of single values is not
told of it (too wide for steps that alternate, too narrow for steps that drift).
"""

from __future__ import annotations

import math

import numpy as np
from scipy.stats import t as student

from harness.stats.core import Estimate, Floats, finite

BATCH = 4  # an even number, or long and short ones in turn would not cancel
FEWEST_IN_A_SERIES = 2 * BATCH
_LEVEL = 0.975


def mean(values: Floats) -> Estimate:
    """Mean of independent units with Student's t interval. ``values``: [N]. Raises ValueError with fewer than two."""
    finite(values)
    n = len(values)
    if n < 2:
        raise ValueError("one unit has no interval; at least two are needed")
    value = float(values.mean())
    half = float(student.ppf(_LEVEL, n - 1) * values.std(ddof=1)) / math.sqrt(n)
    return Estimate(value=value, low=value - half, high=value + half, n=n)


def series_ratio(numerator: Floats, denominator: Floats) -> Estimate:
    """Ratio of the means of two independent series of positive values, [N] and [M]; ``n``: the shorter's length.

    Batches of four (at least two); the logarithm of the ratio by the delta method with Welch's degrees of freedom.
    Raises ValueError on a series of fewer than two batches' worth of values, or a value that is not above zero."""
    parts = [_batches(series) for series in (numerator, denominator)]
    centres = [float(series.mean()) for series in (numerator, denominator)]
    variances = [float(p.var(ddof=1)) / len(p) / c**2 for p, c in zip(parts, centres, strict=True)]
    total, ratio = sum(variances), centres[0] / centres[1]
    n = min(len(numerator), len(denominator))
    if total == 0:
        return Estimate(value=ratio, low=ratio, high=ratio, n=n)
    freedom = total**2 / sum(v**2 / (len(p) - 1) for v, p in zip(variances, parts, strict=True))
    factor = math.exp(float(student.ppf(_LEVEL, freedom)) * math.sqrt(total))
    return Estimate(value=ratio, low=ratio / factor, high=ratio * factor, n=n)


def batches_told(*series: Floats) -> str:
    """What the interval of :func:`series_ratio` rests on, for a reader."""
    found = ", ".join(str(len(one) // BATCH) for one in series)
    return (
        f"means of {BATCH} steps in a row or a little more, as neighbours are not independent: {found} such means, "
        "Student's t on the logarithm"
    )


def _batches(series: Floats) -> Floats:
    finite(series)
    if len(series) < FEWEST_IN_A_SERIES:
        raise ValueError(f"{len(series)} values in a row are too few: two batches of {BATCH} are needed")
    if (series <= 0).any():
        raise ValueError("a duration is not above zero")
    return np.array([part.mean() for part in np.array_split(series, len(series) // BATCH)])

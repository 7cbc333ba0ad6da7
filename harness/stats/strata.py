"""The estimate from a stratified subset of a benchmark.

Standard survey formulas (Cochran, Sampling Techniques, chapters 5 and 10): tasks are the primary units, drawn without
replacement within strata; attempts are the secondary ones, of which there is no end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.stats.core import Floats, finite


@dataclass(frozen=True, slots=True, kw_only=True)
class StratifiedEstimate:
    """``error`` is for the whole benchmark, of which the strata's ``sizes`` are known (with finite-population
    correction), or for such tasks where they are not. ``error_these_tasks``: only the attempts are random; None where a
    task has a single attempt and no variance can be told."""

    value: float
    error: float
    error_these_tasks: float | None
    n: int


def stratified(
    values: Floats,
    strata: Sequence[str],
    *,
    shares: Mapping[str, float],
    sizes: Mapping[str, int] | None = None,
    attempt_variances: Floats | None = None,
) -> StratifiedEstimate:
    """sum_h W_h * mean_h, with W_h = ``shares`` (scaled to sum 1). ``values``, ``attempt_variances``: [T].

    ``sizes``: tasks in each stratum of the whole benchmark; None: endless, no correction. ``attempt_variances``:
    variance of each value from its attempts alone, p(1-p)/(m-1); None: the values are exact for their tasks. Raises
    ValueError on a stratum with fewer than two tasks, without a share, or smaller than its sample."""
    finite(values)
    labels = np.array(strata)
    names = sorted(set(strata))
    total = sum(shares.get(name, np.nan) for name in names)
    if len(labels) != len(values) or not np.isfinite(total) or set(shares) != set(names):
        raise ValueError("every value needs a stratum, every stratum a share, and every share a stratum")
    value = variance = within = 0.0
    for name in names:
        inside = labels == name
        n, share = int(inside.sum()), shares[name] / total
        size = None if sizes is None else sizes[name]
        if n < 2 or (size is not None and size < n):
            raise ValueError(
                f"stratum {name!r} has {n} tasks of {size or 'many'}: at least two are needed, at most all"
            )
        fraction = 0.0 if size is None else n / size
        from_attempts = 0.0 if attempt_variances is None else float(attempt_variances[inside].mean())
        value += share * float(values[inside].mean())
        # The tasks' spread holds their attempts' share already; what the correction takes off is given back for them.
        spread = float(values[inside].var(ddof=1))
        variance += share**2 / n * ((1 - fraction) * spread + fraction * from_attempts)
        within += share**2 / n * from_attempts
    these = None if attempt_variances is None else float(np.sqrt(within))
    return StratifiedEstimate(value=value, error=float(np.sqrt(variance)), error_these_tasks=these, n=len(values))

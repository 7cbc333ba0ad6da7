"""What a measurement can find: planned standard errors and the smallest difference that is surely seen."""

from __future__ import annotations

import math

from scipy.special import ndtri


def minimal_detectable_effect(error: float, *, alpha: float = 0.05, power: float = 0.8) -> float:
    """The smallest drop that a one-sided test at ``alpha`` finds with probability ``power`` between two scores that
    each have the standard error ``error`` (independent attempts): (z_(1-alpha) + z_power) * sqrt(2) * error."""
    if not error >= 0:
        raise ValueError(f"a standard error is not negative, given {error}")
    return float((ndtri(1 - alpha) + ndtri(power)) * math.sqrt(2) * error)


def design_errors(rate: float, correlation: float, tasks: int, attempts: int) -> tuple[float, float]:
    """(for such tasks, for these tasks): standard errors of pass@1 to expect under the beta-binomial model.

    ``correlation``: of two attempts at one task. p(1-p)/T * (rho + (1-rho)/m), and without rho for these tasks."""
    single = rate * (1 - rate) / tasks
    within = single * (1 - correlation) / attempts
    return math.sqrt(single * correlation + within), math.sqrt(within)

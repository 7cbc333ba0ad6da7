"""PURE: how much evidence each look may ask for, so that looking several times keeps the error rate.

Invariant: under the null hypothesis the chance that *any* look of a one-sided test crosses its boundary is ``alpha``.

Group-sequential alpha spending (Lan and DeMets 1983) with the Pocock-like function ``alpha * ln(1 + (e - 1) t)`` of the
information fraction ``t``: early looks get a real chance to end the test, which is what saves machine time. The joint
distribution of the looks is integrated numerically (Armitage, McPherson and Rowe 1969).
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri

from harness.stats import Floats

_POINTS = 801
_REACH = 8.0  # standard deviations of the sum that the grid covers


def spent(alpha: float, fraction: float) -> float:
    """The part of ``alpha`` that may be used up by the information fraction ``fraction`` (0 to 1)."""
    return alpha * math.log(1 + (math.e - 1) * fraction)


@lru_cache(maxsize=64)
def levels(alpha: float, fractions: tuple[float, ...]) -> tuple[float, ...]:
    """The one-sided p-value that each look must reach. ``fractions``: information at each look, rising to at most 1.

    Given as p-values, not as z, so that they also serve statistics with few degrees of freedom (the significance-level
    approach of Jennison and Turnbull, Group Sequential Methods, 4.4). Raises ValueError unless the fractions rise."""
    if not fractions or fractions[0] <= 0 or any(b <= a for a, b in pairwise(fractions)):
        raise ValueError(f"information fractions must rise from above zero, given {fractions}")
    if fractions[-1] > 1 + 1e-12:
        raise ValueError(f"information fractions end at most at 1, given {fractions}")
    bound = float(ndtri(1 - spent(alpha, fractions[0])))
    found = [bound]
    grid, density = _first(fractions[0], bound)
    for before, now in pairwise(fractions):
        step = math.sqrt(now - before)
        due = spent(alpha, now) - spent(alpha, before)
        bound = _bound(grid, density, now, step, due)
        found.append(bound)
        grid, density = _next(grid, density, now, step, bound)
    return tuple(float(ndtr(-b)) for b in found)


def _first(fraction: float, bound: float) -> tuple[Floats, Floats]:
    """(points, probability mass) of the sum at the first look, where it has not crossed."""
    root = math.sqrt(fraction)
    grid = np.linspace(-_REACH * root, bound * root, _POINTS)
    return grid, _normal(grid / root) / root * _trapezoid(grid)


def _next(grid: Floats, mass: Floats, fraction: float, step: float, bound: float) -> tuple[Floats, Floats]:
    root = math.sqrt(fraction)
    onward = np.linspace(-_REACH * root, bound * root, _POINTS)
    density = _normal((onward[:, None] - grid[None, :]) / step) / step @ mass
    return onward, density * _trapezoid(onward)


def _bound(grid: Floats, mass: Floats, fraction: float, step: float, due: float) -> float:
    """The boundary in z at which this look crosses, for the first time, with probability ``due``."""
    root = math.sqrt(fraction)

    def excess(bound: float) -> float:
        return float(ndtr((grid - bound * root) / step) @ mass) - due

    return float(brentq(excess, -_REACH, _REACH, xtol=1e-9))


def _normal(x: Floats) -> Floats:
    density: Floats = np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return density


def _trapezoid(grid: Floats) -> Floats:
    weights = np.full(len(grid), grid[1] - grid[0])
    weights[[0, -1]] /= 2
    return weights

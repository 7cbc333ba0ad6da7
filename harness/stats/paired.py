"""Differences paired by task, and the sign-flip permutation test."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from scipy.optimize import brentq

from harness.stats.bootstrap import weighted_mean
from harness.stats.core import Z95, Estimate, Floats, checked_weights, rng

FEW_DIFFER = 10  # with fewer tasks that differ at all, resampling says too little: it never sees those it did not draw
_LEVEL = 0.05
_LARGEST = 1.0  # by which pass rates can differ

EXACT_UP_TO = 16  # differences that are not zero; 2^16 arrangements are looked at one by one
_DRAWS = 10_000
_ROUNDING = 1e-12


def paired_difference(new: Floats, base: Floats, weights: Floats | None = None) -> tuple[Estimate, float]:
    """Mean of ``new - base`` of pass rates task by task, and the two-sided p-value of the sign-flip permutation test.
    All [T].

    The interval is the BCa cluster bootstrap over tasks; with fewer than ten tasks that differ it is Tango's score
    interval, stretched to zero where the test does not tell the difference from zero."""
    if new.shape != base.shape:
        raise ValueError(f"paired arrays differ in shape: {new.shape} and {base.shape}")
    difference = new - base
    weights = checked_weights(difference, weights)
    p = sign_flip(difference, weights)
    if (difference * weights != 0).sum() >= FEW_DIFFER:
        return weighted_mean(difference, weights), p
    estimate = _score_interval(difference * weights * len(weights) / weights.sum())
    if p >= _LEVEL:
        estimate = replace(estimate, low=min(estimate.low, 0.0), high=max(estimate.high, 0.0))
    return estimate, p


def _score_interval(difference: Floats) -> Estimate:
    """Mean of few differences among many zeros: Tango's score interval for paired proportions (1998).

    Differences of several sizes count as parts of the largest (of 1 when there is none), which overstates how much they
    vary, never understates it."""
    n = len(difference)
    unit = float(np.abs(difference).max()) or _LARGEST
    gained = float(difference[difference > 0].sum()) / unit
    lost = -float(difference[difference < 0].sum()) / unit
    value = (gained - lost) / n

    def score(delta: float) -> float:
        linear = -gained - lost + (2 * n - gained + lost) * delta
        root = math.sqrt(max(0.0, linear**2 + 8 * n * lost * delta * (1 - delta)))
        share_lost = max(0.0, (root - linear) / (4 * n))
        variance = n * (2 * share_lost + delta * (1 - delta))
        return (gained - lost - n * delta) / math.sqrt(variance) if variance > 0 else 0.0

    edge = 1.0 - 1e-9
    low = brentq(lambda d: score(d) - Z95, -edge, value) if score(-edge) > Z95 else -1.0
    high = brentq(lambda d: score(d) + Z95, value, edge) if score(edge) < -Z95 else 1.0
    return Estimate(value=unit * value, low=unit * low, high=unit * high, n=n)


def sign_flip(difference: Floats, weights: Floats | None = None) -> float:
    """Two-sided p-value: how often a mean this far from zero comes up when each sign is a coin's toss. [T].

    Exact for up to 16 differences that are not zero, else from 10,000 random arrangements. There the observed one
    counts as one of them, (hits + 1) / (draws + 1), which never claims p = 0."""
    weights = checked_weights(difference, weights)
    parts = (difference * weights)[difference * weights != 0]
    observed = abs(parts.sum()) - _ROUNDING * max(1.0, np.abs(parts).sum())
    if len(parts) <= EXACT_UP_TO:
        arrangements = np.arange(2 ** len(parts))[:, None] >> np.arange(len(parts)) & 1
        return float((np.abs((2 * arrangements - 1) @ parts) >= observed).mean())
    signs = rng().integers(0, 2, size=(_DRAWS, len(parts)), dtype=np.int8) * 2 - 1
    hits = int((np.abs(signs @ parts) >= observed).sum())
    return (hits + 1) / (_DRAWS + 1)

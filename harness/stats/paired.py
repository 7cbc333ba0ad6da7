"""Differences paired by task, and the sign-flip permutation test."""

from __future__ import annotations

import numpy as np

from harness.stats.bootstrap import weighted_mean
from harness.stats.core import Estimate, Floats, checked_weights, rng

EXACT_UP_TO = 16  # differences that are not zero; 2^16 arrangements are looked at one by one
_DRAWS = 10_000
_ROUNDING = 1e-12


def paired_difference(new: Floats, base: Floats, weights: Floats | None = None) -> tuple[Estimate, float]:
    """Mean of ``new - base`` task by task, and the two-sided p-value of the sign-flip permutation test. All [T]."""
    if new.shape != base.shape:
        raise ValueError(f"paired arrays differ in shape: {new.shape} and {base.shape}")
    return weighted_mean(new - base, weights), sign_flip(new - base, weights)


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

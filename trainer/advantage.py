"""PURE: group-relative advantages (GRPO).

Invariant: only rewards of graded attempts come in; what comes out is finite for any finite rewards, sums to zero, and
is None where the group says nothing (its rewards are all alike).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

MIN_STD = 1e-6
"""Below this standard deviation rewards count as equal: dividing by less would turn rounding into signal."""


def group_advantages(rewards: Sequence[float]) -> list[float] | None:
    """``(reward - mean) / std`` over a group's graded attempts; None when they have no variance.

    ``std`` is the population's (dividing by n): it exists for two attempts and is never larger than the spread.
    Raises ``ValueError`` for a reward that is not finite."""
    if not all(math.isfinite(r) for r in rewards):
        raise ValueError(f"rewards must be finite, given {list(rewards)}")
    if len(rewards) < 2:
        return None
    scale = max(abs(r) for r in rewards)
    if scale == 0.0:
        return None
    scaled = [r / scale for r in rewards]  # so that no square overflows
    mean = math.fsum(scaled) / len(scaled)
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in scaled) / len(scaled))
    if std * scale < MIN_STD or std < MIN_STD:
        return None
    return [(r - mean) / std for r in scaled]

"""PURE: from what was counted and timed to one reading for each metric.

A reading is on the scale of *harm*: positive is worse, zero is no change. Whatever is missing, not finite or not
comparable becomes :class:`Missing`, which fails the gate: it never becomes a number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.gate.design import Metric
from harness.stats.core import Floats, mean_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """``harm``, its standard ``error`` with ``df`` degrees of freedom, and the two levels for people to read."""

    harm: float
    error: float
    df: float
    base: float
    new: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """No reading, and why."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Graded and passed attempts of each task, and how many attempts ended in an infrastructure failure (Rule 3)."""

    graded: Mapping[str, int]
    passed: Mapping[str, int]
    failures: int


def pooled(counts: Iterable[Counts]) -> Counts:
    """Several runs as one."""
    graded: Counter[str] = Counter()
    passed: Counter[str] = Counter()
    failures = 0
    for one in counts:
        graded.update(one.graded)
        passed.update(one.passed)
        failures += one.failures
    return Counts(graded=graded, passed=passed, failures=failures)


def rate(counts: Counts, weights: Mapping[str, float]) -> float:
    """pass@1: the mean over each task's attempts, then the weighted mean over the tasks of ``weights``."""
    shares = [counts.passed[task] / counts.graded[task] for task in weights]
    return float(np.average(shares, weights=list(weights.values())))


def pass_reading(base: Counts, new: Counts, weights: Mapping[str, float], *, max_failures: float) -> Reading | Missing:
    """The loss of pass@1, paired by task over all tasks of ``weights``; failed attempts are in neither rate.

    The error is for these tasks, which are the same in every run: only the attempts are random."""
    attempts = sum(new.graded.values()) + new.failures
    if attempts == 0 or new.failures > max_failures * attempts:
        return Missing(reason=f"{new.failures} of {attempts} attempts ended in an infrastructure failure")
    ungraded = [task for task in weights if not new.graded.get(task) or not base.graded.get(task)]
    if ungraded:
        return Missing(reason=f"{len(ungraded)} tasks have no graded attempt, {ungraded[0]} first")
    before = np.array([base.passed[task] / base.graded[task] for task in weights])
    after = np.array([new.passed[task] / new.graded[task] for task in weights])
    by_task = np.array(list(weights.values()))
    error, df = _error(base, new, weights)
    return Reading(
        harm=float(np.average(before - after, weights=by_task)),
        error=error,
        df=df,
        base=float(np.average(before, weights=by_task)),
        new=float(np.average(after, weights=by_task)),
    )


def _variances(counts: Counts, weights: Mapping[str, float]) -> tuple[Floats, Floats]:
    """(variance that each task's attempts put into the weighted rate, its degrees of freedom), [T] each.

    nan when no task has two attempts. A task with a single one gets the mean variance of the others."""
    graded = np.array([counts.graded[task] for task in weights], dtype=np.float64)
    shares = np.array([counts.passed[task] for task in weights]) / graded
    several = graded > 1
    if not several.any():
        return np.full(len(graded), math.nan), np.ones(len(graded))
    single = np.zeros(len(graded))  # variance of one attempt, p(1-p) without bias
    single[several] = (shares * (1 - shares))[several] * graded[several] / (graded[several] - 1)
    single[~several] = single[several].mean()
    by_task = np.array(list(weights.values()))
    return (by_task / by_task.sum()) ** 2 * single / graded, np.maximum(1.0, graded - 1)


def _error(base: Counts, new: Counts, weights: Mapping[str, float]) -> tuple[float, float]:
    """(standard error, degrees of freedom) of the difference of the weighted rates from the attempts alone.

    Satterthwaite's: few where the variance rests on few tasks, because most are always or never solved."""
    parts = [_variances(counts, weights) for counts in (base, new)]
    variance = sum(float(v.sum()) for v, _ in parts)
    spread = sum(float((v**2 / df).sum()) for v, df in parts)
    return math.sqrt(variance), variance**2 / spread if spread > 0 else float(len(weights))


Block = Mapping[str, float]  # metric name -> figure of one block


def ratio_reading(metric: Metric, pairs: Sequence[tuple[Block, Block]]) -> Reading | Missing:
    """The mean log ratio over neighbouring blocks (base, candidate) of A B B A cycles.

    Each cycle gives a pair in either order, so that a machine that steadily slows down costs both sides the same.
    Blocks are the independent units: steps within one share its start, its caches and its neighbours on the machine."""
    figures = [(base.get(metric.name, math.nan), new.get(metric.name, math.nan)) for base, new in pairs]
    if len(figures) < 2:
        return Missing(reason=f"{len(figures)} pairs of blocks; two are needed to tell the noise")
    if not all(math.isfinite(value) and value > 0 for pair in figures for value in pair):
        return Missing(reason="a block has no such figure, or one that is not positive and finite")
    base, new = np.array(figures).T
    logs = np.log(new / base) * (-1 if metric.higher_is_better else 1)
    return Reading(
        harm=float(logs.mean()),
        error=mean_error(logs, np.ones(len(logs))),
        df=len(logs) - 1,
        base=float(np.exp(np.log(base).mean())),
        new=float(np.exp(np.log(new).mean())),
    )


def attempt_fractions(attempts: Sequence[int], base_attempts: float) -> tuple[float, ...]:
    """Share of the final information on pass@1 at each look: the baseline's own noise never shrinks."""
    information = [1 / (1 / m + 1 / base_attempts) for m in attempts]
    return tuple(i / information[-1] for i in information)


def cycle_fractions(cycles: Sequence[int]) -> tuple[float, ...]:
    """Share of the final information on a ratio at each look."""
    return tuple(c / cycles[-1] for c in cycles)

"""PURE: pass, regression or inconclusive, from the readings so far.

Invariants, whatever the noise and however often is looked:

* a candidate whose every metric is within its margin is called a regression with probability at most ``alpha``
  (weighted Holm over the metrics, alpha spending over the looks);
* a candidate with any metric beyond its margin passes with probability at most ``alpha`` (every metric must pass its
  own non-inferiority test, so no correction is needed; alpha spending over the looks);
* a reading that is missing or not finite never passes: it is a regression.

Once a metric has passed it is settled: later readings of it are not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from scipy.special import stdtr, stdtrit

from harness.gate.boundaries import levels
from harness.gate.evidence import Missing, Reading


class Answer(StrEnum):
    PASS = "pass"
    REGRESSION = "regression"
    INCONCLUSIVE = "inconclusive"


EXIT_CODE = {Answer.PASS: 0, Answer.REGRESSION: 1, Answer.INCONCLUSIVE: 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """One metric's plan: the harm that is still fine, the information fraction at each look, and the weight of its
    claim on alpha among the metrics."""

    margin: float
    fractions: tuple[float, ...]
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What is known of one metric. ``low`` is the bound that a regression must hold above the margin, ``high`` the one
    that a pass must hold below it, both at this look's level. ``look`` counts from 1; 0: nothing was read yet."""

    answer: Answer
    look: int
    reading: Reading | None
    low: float
    high: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    answer: Answer
    findings: Mapping[str, Finding]


Readings = Mapping[str, Sequence[Reading | Missing]]


def judge(tests: Mapping[str, Criterion], readings: Readings, *, alpha: float) -> Verdict:
    """The answer after the readings so far, one per look and metric. Metrics without any are open."""
    passed_at = {name: _first_pass(test, readings.get(name, ()), alpha) for name, test in tests.items()}
    counted = {name: _until(readings.get(name, ()), passed_at[name]) for name in tests}
    missing = {name: reason for name in tests if (reason := _missing(counted[name]))}
    seen = {name: [r for r in counted[name] if isinstance(r, Reading)] for name in tests if name not in missing}
    worse: dict[str, int] = {}
    levels_used: dict[str, float] = {}
    # Holm (1979, with weights): each rejection leaves all of alpha to fewer metrics.
    while True:
        rest = sum(test.weight for name, test in tests.items() if name not in worse)
        shares = {name: alpha * tests[name].weight / rest for name in seen if name not in worse}
        found = {n: k for n, share in shares.items() if (k := _first_worse(tests[n], seen[n], share)) is not None}
        levels_used |= shares
        worse |= found
        if not found:
            break
    findings = {}
    for name, test in tests.items():
        if name in missing:
            findings[name] = _closed(len(counted[name]), missing[name])
        else:
            findings[name] = _finding(test, seen[name], passed_at[name], worse.get(name), alpha, levels_used[name])
    answers = {finding.answer for finding in findings.values()}
    if Answer.REGRESSION in answers:
        return Verdict(answer=Answer.REGRESSION, findings=findings)
    return Verdict(answer=Answer.PASS if answers == {Answer.PASS} else Answer.INCONCLUSIVE, findings=findings)


def p_worse(test: Criterion, reading: Reading) -> float:
    """One-sided p-value against "the harm is at most the margin"."""
    return float(stdtr(reading.df, -_t(test, reading)))


def p_fine(test: Criterion, reading: Reading) -> float:
    """One-sided p-value against "the harm is at least the margin"."""
    return float(stdtr(reading.df, _t(test, reading)))


def _t(test: Criterion, reading: Reading) -> float:
    beyond = reading.harm - test.margin
    if reading.error == 0:
        return math.copysign(math.inf, beyond) if beyond else 0.0
    return beyond / reading.error


def _missing(readings: Sequence[Reading | Missing]) -> str:
    for reading in readings:
        if isinstance(reading, Missing):
            return reading.reason
        if not (math.isfinite(reading.harm) and math.isfinite(reading.error) and reading.error >= 0 and reading.df > 0):
            return "the figure or its error is not finite"
    return ""


def _first_pass(test: Criterion, readings: Sequence[Reading | Missing], alpha: float) -> int | None:
    """The look (from 0) at which the metric was shown to be fine."""
    bars = levels(alpha, test.fractions)
    for look, (reading, bar) in enumerate(zip(readings, bars, strict=False)):
        if isinstance(reading, Reading) and p_fine(test, reading) <= bar:
            return look
    return None


def _first_worse(test: Criterion, readings: Sequence[Reading], alpha: float) -> int | None:
    bars = levels(alpha, test.fractions)
    for look, (reading, bar) in enumerate(zip(readings, bars, strict=False)):
        if p_worse(test, reading) <= bar:
            return look
    return None


def _until(readings: Sequence[Reading | Missing], look: int | None) -> Sequence[Reading | Missing]:
    """The readings that count: those up to the look at which the metric passed."""
    return readings if look is None else readings[: look + 1]


def _closed(looks: int, reason: str) -> Finding:
    return Finding(
        answer=Answer.REGRESSION,
        look=looks,
        reading=None,
        low=math.nan,
        high=math.nan,
        reason=f"not measured: {reason}",
    )


def _finding(
    test: Criterion, readings: Sequence[Reading], passed: int | None, worse: int | None, alpha: float, level: float
) -> Finding:
    if not readings:
        return Finding(
            answer=Answer.INCONCLUSIVE, look=0, reading=None, low=math.nan, high=math.nan, reason="not measured yet"
        )
    # A later level of Holm can only lower the bar, so a crossing may lie before the newest look.
    look = worse if worse is not None else len(readings) - 1
    reading = readings[look]
    answer = Answer.INCONCLUSIVE
    if worse is not None:
        answer = Answer.REGRESSION
    elif passed is not None:
        answer = Answer.PASS
    return Finding(
        answer=answer,
        look=look + 1,
        reading=reading,
        low=reading.harm - float(stdtrit(reading.df, 1 - levels(level, test.fractions)[look])) * reading.error,
        high=reading.harm + float(stdtrit(reading.df, 1 - levels(alpha, test.fractions)[look])) * reading.error,
        reason="",
    )

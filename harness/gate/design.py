"""What is gated, how much worse is still fine, and how much is measured before the gate gives up.

The whole design is fixed before anything is measured: a margin, a look or a level that is chosen after seeing the data
has no error rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

ALPHA = 0.05


class Source(StrEnum):
    """What a metric is measured by, and so what buying more of it costs."""

    ROLLOUTS = "rollouts"  # attempts of the candidate at the benchmark, against the baseline file
    BLOCKS = "blocks"  # short trainings, base and candidate in turn on this machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """``margin`` is the harm that is still fine: points of pass@1 (as a share), or a ratio to the base (1.10: 10 %
    slower, or 1/1.10 of the throughput). ``weight``: of its claim on alpha; what the gate is for weighs more."""

    name: str
    unit: str
    source: Source
    margin: float
    higher_is_better: bool
    weight: float = 1.0
    is_ratio: bool = True

    @property
    def harm_margin(self) -> float:
        """The margin on the scale that is tested: a difference of shares, or the logarithm of a ratio."""
        return math.log(self.margin) if self.is_ratio else self.margin


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """``attempts``: per task, in all, at each look. ``cycles`` of blocks A B B A (A: base, B: candidate), in all, at
    each look. ``steps`` per block; the first of each is left out, in it farm and engines start. ``max_failures``: the
    largest share of attempts that may end in an infrastructure failure before pass@1 counts as not measured."""

    metrics: tuple[Metric, ...]
    attempts: tuple[int, ...] = (4, 8, 16)
    cycles: tuple[int, ...] = (2, 4, 8)
    steps: int = 7
    alpha: float = ALPHA
    max_failures: float = 0.05


PASS_AT_1 = Metric(
    name="pass_at_1", unit="", source=Source.ROLLOUTS, margin=0.05, higher_is_better=True, weight=4.0, is_ratio=False
)
STEP_MEDIAN = Metric(
    name="step_median_s", unit="s", source=Source.BLOCKS, margin=1.10, higher_is_better=False, weight=4.0
)
STEP_P95 = Metric(name="step_p95_s", unit="s", source=Source.BLOCKS, margin=1.25, higher_is_better=False)
THROUGHPUT = Metric(
    name="trajectories_per_hour", unit="1/h", source=Source.BLOCKS, margin=1.10, higher_is_better=True, weight=4.0
)
TOKENS = Metric(name="output_tokens_per_s", unit="1/s", source=Source.BLOCKS, margin=1.10, higher_is_better=True)
SANDBOX = Metric(name="sandbox_start_s", unit="s", source=Source.BLOCKS, margin=1.25, higher_is_better=False)

BUDGET_MINUTES = 75.0
"""Of machine time. It has to leave room for the last look where the block times are those of :mod:`simulate`."""

DESIGN = Design(metrics=(PASS_AT_1, STEP_MEDIAN, STEP_P95, THROUGHPUT, TOKENS, SANDBOX))

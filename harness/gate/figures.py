"""What a run folder says about the gated metrics, from its logs alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from farm.types import Failed, Graded, Trajectory
from harness.gate.design import SANDBOX, STEP_MEDIAN, STEP_P95, THROUGHPUT, TOKENS
from harness.gate.evidence import Block, Counts


def counts(trajectories: Iterable[Trajectory]) -> Counts:
    """Graded, passed and failed attempts. A failure is neither (Rule 3)."""
    graded: Counter[str] = Counter()
    passed: Counter[str] = Counter()
    failures = 0
    for trajectory in trajectories:
        outcome = trajectory.outcome
        if isinstance(outcome, Graded):
            graded[trajectory.instance_id] += 1
            passed[trajectory.instance_id] += outcome.evidence.resolved
        elif isinstance(outcome, Failed):
            failures += 1
    return Counts(graded=graded, passed=passed, failures=failures)


def block(steps: Sequence[Mapping[str, Any]], trajectories: Iterable[Trajectory]) -> Block:
    """The figures of one training, from the end of its first step (which fills the pipeline) to the end of its last.

    ``steps``: the trainer's lines. A figure that can't be had is left out, and so fails the gate. Throughput counts
    graded trajectories only: failing fast is not fast."""
    if len(steps) < 2:
        return {}
    ends_s = np.array([line["ended_at_s"] for line in steps])
    start_s, end_s = ends_s[0], ends_s[-1]
    durations_s = np.diff(ends_s)
    figures = {
        STEP_MEDIAN.name: float(np.median(durations_s)),
        STEP_P95.name: float(np.quantile(durations_s, 0.95)),
    }
    landed = [t for t in trajectories if start_s < t.ended_at_s <= end_s]
    graded = [t for t in landed if isinstance(t.outcome, Graded)]
    starts_s = [e.end_at_s - e.start_at_s for t in landed for e in t.timeline if e.name == "sandbox_start"]
    span_s = float(end_s - start_s)
    if graded and span_s > 0:
        figures[THROUGHPUT.name] = 3600 * len(graded) / span_s
        figures[TOKENS.name] = sum(t.output_tokens for t in graded) / span_s
    if starts_s:
        figures[SANDBOX.name] = float(np.median(starts_s))
    return figures

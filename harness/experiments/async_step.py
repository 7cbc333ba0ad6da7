"""Step time and trainer wait: synchronous against asynchronous, from the same policy, tasks and seed.

What there is to wait for: the long tail of a policy that rambles without a cap, and sandboxes that take as long to
start as the reference's. Where the same cores roll out and train, that is all an asynchronous step can gain; on nodes
apart, training overlaps as well.

A step of both consumes as many groups, but the asynchronous one has the next step's groups in flight meanwhile and
drops what has become too stale, which are long trajectories: both stand beside the ratio. Its steps are long and short
in turn, so means over batches of steps are compared, not medians.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from harness import stats
from harness.claims import Measurement
from harness.experiments.runs import landed, most_in_flight, rambling, sandboxes, sources, step_seconds, steps
from harness.lab import Lab


def ratio(lab: Lab) -> Measurement:
    sandbox = lab.profile.fast_sandbox
    sync = rambling(lab, "step-sync", mode="sync", capped=False, sandbox=sandbox)
    free = rambling(lab, "step-async", mode="async", capped=False, sandbox=sandbox)
    slow, fast = step_seconds(steps(sync)), step_seconds(steps(free))
    if min(len(slow), len(fast)) < stats.FEWEST_IN_A_SERIES:
        return Measurement(
            estimate=None, unit="", holds=None, detail={"not_compared": "too few steps to tell how they vary"}
        )
    estimate = stats.series_ratio(slow, fast)
    return Measurement(
        estimate=estimate,
        unit="x (synchronous / asynchronous mean step time)",
        holds=estimate.low > 1.0,
        detail={
            "sync": _told(sync),
            "async": _told(free),
            "policy": "the base policy, from which both runs start; no cap on the length of a trajectory",
            "interval": stats.batches_told(slow, fast),
            "left_out": "the first step of each run, which fills the pipeline",
        },
        sources=sources(sync) + sources(free),
        figures={"step_time": {"sync": slow.tolist(), "async": fast.tolist()}},
    )


def _told(run: Path) -> dict[str, Any]:
    lines, rows = steps(run), landed(run)
    step_s = step_seconds(lines)
    wait_s = np.array([line["wait_s"] for line in lines[1:]])
    consumed = sum(line["episodes"] for line in lines)
    dropped = {one["episode"] for line in lines for one in line["dropped"]}
    turns = {
        "dropped": [len(t.turns) for t in rows if t.episode_id in dropped],
        "others": [len(t.turns) for t in rows if t.episode_id not in dropped],
    }
    return {
        "steps": len(step_s),
        "mean_step_s": round(float(step_s.mean()), 3),
        "median_step_s": round(float(np.median(step_s)), 3),
        "p95_step_s": round(float(np.quantile(step_s, 0.95)), 3),
        "lag_1_correlation_of_steps": _lag_1(step_s),
        "wait_share": round(float(wait_s.sum() / step_s.sum()), 3),
        "sandbox": sandboxes(run),
        "in_flight_max": most_in_flight(rows),
        "consumed_episodes": consumed,
        "trained_episodes": sum(line["trained_episodes"] for line in lines),
        "dropped_episodes": len(dropped),
        "turns_mean": {name: round(float(np.mean(found)), 1) for name, found in turns.items() if found},
        "s_per_consumed_episode_not_dropped": _per_episode(lines[1:], step_s),
    }


def _per_episode(lines: list[dict[str, Any]], step_s: stats.Floats) -> float | None:
    kept = sum(line["episodes"] - len(line["dropped"]) for line in lines)
    return round(float(step_s.sum()) / kept, 3) if kept > 0 else None


def _lag_1(values: stats.Floats) -> float | None:
    """How much a step's time says of the next one's; None where they do not vary."""
    apart = values - values.mean()
    total = float((apart**2).sum())
    return round(float((apart[1:] * apart[:-1]).sum()) / total, 2) if total > 0 else None

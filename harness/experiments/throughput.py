"""Trajectories per hour with a slow and with a fast sandbox back end, as many at once in both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from farm.types import Trajectory
from harness import stats
from harness.claims import Measurement
from harness.experiments.runs import in_flight_at_most, landed, sandboxes, sources
from harness.lab import Lab


def ratio(lab: Lab) -> Measurement:
    profile = lab.profile
    runs: dict[str, Path] = {}
    for name, settings in (("slow", profile.slow_sandbox), ("fast", profile.fast_sandbox)):
        runs[name] = lab.rollout(
            f"throughput-{name}",
            profile.policy,
            tasks=profile.throughput_tasks,
            attempts=profile.throughput_attempts,
            settings=(f"cluster.slots={profile.throughput_slots}", *settings),
        )
    slow, fast = (landed(runs[name]) for name in ("slow", "fast"))
    # Trajectories per hour are those in flight over the mean time of one (Little's law); what is in flight is set, what
    # one takes varies and is resampled.
    taken = stats.mean_ratio(_seconds(slow), _seconds(fast))
    scale = (_per_hour(fast) / _per_hour(slow)) / taken.value
    estimate = stats.Estimate(value=taken.value * scale, low=taken.low * scale, high=taken.high * scale, n=taken.n)
    return Measurement(
        estimate=estimate,
        unit="x (trajectories per hour, fast / slow back end)",
        holds=estimate.low > 1.0,
        detail={
            "slow": _told(runs["slow"], slow),
            "fast": _told(runs["fast"], fast),
            "reading": "start latency alone, and a trajectory takes seconds here. In the reference, whose sandboxes "
            "started in 11.7 s and 1.9 s, it takes minutes: there the gain comes from the CPUs that sandboxes no "
            "longer take from the rest, not from the start",
        },
        sources=sources(runs["slow"]) + sources(runs["fast"]),
        figures={
            "throughput": {
                "kind": "lines",
                "title": "Trajectories landed, slow and fast sandbox back end",
                "x": "s since the first began",
                "y": "trajectories",
                "series": {"slow": _landings(slow), "fast": _landings(fast)},
            }
        },
    )


def _seconds(rows: list[Trajectory]) -> stats.Floats:
    return np.array([t.ended_at_s - t.started_at_s for t in rows])


def _ended(rows: list[Trajectory]) -> list[float]:
    """When each ended, in seconds since the first began."""
    began_s = min(t.started_at_s for t in rows)
    return [round(t.ended_at_s - began_s, 3) for t in rows]


def _landings(rows: list[Trajectory]) -> list[list[float]]:
    return [[0.0, 0.0], *([at_s, float(n)] for n, at_s in enumerate(sorted(_ended(rows)), start=1))]


def _per_hour(rows: list[Trajectory]) -> float:
    return 3600 * len(rows) / max(_ended(rows))


def _told(run: Path, rows: list[Trajectory]) -> dict[str, Any]:
    starts = [e.end_at_s - e.start_at_s for t in rows for e in t.timeline if e.name == "sandbox_start"]
    return {
        "back_end": sandboxes(run),
        "in_flight_at_most": in_flight_at_most(run),
        "trajectories": len(rows),
        "per_hour": round(_per_hour(rows)),
        "in_flight_mean": round(float(_seconds(rows).sum()) / max(_ended(rows)), 1),
        "trajectory_mean_s": round(float(_seconds(rows).mean()), 3),
        "share_of_time_in_starts": round(sum(starts) / float(_seconds(rows).sum()), 3),
    }

"""Trajectories per hour with a slow and with a fast sandbox back end, as many at once in both.

The slow one is Docker where a daemon runs our sandboxes, else the embedded one with the start latency of the reference
(:mod:`harness.docker_here`); the kept logs say which it was.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from farm.types import Trajectory
from harness import stats
from harness.claims import Measurement
from harness.docker_here import compared, docker_problem
from harness.experiments.runs import ended, in_flight_at_most, landed, per_hour, sandboxes, seconds, settings, sources
from harness.lab import Lab

_DELAYED = (
    "start latency alone, and a trajectory takes seconds here. In the reference, whose sandboxes started in 11.7 s and "
    "1.9 s, it takes minutes: there the gain comes from the CPUs that sandboxes no longer take from the rest, not from "
    "the start"
)
_REAL = (
    "two real back ends: a Docker daemon starts and removes containers on CPUs that the rest of the farm needs, as in "
    "the reference's local set-up"
)


def ratio(lab: Lab) -> Measurement:
    profile = lab.profile
    runs: dict[str, Path] = {}
    chosen = compared(lab, docker_problem)
    for name, sandbox in (("slow", chosen.slow), ("fast", chosen.fast)):
        runs[name] = lab.rollout(
            f"throughput-{name}",
            profile.policy,
            tasks=profile.throughput_tasks,
            attempts=profile.throughput_attempts,
            settings=(f"cluster.slots={profile.throughput_slots}", *sandbox),
        )
    slow, fast = (landed(runs[name]) for name in ("slow", "fast"))
    # Trajectories per hour are those in flight over the mean time of one (Little's law); what is in flight is set, what
    # one takes varies and is resampled.
    taken = stats.mean_ratio(seconds(slow), seconds(fast))
    scale = (per_hour(fast) / per_hour(slow)) / taken.value
    estimate = stats.Estimate(value=taken.value * scale, low=taken.low * scale, high=taken.high * scale, n=taken.n)
    return Measurement(
        estimate=estimate,
        unit="x (trajectories per hour, fast / slow back end)",
        holds=estimate.low > 1.0,
        detail={
            "slow": _told(runs["slow"], slow),
            "fast": _told(runs["fast"], fast),
            "interval": "trajectories resampled one by one; attempts at one task, and those that share the machine at "
            "a time, are alike, so it is rather too narrow",
            "reading": _REAL if len({settings(run)["sandbox"]["provider"] for run in runs.values()}) == 2 else _DELAYED,
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


def _landings(rows: list[Trajectory]) -> list[list[float]]:
    return [[0.0, 0.0], *([at_s, float(n)] for n, at_s in enumerate(sorted(ended(rows)), start=1))]


def _told(run: Path, rows: list[Trajectory]) -> dict[str, Any]:
    starts = [e.end_at_s - e.start_at_s for t in rows for e in t.timeline if e.name == "sandbox_start"]
    return {
        "back_end": sandboxes(run),
        "in_flight_at_most": in_flight_at_most(run),
        "trajectories": len(rows),
        "per_hour": round(per_hour(rows)),
        "in_flight_mean": round(float(seconds(rows).sum()) / max(ended(rows)), 1),
        "trajectory_mean_s": round(float(seconds(rows).mean()), 3),
        "share_of_time_in_starts": round(sum(starts) / float(seconds(rows).sum()), 3),
    }

"""What a run folder's logs hold, for the experiments."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

from farm.types import PolicyVersion, Trajectory
from harness import derived
from harness.claims import Measurement
from harness.lab import Lab
from harness.profiles import EMBEDDED
from harness.stats import Floats

_STANDING_STILL = 1e-9  # learning rate


def landed(run: Path) -> list[Trajectory]:
    """Every sealed trajectory of a run, in log order, without token ids and texts (:mod:`harness.derived`)."""
    return derived.trajectories(run)


def sources(run: Path) -> tuple[str, ...]:
    """Digests of the shards behind :func:`landed`."""
    return derived.shard_digests(run)


def settings(run: Path) -> dict[str, Any]:
    """The resolved configuration that the run was made with."""
    found: dict[str, Any] = json.loads((run / "config.json").read_text())
    return found


def sandboxes(run: Path) -> str:
    """The sandbox back end of a run, in words."""
    sandbox = settings(run)["sandbox"]
    added_s = sandbox.get("start_delay_s", 0.0)
    return f"{sandbox['provider']}, {added_s:g} s of start latency added" if added_s else str(sandbox["provider"])


def in_flight_at_most(run: Path) -> int:
    """As many trajectories as the farm let run at the same time."""
    return int(json.loads((run / "farm.json").read_text())["cluster"]["in_flight_limit"])


def most_in_flight(rows: list[Trajectory]) -> int:
    """The most that ran at the same time."""
    changes = [(t.started_at_s, 1) for t in rows] + [(t.ended_at_s, -1) for t in rows]
    return max(itertools.accumulate(change for _, change in sorted(changes)))


def seconds(rows: list[Trajectory]) -> Floats:
    """What each took."""
    return np.array([t.ended_at_s - t.started_at_s for t in rows])


def ended(rows: list[Trajectory]) -> list[float]:
    """When each ended, in seconds since the first began."""
    began_s = min(t.started_at_s for t in rows)
    return [round(t.ended_at_s - began_s, 3) for t in rows]


def per_hour(rows: list[Trajectory]) -> float:
    return 3600 * len(rows) / max(ended(rows))


def embedded_only(lab: Lab, role: str) -> Measurement | None:
    """The answer of an experiment that can only measure the embedded ``role``, where the profile has another back end;
    None where it may go on. What an embedded part did is never told of another one."""
    name = lab.profile.back_ends[role]
    if name == EMBEDDED[role]:
        return None
    return Measurement(
        estimate=None, unit="", holds=None, detail={"not_compared": f"not run: embedded {role} only, here it is {name}"}
    )


def policies(run: Path) -> list[PolicyVersion]:
    return derived.policies(run)


def steps(run: Path) -> list[dict[str, Any]]:
    """The trainer's own line per step."""
    lines = (run / "trainer" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if line]


def step_seconds(lines: list[dict[str, Any]]) -> Floats:
    """Duration of each step, trainer's wait included; without the first, in which farm and engines start."""
    return np.array([line["wait_s"] + line["train_s"] for line in lines[1:]])


def rambling(lab: Lab, name: str, *, mode: str, capped: bool, sandbox: tuple[str, ...] = ()) -> Path:
    """A short training on few groups per step of the base policy, which hardly ever finds an end by itself: the long
    tail of trajectories that a cap is for, and that asynchronous steps do not wait for. It hardly learns, so that steps
    early and late have the same work: at the usual learning rate trajectories are half as long after a dozen steps.
    ``sandbox``: settings of another sandbox back end than the profile's."""
    profile = lab.profile
    settings = (
        f"rollout.groups_per_step={profile.tail_groups}",
        *(profile.capped if capped else profile.uncapped),
        *sandbox,
    )
    return lab.rl(
        mode=mode,
        steps=profile.tail_steps,
        name=name,
        policy=profile.policy,
        settings=settings,
        training=(f"lr={_STANDING_STILL}",),
    )

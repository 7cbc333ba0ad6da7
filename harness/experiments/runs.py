"""What a run folder's logs hold, for the experiments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from farm.policy_log import PolicyLog
from farm.trajectory_log import DirectoryLog
from farm.types import Cursor, PolicyVersion, Trajectory


def landed(run: Path) -> list[Trajectory]:
    """Every sealed trajectory of a run, in log order."""
    return [trajectory for _, trajectory in DirectoryLog(run / "trajectories").read(Cursor())]


def sources(run: Path) -> tuple[str, ...]:
    """Digests of the shards that :func:`landed` reads."""
    return tuple(shard.digest for shard in DirectoryLog(run / "trajectories").shards())


def policies(run: Path) -> list[PolicyVersion]:
    return list(PolicyLog(run / "policies").versions())


def steps(run: Path) -> list[dict[str, Any]]:
    """The trainer's own line per step."""
    lines = (run / "trainer" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if line]

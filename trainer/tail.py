"""The sealed trajectories from a cursor on, for as long as it takes."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from farm.protocols import TrajectoryLog
from farm.types import Cursor, Trajectory

POLL_S = 0.05


def follow(log: TrajectoryLog, cursor: Cursor, stop: threading.Event) -> Iterator[tuple[Cursor, Cursor, Trajectory]]:
    """(position of the row, cursor after it, row), in log order. Waits for new shards; ends once ``stop`` is set.

    Rows are decoded as they are asked for, so nothing is held beyond what the reader of the log holds."""
    while not stop.is_set():
        for after, trajectory in log.read(cursor):
            yield cursor, after, trajectory
            cursor = after
            if stop.is_set():
                return
        stop.wait(POLL_S)


def fetch(log: TrajectoryLog, positions: list[Cursor]) -> dict[Cursor, Trajectory]:
    """The rows at ``positions`` (ascending), each shard read once."""
    wanted = set(positions)
    found: dict[Cursor, Trajectory] = {}
    while wanted:
        at = min(wanted)
        shard = at.shard
        for after, trajectory in log.read(at):
            if at in wanted:
                found[at] = trajectory
                wanted.discard(at)
            at = after
            if at.shard != shard or not any(p.shard == shard for p in wanted):
                break
        missing = [p for p in wanted if p.shard == shard]
        if missing:
            raise LookupError(f"the trajectory log has no row at shard {shard}, row {missing[0].row}")
    return found

"""Where attempts run. What the driver needs is here; Dask is imported only in this package, and not by importing it.

One attempt is one Dask task, and a worker's slots are its threads (resources would pin the whole backlog to workers at
once). Dask never repeats a task here: a lost attempt comes back as an event, because leases and retries belong to the
dispatcher and its ledger, not to the scheduler (Rule 1). Scale-down drains: a surplus worker takes nothing new and is
closed once it is empty (Rule 8).

    dask_cluster.py   the driver's side            on_scheduler.py, on_worker.py   what Dask is given
    crews.py          who starts and ends workers: local processes, a launcher's, or nobody (a joined scheduler)
    launcher.py       the Protocol and table of launchers; ssh.py and others implement it, roster.py (pure) decides
    opening.py        puts a cluster together
    worker.py         a launched worker's process; ticket.py, examine.py, certificates.py: what it gets and checks
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Protocol

from farm.types import Attempt


class EpisodeRunner(Protocol):
    """What runs on a worker, made once per process from ``"module:Class"`` and its options."""

    async def run(self, attempt: Attempt) -> Any:
        """Execute the attempt; returns a small picklable record and never raises for what happened in it."""
        ...

    def distrust(self) -> None:
        """The worker is being taken away, and what runs in its sandboxes may have got the same signal: nothing that
        ends from now on may land. Called from a signal handler, or from any thread."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The attempt came back with its runner's record."""

    episode_id: str
    number: int
    result: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The attempt ended without a record: ``kind`` is "worker_lost", "preempted", "cancelled" or "defect"."""

    episode_id: str
    number: int
    worker: str
    kind: str
    message: str


ClusterEvent = Finished | Lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """``slots`` counts workers that take work; draining ones only finish theirs. ``trouble``: why there are fewer than
    are wanted, when something keeps them away; for people."""

    workers: int
    draining: int
    slots: int
    trouble: str = ""


class Cluster(Protocol):
    """What the driver needs; tests have an in-process one."""

    @property
    def address(self) -> str: ...

    @property
    def events(self) -> asyncio.Queue[ClusterEvent]:
        """One event per submitted attempt, always."""
        ...

    def submit(self, attempt: Attempt) -> None: ...
    async def cancel(self, episode_id: str, number: int) -> None:
        """Ask for the end of an attempt, best effort; its event tells when it has ended."""
        ...

    async def scale(self, workers: int) -> Size:
        """Go towards ``workers`` without killing a running episode; call again until it is reached."""
        ...

    async def close(self) -> None:
        """Stop everything this cluster started; what still runs is cancelled."""
        ...

"""Workers that will be taken away: drained by the scheduler's plan, never closed by it; and what waits in vain."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from distributed.core import Status

from farm.cluster.crews import LaunchedCrew, PlanView
from farm.cluster.launcher import Phase, WorkerState
from farm.cluster.on_scheduler import FarmPlugin
from farm.cluster.roster import RosterRules


class FakeScheduler:
    """What the plan needs of Dask's."""

    def __init__(self, **processing: int) -> None:
        self.workers = {
            f"tls://{name}": SimpleNamespace(
                name=name,
                address=f"tls://{name}",
                status=Status.running,
                nthreads=4,
                processing=dict.fromkeys(range(count)),
            )
            for name, count in processing.items()
        }
        self.stream_comms = {address: SimpleNamespace(send=lambda _: None) for address in self.workers}
        self.handlers: dict[str, Any] = {}

    def handle_worker_status_change(self, status: Status, worker: Any, _: str) -> None:
        worker.status = status


def plugin_of(scheduler: FakeScheduler) -> FarmPlugin:
    plugin = FarmPlugin()
    asyncio.run(plugin.start(scheduler))  # type: ignore[arg-type]
    return plugin


def test_a_worker_that_leaves_is_drained_kept_and_replaced_in_the_count() -> None:
    scheduler = FakeScheduler(a=2, b=0, c=1)
    plugin = plugin_of(scheduler)
    told = plugin.plan(want=3, leaving=["b", "unknown"])
    assert set(told["live"]) == {"a", "c"}
    assert told["draining"] == ["b"]
    assert told["empty_names"] == [], "it is closed by whoever takes it away"
    assert scheduler.workers["tls://b"].status == Status.closing_gracefully
    assert plugin.plan(want=3, leaving=["b"])["draining"] == ["b"], "it is not called back while it leaves"
    told = plugin.plan(want=3)
    assert set(told["live"]) == {"a", "b", "c"}, "the preemption was taken back"
    assert plugin.plan(want=2)["empty_names"] == ["b"], "the idle one goes first"


def test_a_worker_that_is_just_joining_is_neither_live_nor_draining() -> None:
    scheduler = FakeScheduler(a=0)
    scheduler.workers["tls://a"].status = Status.init
    told = plugin_of(scheduler).plan(want=1)
    assert (told["live"], told["draining"]) == ([], [])


def test_what_a_farm_that_was_killed_had_drained_is_called_back() -> None:
    scheduler = FakeScheduler(a=0, b=0, c=1)
    for worker in scheduler.workers.values():
        worker.status = Status.closing_gracefully
    scheduler.workers["tls://b"].status = Status.paused
    plugin = plugin_of(scheduler)
    told = plugin.plan()
    assert (set(told["live"]), told["draining"]) == ({"a", "c"}, ["b"])
    told = plugin.plan(want=1)
    assert (told["live"], told["empty_names"]) == (["c"], ["a"])


def test_a_drained_worker_that_is_told_to_go_is_not_called_back() -> None:
    scheduler = FakeScheduler(a=3, b=2, c=1)
    plugin = plugin_of(scheduler)
    assert set(plugin.plan(want=1)["draining"]) == {"b", "c"}
    scheduler.workers["tls://b"].status = Status.paused  # as a worker says at SIGTERM
    told = plugin.plan(want=3)
    assert (set(told["live"]), told["draining"]) == ({"a", "c"}, ["b"])
    assert scheduler.workers["tls://b"].status == Status.paused


class Waiting:
    """A launcher whose workers stand in a queue."""

    def __init__(self, **states: WorkerState) -> None:
        self.states = states

    async def look(self) -> Mapping[str, WorkerState]:
        return self.states


def crew_of(**states: WorkerState) -> LaunchedCrew:
    async def main() -> LaunchedCrew:
        launcher: Any = Waiting(**states)
        crew = LaunchedCrew(None, launcher, RosterRules(), contextlib.AsyncExitStack())
        await crew.reach(len(states), plan())
        return crew

    return asyncio.run(main())


def plan() -> PlanView:
    return PlanView(live=frozenset(), slots=0, draining=frozenset(), empty_names=(), empty_addresses=())


def test_what_waits_is_told_and_what_waits_in_vain_ends_a_start() -> None:
    crew = crew_of(w=WorkerState(phase=Phase.WAITING, message="job 7 waits in Slurm's queue (Priority)"))
    assert (crew.waits, crew.refusal) == ("job 7 waits in Slurm's queue (Priority)", "")
    crew = crew_of(w=WorkerState(phase=Phase.WAITING, message="job 7 waits (PartitionDown): do this", hopeless=True))
    assert crew.refusal == "job 7 waits (PartitionDown): do this"
    crew = crew_of(w=WorkerState(phase=Phase.RUNNING, leaving=True))
    assert crew.leaving == {"w"}

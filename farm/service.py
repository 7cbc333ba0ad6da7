"""The driver: it executes what the dispatcher decides, and holds nothing that a successor needs.

One :class:`Farm` per run folder (a lock sees to that). What has landed is in the trajectory log, what failed on the way
in ``logs/failures.jsonl``; so a farm that was killed is started again on its folder and goes on. With the trainer it
shares only the two logs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from farm.breaker import Trip
from farm.cluster import Cluster, Finished, Lost, Size
from farm.config import FarmConfig
from farm.dispatch import (
    AttemptFailed,
    AttemptLost,
    Cancel,
    Capacity,
    Command,
    Dispatcher,
    DispatchEvent,
    DispatchPolicy,
    Drain,
    Forget,
    LandDropped,
    Landed,
    LandFailed,
    Plan,
    Published,
    Run,
    Tick,
    Unissued,
)
from farm.elastic import EngineView, FlightRules, FlightState, WorkerRange, WorkerState, next_flights, next_workers
from farm.failure_memory import append_amnesty, append_failure, read_failures
from farm.farm_state import ProcessId, write_status
from farm.policy_log import PolicyLog
from farm.protocols import SandboxProvider
from farm.run_folder import RunFolder
from farm.tally import Tally
from farm.trajectory_log import DirectoryLog
from farm.types import Attempt, Boundary, Dropped, Failed, FailedAttempt, PolicyVersion, Trajectory
from farm.worker import Receipt, Returned, bare_trajectory

_TICK_S = 0.25
_SCALE_S = 0.5
_SEAL_CHECK_S = 0.2
_STATUS_S = 1.0
_SWEEP_S = 60.0
_POLICY_WAIT_S = 5.0
_STOP_S = 30.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """An engine for one attempt; ``step``: the policy that it is verified to serve (Rule 5)."""

    url: str
    step: int


class Engines(Protocol):
    """What the driver needs of the engines; implemented by :class:`farm.fleet.Fleet`."""

    def place(self, key: tuple[str, int], *, group_id: str, tokens: int) -> Placement | None:
        """Reserve ``tokens`` of KV on an engine for the attempt, if possible where its group is; None: no room."""
        ...

    def witness(self, key: tuple[str, int], *, failed: str | None) -> None:
        """How the attempt fared on its engine, told before it is released: ``failed`` is the kind of the failure at the
        engine's boundary that ended it, None when it came through."""
        ...

    def release(self, key: tuple[str, int]) -> None:
        """The attempt has ended. Unknown keys are fine."""
        ...

    def capacity(self, tokens: int) -> int:
        """How many attempts of ``tokens`` the serving engines admit at once, those running included. Raises EngineError
        when none does and none will."""
        ...

    def view(self) -> EngineView | None:
        """All engines together, as last seen; None before the first look."""
        ...

    def want(self, version: PolicyVersion) -> None:
        """Move all engines to ``version`` as soon as possible."""
        ...

    async def supervise(self) -> None:
        """For ever: keep engines alive, verified and on the wanted version."""
        ...

    def status(self) -> list[dict[str, Any]]:
        """One record per engine, for people."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FarmParts:
    """What a farm works with; made by :mod:`farm.start`, replaced by fakes in tests."""

    run: RunFolder
    config: FarmConfig
    plan: Plan
    cluster: Cluster
    log: DirectoryLog
    policies: PolicyLog | None
    fleet: Engines | None  # None: the agent samples nothing
    provider: SandboxProvider


def dispatch_policy(config: FarmConfig, *, consumed: bool) -> DispatchPolicy:
    """``consumed``: a trainer consumes the groups, so the farm keeps its lead within the staleness bound."""
    bounded = consumed and config.rollout.groups_per_step > 0
    return DispatchPolicy(
        retries=config.retry.budgets,
        lost_limit=config.retry.lost,
        lease_s=config.limits.lease,
        retry_delay_s=config.retry.delay_s,
        max_staleness=config.rollout.staleness,
        groups_per_step=config.rollout.groups_per_step if bounded else None,
    )


class Farm:
    """Run it once with :meth:`run`; :meth:`drain` and :meth:`stop` end it from a signal handler."""

    def __init__(self, parts: FarmParts, *, now: Callable[[], float] = time.time) -> None:
        self._parts = parts
        self._config = parts.config
        self._now = now
        self._failures_path = parts.run.logs / "failures.jsonl"
        landed = parts.log.landed()
        self._landed_before = len(landed)
        remembered = read_failures(self._failures_path, landed)
        self._dispatcher = Dispatcher(
            parts.plan,
            dispatch_policy(parts.config, consumed=parts.plan.length is None),
            landed=landed,
            failures=remembered.failures,
            forgiven=remembered.forgiven,
        )
        self._policy: PolicyVersion | None = None
        self._size = Size(workers=0, draining=0, slots=0)
        minimum, maximum = parts.config.cluster.span
        self._span = WorkerRange(
            minimum=minimum,
            maximum=maximum,
            slots_per_worker=parts.config.cluster.slots,
            settle_s=parts.config.cluster.settle_s,
        )
        self._workers = WorkerState(target=minimum)
        self._flights = FlightState(target=parts.config.cluster.slots * minimum)
        self._returned: dict[str, Trajectory] = {}  # of failed attempts whose episodes may yet land with them
        self._jobs: set[asyncio.Task[None]] = set()
        self._job_error: BaseException | None = None
        self._tally = Tally(now=now)
        self._started_at_s = now()
        self._cpu_before_s = time.process_time()
        self._state = "starting"
        self._stop = asyncio.Event()
        self._draining = False

    # -- from outside ---------------------------------------------------------------------------------

    def drain(self) -> None:
        """Start nothing more and end when what runs has ended."""
        if not self._draining:
            self._draining = True
            self._state = "draining"
            _log.info("draining: %d episodes in flight; a second signal stops at once", self._dispatcher.in_flight)
            self._handle(Drain())

    def stop(self) -> None:
        """End now. What runs is given up and will be run again by the next farm on this folder."""
        self._state = "stopping"
        self._stop.set()

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def tripped(self) -> Trip | None:
        """Set when the farm stopped by itself, because everything failed in the same way."""
        return self._dispatcher.tripped

    @property
    def finished(self) -> bool:
        """The plan is through: nothing is left for another start."""
        return self._state == "finished"

    async def run(self) -> None:
        """Until the plan is through, or a drain or stop has ended. Everything that has landed is sealed on return.

        Raises what broke the farm itself; episodes' failures are rows."""
        parts = self._parts
        if parts.policies is not None:
            latest = await asyncio.to_thread(parts.policies.latest)
            if latest is not None:
                self._on_policy(latest)
        self._state = "draining" if self._draining else "running"
        background = [
            self._every(_SCALE_S, self._scale),
            self._every(_SEAL_CHECK_S, self._seal_if_due),
            self._every(_STATUS_S, self._publish_status),
            self._every(_SWEEP_S, self._sweep),
        ]
        if parts.fleet is not None:
            background.append(parts.fleet.supervise())
        if parts.policies is not None:
            background.append(self._follow_policies(parts.policies))
        try:
            # What runs beside the loop never ends by itself, and what breaks there breaks the farm, loudly.
            await until_first_ends(self._loop(), *background)
            await self._finish_jobs()
        except BaseException:
            self._state = "failed"
            raise
        else:
            self._state = "stopped" if self._draining or self._stop.is_set() else "finished"
        finally:
            if (trip := self.tripped) is not None:
                append_amnesty(self._failures_path, trip.boundary, trip.kind)
            await self._finish_jobs(raising=False)
            await asyncio.to_thread(parts.log.seal)
            await self._publish_status()

    # -- the loop -------------------------------------------------------------------------------------

    async def _loop(self) -> None:
        events = self._parts.cluster.events
        next_tick_s = 0.0
        stopped = asyncio.create_task(self._stop.wait())
        try:
            while not self._dispatcher.done and not self._stop.is_set():
                getter = asyncio.create_task(events.get())
                await asyncio.wait({getter, stopped}, timeout=_TICK_S, return_when=asyncio.FIRST_COMPLETED)
                if getter.done():
                    self._on_cluster(getter.result())
                else:
                    getter.cancel()
                while not events.empty():
                    self._on_cluster(events.get_nowait())
                if self._job_error is not None:
                    raise self._job_error
                now_s = self._now()
                if now_s >= next_tick_s:
                    next_tick_s = now_s + _TICK_S
                    self._handle(Tick())
        finally:
            stopped.cancel()

    def _handle(self, event: DispatchEvent) -> None:
        for command in self._dispatcher.handle(event, now_s=self._now()):
            self._execute(command)
        if (trip := self.tripped) is not None and not self._draining:
            self._draining = True
            self._state = "draining"
            _log.error("%s", trip)

    def _execute(self, command: Command) -> None:
        match command:
            case Run():
                self._issue(command)
            case Cancel():
                self._job(self._parts.cluster.cancel(command.episode_id, command.number))
            case Forget():
                self._end_attempt((command.episode_id, command.number))
            case LandFailed():
                failure = command.failure
                outcome = Failed(boundary=failure.boundary, kind=failure.kind, message=failure.message, retryable=False)
                attempt = Attempt(
                    episode=command.episode,
                    number=failure.attempt,
                    engine_url="",
                    min_version=0,
                    queued_at_s=failure.started_at_s,
                    prior=command.prior,
                )
                returned = self._returned.pop(command.episode.id, None)
                if returned is None or returned.attempt != failure.attempt:
                    returned = bare_trajectory(
                        attempt,
                        outcome,
                        worker=failure.worker,
                        started_at_s=failure.started_at_s,
                        ended_at_s=failure.ended_at_s,
                    )
                self._job(self._land(returned))
            case LandDropped():
                self._returned.pop(command.episode.id, None)
                self._job(self._land(self._dropped(command)))

    def _issue(self, command: Run) -> None:
        episode = command.episode
        url, step = "", 0
        fleet = self._parts.fleet
        key = (episode.id, command.number)
        self._returned.pop(episode.id, None)
        if fleet is not None:
            placed = fleet.place(key, group_id=episode.group_id, tokens=episode.limits.max_context_tokens)
            if placed is None:
                # Not from inside handle(): the dispatcher must finish this event first.
                asyncio.get_running_loop().call_soon(self._handle, Unissued(episode_id=key[0], attempt=key[1]))
                return
            url, step = placed.url, placed.step
        attempt = Attempt(
            episode=episode,
            number=command.number,
            engine_url=url,
            min_version=step,
            queued_at_s=command.queued_at_s,
            prior=command.prior,
        )
        self._parts.cluster.submit(attempt)

    def _on_cluster(self, event: Finished | Lost) -> None:
        self._tell_engines(event)
        self._end_attempt((event.episode_id, event.number))
        if isinstance(event, Lost):
            if event.kind == "defect":
                self._on_failed(event, Boundary.FARM, "defect", event.message, event.worker, retryable=True)
            else:
                self._tally.lost += 1
                self._handle(
                    AttemptLost(
                        episode_id=event.episode_id,
                        attempt=event.number,
                        worker=event.worker,
                        kind=event.kind,
                        message=event.message,
                    )
                )
            return
        match event.result:
            case Receipt() as receipt:
                self._tally.landed(receipt)
                self._returned.pop(event.episode_id, None)
                self._handle(Landed(episode_id=event.episode_id, attempt=event.number))
            case Returned() as returned:
                failed = returned.failed
                self._returned[event.episode_id] = returned.trajectory
                self._on_failed(
                    event,
                    failed.boundary,
                    failed.kind,
                    failed.message,
                    returned.trajectory.worker,
                    retryable=failed.retryable,
                    started_at_s=returned.trajectory.started_at_s,
                )

    def _tell_engines(self, event: Finished | Lost) -> None:
        fleet = self._parts.fleet
        if fleet is None or isinstance(event, Lost):
            return
        key = (event.episode_id, event.number)
        match event.result:
            case Receipt():
                fleet.witness(key, failed=None)
            case Returned(failed=failed) if failed.boundary is Boundary.ENGINE:
                fleet.witness(key, failed=failed.kind)

    def _end_attempt(self, key: tuple[str, int]) -> None:
        if self._parts.fleet is not None:
            self._parts.fleet.release(key)

    def _on_failed(
        self,
        event: Finished | Lost,
        boundary: Boundary,
        kind: str,
        message: str,
        worker: str,
        *,
        retryable: bool,
        started_at_s: float | None = None,
    ) -> None:
        now_s = self._now()
        failure = FailedAttempt(
            attempt=event.number,
            boundary=boundary,
            kind=kind,
            message=message,
            worker=worker,
            started_at_s=now_s if started_at_s is None else started_at_s,
            ended_at_s=now_s,
        )
        self._tally.failures[f"{boundary.value}/{kind}"] += 1
        append_failure(self._failures_path, event.episode_id, failure)
        _log.info("attempt %s-%d failed at %s (%s): %s", event.episode_id, event.number, boundary.value, kind, message)
        self._handle(AttemptFailed(episode_id=event.episode_id, failure=failure, retryable=retryable))

    # -- landing from here ----------------------------------------------------------------------------

    def _dropped(self, command: LandDropped) -> Trajectory:
        now_s = self._now()
        attempt = Attempt(
            episode=command.episode,
            number=command.next_number,
            engine_url="",
            min_version=0,
            queued_at_s=now_s,
            prior=command.prior,
        )
        outcome = Dropped(reason=command.reason)
        return bare_trajectory(attempt, outcome, worker="driver", started_at_s=now_s, ended_at_s=now_s)

    async def _land(self, trajectory: Trajectory) -> None:
        await asyncio.to_thread(self._parts.log.append, trajectory)

    def _job(self, work: Awaitable[None]) -> None:
        async def run() -> None:
            try:
                await work
            except Exception as error:
                self._job_error = self._job_error or error

        task = asyncio.ensure_future(run())
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)

    async def _finish_jobs(self, *, raising: bool = True) -> None:
        if self._jobs:
            await asyncio.wait(self._jobs, timeout=_STOP_S)
        if raising and self._job_error is not None:
            raise self._job_error

    # -- in the background ----------------------------------------------------------------------------

    async def _every(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            await work()
            await asyncio.sleep(seconds)

    async def _scale(self) -> None:
        now_s = self._now()
        demand = self._dispatcher.demand
        self._workers = next_workers(self._workers, demand, self._span, now_s=now_s)
        self._size = await self._parts.cluster.scale(self._workers.target)
        fleet = self._parts.fleet
        slots = self._size.slots
        view = None
        if fleet is not None:
            slots = min(slots, fleet.capacity(self._config.limits.max_context_tokens))
            view = fleet.view()
        self._flights = next_flights(self._flights, view, slots=slots, rules=FlightRules(), now_s=now_s)
        self._handle(Capacity(slots=min(slots, self._flights.target)))

    async def _seal_if_due(self) -> None:
        log, rules = self._parts.log, self._config.log
        pending = await asyncio.to_thread(log.pending)
        if pending.oldest_at_s is None:
            return
        old = self._now() - pending.oldest_at_s >= rules.seal_age_s
        if old or pending.rows >= rules.seal_rows or pending.bytes >= rules.seal_bytes:
            await asyncio.to_thread(log.seal)

    async def _sweep(self) -> None:
        await self._parts.provider.sweep(now_s=self._now())

    async def _follow_policies(self, policies: PolicyLog) -> None:
        while True:
            after = -1 if self._policy is None else self._policy.step
            version = await policies.wait(after, _POLICY_WAIT_S)
            if version is not None:
                self._on_policy(version)

    def _on_policy(self, version: PolicyVersion) -> None:
        self._policy = version
        if self._parts.fleet is not None:
            self._parts.fleet.want(version)
        self._handle(Published(step=version.step, consumed_groups=version.consumed_groups))

    # -- telling --------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """What ``farm.json`` says."""
        me = ProcessId.of(os.getpid())
        counts = asdict(self._dispatcher.counts())
        fleet = self._parts.fleet
        return {
            "state": self._state,
            "process": me.to_json() if me else None,
            "updated_at_s": self._now(),
            "started_at_s": self._started_at_s,
            "tasks": self._config.rollout.tasks,
            "agent": self._config.agent.name,
            "plan_groups": self._parts.plan.length,
            "group_size": self._config.rollout.group_size,
            "cluster": {
                "address": self._parts.cluster.address,
                "target": self._workers.target,
                **asdict(self._size),
                "in_flight_limit": self._flights.target,
            },
            "episodes": {**counts, "landed_before": self._landed_before},
            "recent": self._tally.recent(),
            "driver_cpu_ms_per_episode": self._cpu_ms_per_episode(),
            "failures": dict(self._tally.failures),
            "tripped": None if self.tripped is None else str(self.tripped),
            "policy": None
            if self._policy is None
            else {"step": self._policy.step, "consumed_groups": self._policy.consumed_groups},
            "engines": [] if fleet is None else fleet.status(),
        }

    def _cpu_ms_per_episode(self) -> float | None:
        """CPU of this process (driver, scheduler, sealing) since it was ready, for each episode that landed."""
        landed = self._dispatcher.counts().landed
        return (time.process_time() - self._cpu_before_s) * 1e3 / landed if landed else None

    async def _publish_status(self) -> None:
        write_status(self._parts.run, self.status())


async def until_first_ends(*works: Coroutine[Any, Any, None]) -> None:
    """Run all until one ends, cancel the others, raise what it raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()

"""The only file that imports Dask: where attempts run.

One attempt is one Dask task, and a worker's slots are its threads (resources would pin the whole backlog to workers at
once). Episodes run on an own event loop in a thread of the worker, so that blocking code in an episode does not stall
the worker's heartbeats. Dask never repeats a task here (``allowed_failures = 0``): a lost attempt comes back as an
event, because leases and retries belong to the dispatcher and its ledger, not to the scheduler (Rule 1).

Scale-down drains: a surplus worker takes nothing new and is closed once it is empty (Rule 8).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import dask
from distributed import Client, Future, LocalCluster, Scheduler, Security, Worker, get_worker, wait
from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin, WorkerPlugin
from distributed.scheduler import KilledWorker, WorkerState

from farm.config import ClusterConfig
from farm.errors import FarmError, UsageError
from farm.types import Attempt

_PLUGIN = "farm-episodes"
_NOISY_LOGGERS = ("distributed", "distributed.scheduler", "distributed.nanny", "distributed.worker", "distributed.core")
_CLOSE_S = 20.0
_GATHER_WINDOW_S = 0.005
_GATHER_S = 60.0
_CANCEL_S = 10.0
_START_S = 180.0

_log = logging.getLogger(__name__)

SETTINGS: Mapping[str, Any] = {
    "distributed.scheduler.worker-saturation": 1.0,  # a worker holds only what it runs: a drain moves nothing
    "distributed.scheduler.allowed-failures": 0,
    "distributed.scheduler.work-stealing": False,
    "distributed.scheduler.active-memory-manager.start": False,
    "distributed.scheduler.worker-ttl": "5 minutes",  # must exceed the TCP time-out
    "distributed.scheduler.unknown-task-duration": "5m",
    "distributed.worker.profile.enabled": False,
    "distributed.worker.daemon": False,
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
    "distributed.comm.timeouts.tcp": "30s",
    "distributed.comm.timeouts.connect": "30s",
    "distributed.admin.tick.interval": "500ms",
    "distributed.admin.system-monitor.interval": "5s",
    "distributed.admin.system-monitor.gil.enabled": False,
}


class EpisodeRunner(Protocol):
    """What runs on a worker, made once per process from ``"module:Class"`` and its options."""

    async def run(self, attempt: Attempt) -> Any:
        """Execute the attempt; returns a small picklable record and never raises for what happened in it."""
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
    """The attempt ended without a record: ``kind`` is "worker_lost", "cancelled" or "defect"."""

    episode_id: str
    number: int
    worker: str
    kind: str
    message: str


ClusterEvent = Finished | Lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """``slots`` counts workers that take work; draining ones only finish theirs."""

    workers: int
    draining: int
    slots: int


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


# ------------------------------------------------------------------------------------------ on a worker


class EpisodesPlugin(WorkerPlugin):
    """Runs episodes on an own loop in a thread of the worker and knows them by key."""

    name = _PLUGIN

    def __init__(self, runner: str, options: Mapping[str, Any]) -> None:
        self.runner_name = runner
        self.options = dict(options)

    def setup(self, worker: Worker) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the driver, which drains
        self.running: dict[str, asyncio.Task[Any]] = {}
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="episodes", daemon=True)
        self.thread.start()
        module, _, attribute = self.runner_name.partition(":")
        factory = getattr(importlib.import_module(module), attribute)
        self.runner: EpisodeRunner = factory(worker=str(worker.name), **self.options)

    async def run(self, key: str, attempt: Attempt) -> tuple[str, Any]:
        done = asyncio.run_coroutine_threadsafe(self._tracked(key, attempt), self.loop)
        return await asyncio.wrap_future(done)

    async def _tracked(self, key: str, attempt: Attempt) -> tuple[str, Any]:
        task = asyncio.ensure_future(self.runner.run(attempt))
        self.running[key] = task
        try:
            return "finished", await task
        except asyncio.CancelledError:
            if task.cancelled() and not _being_cancelled():
                return "cancelled", None
            raise
        finally:
            self.running.pop(key, None)
            task.cancel()

    def cancel(self, key: str) -> None:
        def stop() -> None:
            if (task := self.running.get(key)) is not None:
                task.cancel()

        self.loop.call_soon_threadsafe(stop)

    async def teardown(self, worker: Worker) -> None:
        stop = asyncio.run_coroutine_threadsafe(self._stop(), self.loop)
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(stop), timeout=_CLOSE_S / 2)
        self.loop.call_soon_threadsafe(self.loop.stop)

    async def _stop(self) -> None:
        tasks = list(self.running.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_S / 4)
        await self.runner.close()


def _being_cancelled() -> bool:
    current = asyncio.current_task()
    return current is not None and current.cancelling() > 0


async def run_attempt(key: str, attempt: Attempt) -> tuple[str, Any]:
    """The Dask task. The key is an argument because a coroutine on a worker can't ask for its own."""
    plugin: EpisodesPlugin = get_worker().plugins[_PLUGIN]
    return await plugin.run(key, attempt)


async def cancel_attempt(key: str, dask_worker: Worker) -> None:
    plugin: EpisodesPlugin | None = dask_worker.plugins.get(_PLUGIN)
    if plugin is not None:
        plugin.cancel(key)


# --------------------------------------------------------------------------------------- on the scheduler


class FarmPlugin(SchedulerPlugin):
    """Drain-aware planning inside the scheduler, where the state is consistent; reached by the RPC ``farm_plan``."""

    name = "farm"

    async def start(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.draining: set[str] = set()
        scheduler.allowed_failures = 0
        scheduler.WORKER_SATURATION = 1.0
        scheduler.handlers["farm_plan"] = self.plan

    def _set_status(self, worker: WorkerState, status: Status) -> None:
        self.scheduler.handle_worker_status_change(status, worker, "farm-drain")
        message = {"op": "worker-status-change", "status": status.name, "stimulus_id": "farm-drain"}
        self.scheduler.stream_comms[worker.address].send(message)

    def plan(self, want: int | None = None) -> dict[str, Any]:
        """Drain or undrain towards ``want`` workers (None: leave as is); says which drained ones are empty."""
        workers = self.scheduler.workers
        self.draining &= set(workers)
        live = [w for w in workers.values() if w.address not in self.draining and w.status == Status.running]
        if want is not None:
            while len(live) < want and self.draining:
                address = max(self.draining, key=lambda a: len(workers[a].processing))
                self.draining.discard(address)
                self._set_status(workers[address], Status.running)
                live.append(workers[address])
            for worker in sorted(live, key=lambda w: len(w.processing))[: max(0, len(live) - want)]:
                self._set_status(worker, Status.closing_gracefully)
                self.draining.add(worker.address)
                live.remove(worker)
        empty = [workers[a] for a in self.draining if not workers[a].processing]
        return {
            "live": len(live),
            "slots": sum(w.nthreads for w in live),
            "draining": len(self.draining),
            "empty_names": [w.name for w in empty],
            "empty_addresses": [w.address for w in empty],
        }

    def valid_workers_downscaling(self, scheduler: Scheduler, workers: list[WorkerState]) -> list[WorkerState]:
        """Whoever else scales this cluster (an operator, an adaptive) only gets idle workers."""
        return [w for w in workers if not w.processing]


# ------------------------------------------------------------------------------------------ in the driver


class DaskCluster:
    """:class:`Cluster` on Dask. Use :func:`start_cluster`."""

    def __init__(self, client: Client, local: LocalCluster | None) -> None:
        self._client = client
        self._local = local
        self._events: asyncio.Queue[ClusterEvent] = asyncio.Queue()
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._fetching: dict[str, Future] = {}
        self._gathering: asyncio.Task[dict[str, tuple[str, Any]]] | None = None

    @property
    def address(self) -> str:
        return str(self._client.scheduler.address)

    @property
    def events(self) -> asyncio.Queue[ClusterEvent]:
        return self._events

    def submit(self, attempt: Attempt) -> None:
        key = attempt_key(attempt.episode.id, attempt.number)
        future = self._client.submit(run_attempt, key, attempt, key=key, pure=False, retries=0)
        follower = asyncio.create_task(self._follow(key, attempt.episode.id, attempt.number, future))
        self._followers[key] = follower
        follower.add_done_callback(lambda _: self._followers.pop(key, None))

    async def _follow(self, key: str, episode_id: str, number: int, future: Future) -> None:
        def lost(kind: str, message: str, worker: str = "") -> Lost:
            return Lost(episode_id=episode_id, number=number, worker=worker, kind=kind, message=message[:2000])

        event: ClusterEvent
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await wait(future)
            if future.status == "finished":
                state, result = await self._fetch(key, future)
                if state == "finished":
                    event = Finished(episode_id=episode_id, number=number, result=result)
                else:
                    event = lost("cancelled", "cancelled")
            elif future.status == "error":
                error = await future.exception()
                if isinstance(error, KilledWorker):
                    event = lost("worker_lost", "the worker died", str(getattr(error.last_worker, "name", "")))
                else:
                    event = lost("defect", f"{type(error).__name__}: {error}")
            else:  # the scheduler is gone or let go of the task
                event = lost("worker_lost", f"the cluster gave the task up ({future.status})")
        except Exception as error:  # the worker died between the result and its gathering
            event = lost("worker_lost", f"{type(error).__name__}: {error}")
        finally:
            future.release()
        self._events.put_nowait(event)

    async def _fetch(self, key: str, future: Future) -> tuple[str, Any]:
        """Results are gathered in batches: one round trip for all that finish within a few milliseconds."""
        self._fetching[key] = future
        if self._gathering is None:
            self._gathering = asyncio.create_task(self._gather())
        results = await asyncio.shield(self._gathering)
        if key not in results:
            raise FarmError("its result could not be gathered", kind="gather")
        answer: tuple[str, Any] = results[key]
        return answer

    async def _gather(self) -> dict[str, tuple[str, Any]]:
        await asyncio.sleep(_GATHER_WINDOW_S)
        batch, self._fetching, self._gathering = self._fetching, {}, None
        results = await asyncio.wait_for(self._client.gather(batch, errors="skip"), timeout=_GATHER_S)
        return dict(results)

    async def cancel(self, episode_id: str, number: int) -> None:
        key = attempt_key(episode_id, number)
        if key not in self._followers:
            return
        try:
            await asyncio.wait_for(self._client.run(cancel_attempt, key=key, on_error="ignore"), timeout=_CANCEL_S)
        except (TimeoutError, OSError) as error:  # its worker is gone or stuck: then its lease ends it
            _log.warning("%s could not be cancelled (%s)", key, type(error).__name__)

    async def scale(self, workers: int) -> Size:
        plan = await asyncio.wait_for(self._client.scheduler.farm_plan(want=workers), timeout=30.0)
        if self._local is not None:
            if plan["empty_names"]:
                await self._local.scale_down(plan["empty_names"])
            missing = workers + plan["draining"] - len(plan["empty_names"]) - len(self._local.worker_spec)
            if missing > 0:
                self._local.scale(len(self._local.worker_spec) + missing)
        elif plan["empty_addresses"]:
            await self._client.retire_workers(plan["empty_addresses"], close_workers=True)
        return Size(workers=plan["live"], draining=plan["draining"], slots=plan["slots"])

    async def close(self) -> None:
        followers = list(self._followers.values())
        for task in followers:
            task.cancel()
        await asyncio.gather(*followers, return_exceptions=True)
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError, OSError):
            await asyncio.wait_for(self._client.close(), timeout=_CLOSE_S)
        if self._local is not None:
            await asyncio.wait_for(self._local.close(), timeout=_CLOSE_S)


def attempt_key(episode_id: str, number: int) -> str:
    return f"attempt-{episode_id}-{number}"


async def start_cluster(
    config: ClusterConfig, *, workers: int, runner: str, options: Mapping[str, Any], scratch: Path
) -> Cluster:
    """A cluster of its own with ``workers`` workers on loopback, or the scheduler at ``config.address``.

    ``scratch`` is a folder for Dask's own files; the caller removes it.

    Raises ``UsageError`` when that scheduler can't be reached, ``FarmError`` when no worker comes up."""
    dask.config.set(SETTINGS)
    for name in _NOISY_LOGGERS:  # losses are events here, and are told in the farm's own words
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if config.address:
        return await _join(config, runner=runner, options=options)
    local = await LocalCluster(
        n_workers=workers,
        threads_per_worker=config.slots,
        processes=True,
        host="127.0.0.1",
        scheduler_port=config.port,
        dashboard_address="127.0.0.1:0",
        memory_limit=0,
        local_directory=str(scratch),
        asynchronous=True,
        silence_logs=logging.ERROR,
    )
    try:
        client = await Client(local, asynchronous=True, set_as_default=True)
        await _install(client, runner=runner, options=options)
        await _wait_for_workers(client, workers)
    except BaseException:
        await local.close()
        raise
    return DaskCluster(client, local)


async def _join(config: ClusterConfig, *, runner: str, options: Mapping[str, Any]) -> Cluster:
    security = None
    if config.address.startswith("tls://"):
        security = Security(
            tls_ca_file=config.tls_ca,
            tls_client_cert=config.tls_cert,
            tls_client_key=config.tls_key,
            require_encryption=True,
        )
    try:
        client = await Client(config.address, asynchronous=True, set_as_default=True, security=security, timeout=15)
    except (OSError, TimeoutError) as error:
        raise UsageError(
            f"cluster.address {config.address!r}: no scheduler answers ({type(error).__name__}); start one there with "
            "'dask scheduler', or leave address empty for a local cluster"
        ) from None
    try:
        await _install(client, runner=runner, options=options)
        await _wait_for_workers(client, 1)
    except BaseException:
        await client.close()
        raise
    return DaskCluster(client, None)


async def _wait_for_workers(client: Client, count: int) -> None:
    try:
        await asyncio.wait_for(client.wait_for_workers(count), timeout=_START_S)
    except TimeoutError:
        raise FarmError(
            f"{client.scheduler.address}: {count} workers did not join within {_START_S:g} s", kind="no_workers"
        ) from None


async def _install(client: Client, *, runner: str, options: Mapping[str, Any]) -> None:
    await client.register_plugin(FarmPlugin())
    await client.register_plugin(EpisodesPlugin(runner, options))

"""What Dask is given to run on a worker.

Episodes run on an own event loop in a thread of the worker, so that blocking code in an episode does not stall the
worker's heartbeats.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import signal
import threading
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any

from distributed import Worker, get_worker
from distributed.diagnostics.plugin import WorkerPlugin

from farm.cluster import EpisodeRunner
from farm.cluster.examine import examine
from farm.cluster.ticket import Expected
from farm.types import Attempt

PLUGIN = "farm-episodes"
_CLEAN_S = 15.0  # for the episodes that run when the worker is closed
_CLOSE_S = 20.0  # for all that is done then
_JOIN_S = 1.0
_GIVE_UP_S = 5.0
_LOOK_S = 0.02

_log = logging.getLogger(__name__)


class EpisodesPlugin(WorkerPlugin):
    """Runs episodes on an own loop in a thread of the worker and knows them by key.

    Dask sets it up on every worker, also on those that join later, before it hands them a task. A worker on which that
    fails would fail every attempt, so it is closed. ``expected``: what its host must have, for workers that somebody
    else starts; launched ones have looked before they joined."""

    name = PLUGIN

    def __init__(self, runner: str, options: Mapping[str, Any], expected: Expected | None = None) -> None:
        self.runner_name = runner
        self.options = dict(options)
        self.expected = expected
        self.running: dict[str, asyncio.Task[Any]] = {}
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread: threading.Thread | None = None
        self.runner: EpisodeRunner | None = None
        self.worker = ""
        self.leaving = False

    async def setup(self, worker: Worker) -> None:
        try:
            if self.expected is not None:
                await asyncio.to_thread(examine, self.expected)
            self._start(worker)
        except Exception as error:
            _log.error("farm: %s; this worker ends", error)
            worker.loop.add_callback(worker.close, reason="it is not fit for the farm")
            raise

    def _start(self, worker: Worker) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the driver, which drains
            if self.expected is not None:
                self._distrust_on_sigterm()
        module, _, attribute = self.runner_name.partition(":")
        factory = getattr(importlib.import_module(module), attribute)
        self.worker = str(worker.name)
        self.runner = factory(worker=self.worker, **self.options)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=_run_and_close, args=(self.loop,), name="episodes", daemon=True)
        self.thread.start()

    def _distrust_on_sigterm(self) -> None:
        """Who started this worker may tell its sandboxes to end together with it (systemd does)."""
        before = signal.getsignal(signal.SIGTERM)
        if not callable(before):
            return  # it ends this process at once: nothing lands from it any more

        def on_signal(number: int, frame: FrameType | None) -> None:
            self.distrust()
            before(number, frame)

        signal.signal(signal.SIGTERM, on_signal)

    async def run(self, key: str, attempt: Attempt) -> tuple[str, Any]:
        assert self.loop is not None
        done = asyncio.run_coroutine_threadsafe(self._tracked(key, attempt), self.loop)
        return await asyncio.wrap_future(done)

    async def _tracked(self, key: str, attempt: Attempt) -> tuple[str, Any]:
        assert self.runner is not None
        if self.leaving:
            return "preempted", self.worker
        task = asyncio.ensure_future(self.runner.run(attempt))
        self.running[key] = task
        try:
            return "finished", await task
        except asyncio.CancelledError:
            if task.cancelled() and not _being_cancelled():
                return ("preempted", self.worker) if self.leaving else ("cancelled", None)
            raise
        finally:
            self.running.pop(key, None)
            task.cancel()

    def distrust(self) -> None:
        """See :meth:`farm.cluster.EpisodeRunner.distrust`."""
        if self.runner is not None:
            self.runner.distrust()

    async def give_up(self, worker: Worker) -> None:
        """Cancel all that runs, let it clean up, and wait until the driver has fetched what it came to; bounded."""
        self.leaving = True
        for key in list(self.running):
            self.cancel(key)
        give_up_at = time.monotonic() + _GIVE_UP_S
        # Between an episode's end and its result in ``data`` Dask still counts its task as executing.
        while (worker.state.executing_count or worker.data) and time.monotonic() < give_up_at:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)

    def cancel(self, key: str) -> None:
        def stop() -> None:
            if (task := self.running.get(key)) is not None:
                task.cancel()

        if self.loop is not None:
            self.loop.call_soon_threadsafe(stop)

    async def teardown(self, worker: Worker) -> None:
        if self.loop is None:
            return
        stop = asyncio.run_coroutine_threadsafe(self._stop(), self.loop)
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(stop), timeout=_CLOSE_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        if self.thread is not None:
            await asyncio.to_thread(self.thread.join, _JOIN_S)

    async def _stop(self) -> None:
        tasks = list(self.running.values())
        for task in tasks:
            if not task.cancelling():  # a second time would cut its clean-up short
                task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLEAN_S)
        if self.runner is not None:
            await self.runner.close()


def _run_and_close(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _being_cancelled() -> bool:
    current = asyncio.current_task()
    return current is not None and current.cancelling() > 0


async def run_attempt(key: str, attempt: Attempt) -> tuple[str, Any]:
    """The Dask task. The key is an argument because a coroutine on a worker can't ask for its own."""
    plugin: EpisodesPlugin = get_worker().plugins[PLUGIN]
    return await plugin.run(key, attempt)


async def cancel_attempt(key: str, dask_worker: Worker) -> None:
    plugin: EpisodesPlugin | None = dask_worker.plugins.get(PLUGIN)
    if plugin is not None:
        plugin.cancel(key)

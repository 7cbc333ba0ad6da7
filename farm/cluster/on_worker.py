"""What Dask is given to run on a worker.

Episodes run on an own event loop in a thread of the worker, so that blocking code in an episode does not stall the
worker's heartbeats.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import signal
import threading
from collections.abc import Mapping
from typing import Any

from distributed import Worker, get_worker
from distributed.diagnostics.plugin import WorkerPlugin

from farm.cluster import EpisodeRunner
from farm.types import Attempt

PLUGIN = "farm-episodes"
_CLOSE_S = 20.0


class EpisodesPlugin(WorkerPlugin):
    """Runs episodes on an own loop in a thread of the worker and knows them by key."""

    name = PLUGIN

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
    plugin: EpisodesPlugin = get_worker().plugins[PLUGIN]
    return await plugin.run(key, attempt)


async def cancel_attempt(key: str, dask_worker: Worker) -> None:
    plugin: EpisodesPlugin | None = dask_worker.plugins.get(PLUGIN)
    if plugin is not None:
        plugin.cancel(key)

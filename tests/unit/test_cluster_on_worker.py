"""What runs on a worker when the worker is told to go: nothing is cut short, nothing is lost, nothing is graded."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from farm.cluster.on_worker import EpisodesPlugin
from farm.cluster.ticket import Expected
from tests.support.cluster_kinds import make_attempt


class Runner:
    """Episodes that go on until they are cancelled, and then clean up for a while."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.began = threading.Event()  # it runs in a thread of its own
        self.starts = self.cleaned = 0
        self.distrusted = False

    async def run(self, attempt: object) -> str:
        self.starts += 1
        self.began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0.1)
            self.cleaned += 1
            raise
        return ""

    def distrust(self) -> None:
        self.distrusted = True

    async def close(self) -> None:
        return


@pytest.fixture
def runner_name(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    module: Any = ModuleType("runner_of_this_test")
    module.Runner = Runner
    monkeypatch.setitem(sys.modules, module.__name__, module)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield f"{module.__name__}:Runner"
    for number, handler in before.items():
        signal.signal(number, handler)


def plugin_of(runner_name: str, expected: Expected | None = None) -> tuple[EpisodesPlugin, Runner]:
    plugin = EpisodesPlugin(runner_name, {}, expected)
    dask_worker: Any = SimpleNamespace(name="w1")
    plugin._start(dask_worker)
    assert isinstance(plugin.runner, Runner)
    return plugin, plugin.runner


async def begun(runner: Runner) -> None:
    assert await asyncio.to_thread(runner.began.wait, 10)


class DaskWorker:
    """Of Dask's worker what a plugin asks while it waits: ``looks`` times the task counts as executing, then as many
    times its result is there."""

    def __init__(self, looks: int) -> None:
        self.looks = looks
        self.executing = [1] * looks
        self.results = [{"key": "result"}] * looks

    @property
    def state(self) -> Any:
        return SimpleNamespace(executing_count=self.executing.pop() if self.executing else 0)

    @property
    def data(self) -> dict[str, str]:
        return self.results.pop() if self.results else {}


def test_who_gives_up_waits_until_the_driver_has_what_came_of_it(runner_name: str) -> None:
    async def main() -> None:
        plugin, runner = plugin_of(runner_name)
        running = asyncio.ensure_future(plugin.run("a", make_attempt(0, "")))
        await begun(runner)
        dask_worker: Any = DaskWorker(looks=3)
        await plugin.give_up(dask_worker)
        assert await running == ("preempted", "w1")
        assert runner.cleaned == 1
        assert not dask_worker.executing, "a task whose result is on its way is waited for"
        assert not dask_worker.results, "and so is a result that nobody has fetched"
        assert await plugin.run("b", make_attempt(0, "")) == ("preempted", "w1"), "nothing begins any more"
        assert runner.starts == 1
        await plugin.teardown(dask_worker)

    asyncio.run(main())


def test_a_worker_that_is_closed_lets_its_episodes_clean_up(runner_name: str) -> None:
    async def main() -> None:
        plugin, runner = plugin_of(runner_name)
        running = asyncio.ensure_future(plugin.run("a", make_attempt(0, "")))
        await begun(runner)
        running.cancel()  # as Dask does to its tasks before it closes the plugins
        with pytest.raises(asyncio.CancelledError):
            await running
        dask_worker: Any = DaskWorker(looks=0)
        await plugin.teardown(dask_worker)
        assert runner.cleaned == 1

    asyncio.run(main())


def test_a_worker_of_others_distrusts_its_episodes_when_it_is_told_to_end(runner_name: str) -> None:
    async def main() -> None:
        told = []
        signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
        expected = Expected(software={}, probe="", probe_text="", provider="", provider_options={})
        plugin, runner = plugin_of(runner_name, expected)
        signal.raise_signal(signal.SIGTERM)
        assert runner.distrusted
        assert told == [signal.SIGTERM], "and it ends as it would have"
        dask_worker: Any = DaskWorker(looks=0)
        await plugin.teardown(dask_worker)

    asyncio.run(main())

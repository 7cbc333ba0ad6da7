"""What every kind of cluster does: results, loss, cancel, drain, a clean end. ``cluster_kinds`` says which kinds there
are; ``ci/clusters.sh`` sets up those that need more than Python."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from cluster_kinds import ELASTIC, KINDS, RUNNER, kinds, start_cluster
from cluster_kinds import make_attempt as attempt

from farm.cluster import Cluster, ClusterEvent, Finished, Lost, Size
from farm.config import ClusterConfig


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "cluster_test_runner.py").write_text(RUNNER)
    (tmp_path / "logs").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture(params=kinds())
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def with_cluster(
    kind: str, folder: Path, use: Callable[[Cluster], Awaitable[None]], *, workers: int = 2, slots: int = 4
) -> None:
    async def main(config: ClusterConfig) -> None:
        cluster = await start_cluster(
            config,
            workers=workers,
            runner="cluster_test_runner:Runner",
            options={"folder": str(folder)},
            scratch=folder / "scratch",
            run=folder,
        )
        try:
            async with asyncio.timeout(100):
                await use(cluster)
        finally:
            await cluster.close()

    with KINDS[kind](folder, workers=workers, slots=slots) as config:
        asyncio.run(main(config))


async def started(folder: Path, count: int) -> list[Path]:
    while len(found := sorted(folder.glob("started-*"))) < count:  # noqa: ASYNC110 - files of other processes
        await asyncio.sleep(0.02)
    return found


async def scaled(cluster: Cluster, workers: int, *, slots: int) -> Size:
    while (size := await cluster.scale(workers)).slots != slots or size.draining:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    return size


def test_results_slots_blocking_and_defects(kind: str, folder: Path) -> None:
    async def use(cluster: Cluster) -> None:
        assert cluster.address.startswith(("tcp://127.0.0.1:", "tls://"))
        size = await scaled(cluster, 2, slots=8)  # of one that somebody else runs, one worker is enough to begin with
        assert (size.workers, size.slots, size.draining) == (2, 8, 0)
        for index in range(20):
            cluster.submit(attempt(index, "block 0.01" if index % 2 else "sleep 0.01"))
        cluster.submit(attempt(20, "raise"))
        events: list[ClusterEvent] = [await cluster.events.get() for _ in range(21)]
        finished = [event for event in events if isinstance(event, Finished)]
        assert sorted(event.result["index"] for event in finished) == list(range(20))
        assert len({event.result["pid"] for event in finished}) == 2
        (lost,) = [event for event in events if isinstance(event, Lost)]
        assert (lost.kind, lost.episode_id) == ("defect", attempt(20, "raise").episode.id)
        assert "a defect" in lost.message

    with_cluster(kind, folder, use)


def test_killed_worker_comes_back_as_events_and_is_replaced(kind: str, folder: Path) -> None:
    async def use(cluster: Cluster) -> None:
        for index in range(8):
            cluster.submit(attempt(index, "wait go"))
        names = await started(folder, 8)
        victim = int(names[0].name.rsplit("-", 1)[1])
        here = [name for name in names if name.name.endswith(f"-{victim}")]
        os.kill(victim, signal.SIGKILL)
        lost = [await cluster.events.get() for _ in here]
        assert all(isinstance(event, Lost) and event.kind == "worker_lost" for event in lost)
        (folder / "go").touch()
        # Dask itself repeats nothing; what the dispatcher re-issues has its own number and runs.
        cluster.submit(attempt(0, "sleep 0", number=2))
        rest = [await cluster.events.get() for _ in range(9 - len(here))]
        assert all(isinstance(event, Finished) for event in rest)
        assert len(list(folder.glob("started-*"))) == 9
        if kind in ELASTIC:
            await scaled(cluster, 2, slots=8)

    with_cluster(kind, folder, use)


def test_cancel_frees_the_slot_and_close_stops_what_runs(kind: str, folder: Path) -> None:
    async def use(cluster: Cluster) -> None:
        cluster.submit(attempt(0, "sleep 60"))
        await started(folder, 1)
        await cluster.cancel(attempt(0, "sleep 60").episode.id, 1)
        event = await cluster.events.get()
        assert isinstance(event, Lost)
        assert event.kind == "cancelled"
        await cluster.cancel("nobody", 1)
        cluster.submit(attempt(1, "sleep 0"))
        assert isinstance(await cluster.events.get(), Finished)
        cluster.submit(attempt(2, "sleep 60"))
        await started(folder, 3)

    with_cluster(kind, folder, use, workers=1, slots=1)
    assert len(list(folder.glob("closed-*"))) == (kind in ELASTIC), "the workers of others stay"


def test_scale_down_drains_and_up_again(kind: str, folder: Path) -> None:
    async def use(cluster: Cluster) -> None:
        for index in range(4):
            cluster.submit(attempt(index, "wait first"))
        await started(folder, 4)
        size = await cluster.scale(1)
        assert (size.workers, size.draining, size.slots) == (1, 1, 2)
        for index in range(4, 6):
            cluster.submit(attempt(index, "sleep 0.1"))
        (folder / "first").touch()
        events = [await cluster.events.get() for _ in range(6)]
        assert all(isinstance(event, Finished) for event in events), "scale-down killed a running episode"
        assert (await scaled(cluster, 1, slots=2)).draining == 0
        late = [event.result["pid"] for event in events if isinstance(event, Finished) and event.result["index"] >= 4]
        assert len(set(late)) == 1, "a draining worker took new work"
        if kind not in ELASTIC:
            return
        await scaled(cluster, 2, slots=4)

        # A drain is taken back when demand returns before it has ended.
        for index in range(6, 10):
            cluster.submit(attempt(index, "wait second"))
        await started(folder, 10)
        assert (await cluster.scale(1)).draining == 1
        assert (await cluster.scale(2)).slots == 4
        (folder / "second").touch()
        events = [await cluster.events.get() for _ in range(4)]
        for index in range(10, 14):
            cluster.submit(attempt(index, "wait third"))
        await started(folder, 14)  # which takes the slots of both
        (folder / "third").touch()
        events += [await cluster.events.get() for _ in range(4)]
        assert all(isinstance(event, Finished) for event in events)
        assert len({event.result["pid"] for event in events if isinstance(event, Finished)}) == 2

    with_cluster(kind, folder, use, slots=2)

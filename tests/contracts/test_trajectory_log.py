"""What every TrajectoryLog keeps to. An implementation is added by one line in LOGS."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from farm.errors import UsageError
from farm.log_bench import synthetic
from farm.protocols import TrajectoryLog
from farm.trajectory_log import DirectoryLog
from farm.types import Cursor, Trajectory

LOGS: list[Callable[[Path], AbstractContextManager[TrajectoryLog]]] = [lambda folder: DirectoryLog(folder / "log")]


@pytest.fixture(params=LOGS, ids=["directory"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TrajectoryLog]:
    with request.param(tmp_path) as made:
        yield made


def episode(number: int) -> Trajectory:
    return replace(synthetic(number, turns=2, context=8, output=3), episode_id=f"e{number}")


def ids(log: TrajectoryLog, cursor: Cursor = Cursor()) -> list[str]:  # noqa: B008 - frozen
    return [t.episode_id for _, t in log.read(cursor)]


def test_the_first_append_wins_and_the_row_is_its_own(log: TrajectoryLog) -> None:
    first = episode(1)
    assert log.append(first)
    assert not log.append(replace(first, worker="late"))
    log.seal()
    assert not log.append(replace(first, worker="later"))
    log.seal()
    assert [t for _, t in log.read(Cursor())] == [first]


def test_readers_see_sealed_rows_only_but_landed_knows_all(log: TrajectoryLog) -> None:
    log.append(episode(1))
    assert ids(log) == []
    assert log.shards() == []
    assert log.landed() == {"e1"}
    log.seal()
    log.append(episode(2))
    assert ids(log) == ["e1"]
    assert log.landed() == {"e1", "e2"}


def test_a_seal_takes_everything_in_order_of_its_end(log: TrajectoryLog) -> None:
    for number in (3, 1, 2):
        log.append(episode(number))
    shard = log.seal()
    assert shard is not None
    assert (shard.number, shard.rows) == (0, 3)
    assert ids(log) == ["e1", "e2", "e3"]


def test_sealing_nothing_makes_no_shard(log: TrajectoryLog) -> None:
    assert log.seal() is None
    log.append(episode(1))
    log.seal()
    assert log.seal() is None
    assert len(log.shards()) == 1


def test_shards_are_numbered_without_gaps_and_never_change(log: TrajectoryLog) -> None:
    seen = []
    for number in range(3):
        log.append(episode(number))
        seen.append(log.seal())
    assert [s.number for s in log.shards()] == [0, 1, 2]
    assert log.shards() == seen
    assert log.shards(since=2) == seen[2:]
    assert log.shards(since=3) == []


def test_every_cursor_resumes_right_after_its_row(log: TrajectoryLog) -> None:
    for numbers in ((0, 1, 2), (3,), (4, 5)):
        for number in numbers:
            log.append(episode(number))
        log.seal()
    pairs = list(log.read(Cursor()))
    assert [t.episode_id for _, t in pairs] == [f"e{n}" for n in range(6)]
    cursors = [cursor for cursor, _ in pairs]
    assert cursors == sorted(set(cursors))
    for done, cursor in enumerate(cursors, start=1):
        assert ids(log, cursor) == [f"e{n}" for n in range(done, 6)]


def test_a_cursor_at_the_end_of_a_shard_is_good_in_both_forms(log: TrajectoryLog) -> None:
    for number in range(2):
        log.append(episode(number))
        log.seal()
    assert ids(log, Cursor(shard=0, row=1)) == ids(log, Cursor(shard=1)) == ["e1"]


@pytest.mark.parametrize("cursor", [Cursor(shard=2), Cursor(shard=0, row=2)])
def test_a_cursor_past_the_end_belongs_to_another_log(log: TrajectoryLog, cursor: Cursor) -> None:
    log.append(episode(1))
    log.seal()
    with pytest.raises(UsageError, match="another log"):
        ids(log, cursor)


def test_tail_gives_what_is_there_and_waits_for_more(log: TrajectoryLog) -> None:
    for number in range(2):
        log.append(episode(number))
    log.seal()

    async def follow() -> list[str]:
        found = []
        async for cursor, trajectory in log.tail(Cursor(row=1)):
            found.append(trajectory.episode_id)
            if len(found) == 1:
                await asyncio.to_thread(log.append, episode(7))
                await asyncio.to_thread(log.seal)
            if len(found) == 2:
                assert cursor == Cursor(shard=2)
                break
        return found

    assert asyncio.run(asyncio.wait_for(follow(), 60)) == ["e1", "e7"]


def test_a_tail_that_is_cancelled_ends_and_another_goes_on(log: TrajectoryLog) -> None:
    log.append(episode(0))
    log.seal()

    async def follow(found: asyncio.Queue[str]) -> None:
        async for _, trajectory in log.tail(Cursor()):
            found.put_nowait(trajectory.episode_id)

    async def main() -> None:
        for wait_s in (0.0, 0.001, 0.01, None):
            found: asyncio.Queue[str] = asyncio.Queue()
            task = asyncio.create_task(follow(found))
            if wait_s is None:
                assert await found.get() == "e0"
            else:
                await asyncio.sleep(wait_s)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(asyncio.wait_for(main(), 60))

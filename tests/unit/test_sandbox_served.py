"""What is awaited to its end, whoever cancels and whenever."""

from __future__ import annotations

import asyncio

import pytest

from farm.sandbox.served import uncancelled


def test_the_work_is_finished_and_the_cancellation_comes_after_it() -> None:
    done: list[int] = []

    async def work() -> None:
        await asyncio.sleep(0.02)
        done.append(1)

    async def run() -> None:
        task = asyncio.create_task(uncancelled(work()))
        await asyncio.sleep(0)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert done == [1]


def test_a_cancellation_that_meets_the_end_is_not_lost() -> None:
    async def run() -> None:
        end = asyncio.Event()
        task = asyncio.create_task(uncancelled(end.wait()))
        await asyncio.sleep(0.01)
        end.set()
        await asyncio.sleep(0)  # the work has ended; whoever waits for it does not know yet
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


def test_results_and_errors_come_through() -> None:
    async def fail() -> None:
        raise LookupError("no")

    async def run() -> None:
        assert await uncancelled(asyncio.sleep(0, 3)) == 3
        with pytest.raises(LookupError):
            await uncancelled(fail())

    asyncio.run(run())

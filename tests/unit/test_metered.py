"""CPU time is counted for the one coroutine, and awaiting through the meter changes nothing."""

from __future__ import annotations

import asyncio
import time

import pytest

from farm.metered import Metered


def burn(cpu_s: float) -> None:
    end = time.thread_time() + cpu_s
    while time.thread_time() < end:
        pass


async def work(cpu_s: float) -> str:
    for _ in range(3):
        burn(cpu_s / 3)
        await asyncio.sleep(0)
    return "done"


def test_only_its_own_steps_count() -> None:
    async def main() -> None:
        heavy, light = Metered(work(0.06)), Metered(work(0.0))
        assert await asyncio.gather(heavy, light) == ["done", "done"]
        assert heavy.cpu_s >= 0.06
        assert light.cpu_s < heavy.cpu_s / 2

    asyncio.run(main())


def test_errors_and_cancellation_pass_through() -> None:
    async def fails() -> None:
        await asyncio.sleep(0)
        raise KeyError("x")

    closed = []

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            closed.append(True)

    async def main() -> None:
        with pytest.raises(KeyError):
            await Metered(fails())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await Metered(waits())

    asyncio.run(main())
    assert closed == [True]

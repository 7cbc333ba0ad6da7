"""A provider with a delay before every start is otherwise the provider inside it."""

from __future__ import annotations

import asyncio

from farm.protocols import SandboxSpec
from farm.sandbox.fake import FakeProvider
from farm.sandbox.slow import SlowStarts


def test_a_start_is_delayed_and_all_else_is_passed_on() -> None:
    inner = FakeProvider()
    slow = SlowStarts(inner, 0.05)

    async def scenario() -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with slow.open(SandboxSpec(owner="me", deadline_at_s=0.0)) as sandbox:
            waited_s = loop.time() - began
            assert sandbox is inner.opened[0]
            assert await slow.sweep(now_s=1.0) == 1
        return waited_s

    assert asyncio.run(scenario()) >= 0.05
    assert slow.name == inner.name
    assert inner.open_now == 0

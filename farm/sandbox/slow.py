"""A provider whose sandboxes take longer to start, to measure what a slower back end would cost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from farm.protocols import Sandbox, SandboxProvider, SandboxSpec


class SlowStarts:
    """``inner`` with ``delay_s`` before every start. Nothing else is slower, and nobody's CPU is used meanwhile."""

    def __init__(self, inner: SandboxProvider, delay_s: float) -> None:
        self._inner, self._delay_s = inner, delay_s

    @property
    def name(self) -> str:
        return self._inner.name

    def open(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        return self._open(spec)

    @asynccontextmanager
    async def _open(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        await asyncio.sleep(self._delay_s)
        async with self._inner.open(spec) as sandbox:
            yield sandbox

    async def sweep(self, *, now_s: float) -> int:
        return await self._inner.sweep(now_s=now_s)

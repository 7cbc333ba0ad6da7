"""Disk use of containers whose writable layer the daemon can't limit: looked at in turn, ended when over.

Most daemons keep layers on ext4, where Docker has no size limit (it needs xfs with ``pquota``). A look costs the
daemon a walk over the files that the container itself has written. Between two looks a container can write more than
it may, at the speed of the disk; a single file can't be limited by rlimit because build and test tools write large
ones.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from farm.sandbox.docker_daemon import Daemon, DockerError

_LOOK_S = 5.0


class DiskWatch:
    """One task for all containers of a provider, there only while there is something to watch."""

    def __init__(self, daemon: Daemon, *, look_s: float = _LOOK_S) -> None:
        self._daemon = daemon
        self._look_s = look_s
        self._watched: dict[str, tuple[int, Callable[[int], None]]] = {}
        self._task: asyncio.Task[None] | None = None

    def watch(self, name: str, limit_bytes: int, over: Callable[[int], None]) -> Callable[[], None]:
        """Once ``name`` has written more than ``limit_bytes``, ``over`` is told how much, and the container is killed.
        Call what is returned when it has ended."""
        self._watched[name] = (limit_bytes, over)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

        def stop() -> None:
            self._watched.pop(name, None)
            if not self._watched and self._task is not None:
                self._task.cancel()
                self._task = None

        return stop

    async def _run(self) -> None:
        while self._watched:
            await asyncio.sleep(self._look_s)
            with contextlib.suppress(DockerError):  # a daemon that is gone is noticed by the sandboxes themselves
                await self._look()

    async def _look(self) -> None:
        def sizes(client: Any) -> dict[str, int]:
            found = client.containers(size=True, filters={"name": list(self._watched)})
            return {row["Names"][0].strip("/"): int(row.get("SizeRw") or 0) for row in found}

        for name, used in (await self._daemon.call("sizes", sizes)).items():
            limit, over = self._watched.get(name, (used, lambda _: None))
            if used > limit:
                over(used)
                with contextlib.suppress(DockerError):
                    await self._kill(name)

    async def _kill(self, name: str) -> None:
        await self._daemon.call(f"kill {name}", lambda client: client.kill(name))

"""The daemon's disk: how much of it images may take, and what containers write whose layer the daemon can't limit.

These are looked at in turn, and ended when over. Most daemons keep layers on ext4, where Docker has no size limit (it
needs xfs with ``pquota``). A look costs the daemon a walk over the files that the container itself has written. Between
two looks a container can write more than it may, at the speed of the disk; a single file can't be limited by rlimit
because build and test tools write large ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from farm.sandbox.docker_daemon import Daemon, DockerError

_LOOK_S = 5.0
_KEPT_FREE = 0.15  # of the disk: where Kubernetes' kubelet begins to remove images, too (85 % used)


def room_for_images(info: Mapping[str, Any]) -> Callable[[], int] | None:
    """How many bytes more the images of the daemon may take now, so that a share of its disk stays free (negative: too
    many are taken). None where its disk can't be seen from here: it is another machine's, or says nothing.

    ``info``: what the daemon says of itself."""
    root = Path(str(info.get("DockerRootDir") or ""))
    if info.get("Name") != platform.node() or not root.is_absolute() or not root.is_dir():
        return None
    return partial(_room, root)


def _room(root: Path) -> int:
    disk = shutil.disk_usage(root)
    return disk.free - int(disk.total * _KEPT_FREE)


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

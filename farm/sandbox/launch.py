"""The provider's side of the launcher: start it, hand it requests, and let it go with the provider."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import farm

_RETRY_S = 0.005
_EXIT_S = 2.0
_CODE = "import sys; sys.path.append({root!r}); from farm.sandbox.launcher import main; main()"


class LauncherLost(Exception):
    """The launcher has ended: it was idle, or it died (and every sandbox with it)."""


class LauncherClient:
    """A running launcher. It ends when it is idle, when this object is collected, and when the process ends."""

    def __init__(self, directory: Path, mounts: Sequence[str]) -> None:
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            root = str(Path(farm.__file__).parent.parent)
            numbers = [its.fileno(), os.getpid()]
            argv = [sys.executable, "-I", "-S", "-c", _CODE.format(root=root), str(numbers[0]), str(numbers[1])]
            argv += [str(directory), *mounts]
            actions: list[tuple[Any, ...]] = [(os.POSIX_SPAWN_OPEN, n, "/dev/null", os.O_RDWR, 0) for n in (0, 1)]
            actions.append((os.POSIX_SPAWN_DUP2, its.fileno(), its.fileno()))  # onto itself: inheritable
            self.pid = os.posix_spawn(
                sys.executable, argv, {"PATH": "/usr/bin:/bin"}, file_actions=actions, setsid=True
            )
        mine.setblocking(False)
        self.lost = False  # takes no more requests
        self._socket = mine
        self.stop = weakref.finalize(self, _stop, mine, self.pid)

    async def start(self, request: Mapping[str, Any], end: socket.socket, *, timeout_s: float) -> None:
        """Ask for a sandbox that talks on ``end``. Raises ``LauncherLost`` or ``TimeoutError``."""
        data = json.dumps(request).encode()
        until = time.monotonic() + timeout_s
        while True:
            try:
                socket.send_fds(self._socket, [data], [end.fileno()])
                return
            except BlockingIOError:
                if time.monotonic() > until:
                    raise TimeoutError("the launcher takes no requests") from None
                await asyncio.sleep(_RETRY_S)
            except OSError as error:
                self.lost = True
                raise LauncherLost(str(error)) from error

    def reaped(self) -> bool:
        """Has it ended, and is nothing of it left? Doesn't wait."""
        try:
            ended = os.waitpid(self.pid, os.WNOHANG)[0] != 0
        except ChildProcessError:
            ended = True
        if ended:
            self.stop.detach()
            self._socket.close()
        return ended


class LauncherSlot:
    """Holds the provider's launcher: started at the first use, and again when it has died."""

    def __init__(self, directory: Path, mounts: Sequence[str]) -> None:
        self._directory = directory
        self._mounts = tuple(mounts)
        self._lock = threading.Lock()
        self._client: LauncherClient | None = None
        self._old: list[LauncherClient] = []  # lost ones, until they are reaped

    @property
    def pid(self) -> int | None:
        return self._client.pid if self._client is not None else None

    async def start(self, request: Mapping[str, Any], end: socket.socket, *, timeout_s: float) -> None:
        """Ask for a sandbox that talks on ``end``. Raises ``LauncherLost``, ``OSError``."""
        try:
            await self._start(request, end, timeout_s)
        except LauncherLost:  # it ended for lack of work
            await self._start(request, end, timeout_s)

    def close(self) -> None:
        with self._lock:
            for client in (self._client, *self._old):
                if client is not None:
                    client.stop()
            self._client, self._old = None, []

    async def _start(self, request: Mapping[str, Any], end: socket.socket, timeout_s: float) -> None:
        with self._lock:
            if self._client is not None and self._client.lost:
                self._old.append(self._client)
                self._client = None
            self._old = [client for client in self._old if not client.reaped()]
            if self._client is None:
                self._client = LauncherClient(self._directory, self._mounts)
            client = self._client
        await client.start(request, end, timeout_s=timeout_s)


def _stop(control: socket.socket, pid: int) -> None:
    """End of file tells the launcher to end. It is waited for briefly, so that it doesn't stay behind as a zombie."""
    control.close()
    until = time.monotonic() + _EXIT_S
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < until:
            time.sleep(0.001)

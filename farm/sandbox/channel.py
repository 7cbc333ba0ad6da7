"""The host's end of a sandbox's socket, on the running event loop: whole packets out and in, every wait bounded."""

from __future__ import annotations

import asyncio
import socket
from collections import deque

from farm.sandbox.command_server import MAX_FRAME

_RETRY_S = 0.002


class Closed(Exception):
    """The other end is gone: the sandbox is dead and cleared away."""


class Channel:
    """One coroutine at a time may wait in :meth:`receive`. Must be closed."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._socket.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._frames: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False
        self._loop.add_reader(self._socket, self._readable)

    async def send(self, frame: bytes, *, timeout_s: float) -> None:
        """Raises ``Closed``, or ``TimeoutError`` when the other end takes nothing."""
        until = self._loop.time() + timeout_s
        while True:
            try:
                self._socket.send(frame)
                return
            except BlockingIOError:
                if self._loop.time() > until:
                    raise TimeoutError from None
                await asyncio.sleep(_RETRY_S)
            except OSError:
                raise Closed from None

    async def receive(self, *, timeout_s: float) -> bytes:
        """The next packet. Raises ``Closed`` or ``TimeoutError``."""
        if not self._frames:
            if self._ended:
                raise Closed
            self._waiter = self._loop.create_future()
            alarm = self._loop.call_later(max(0.0, timeout_s), self._wake)
            try:
                await self._waiter
            finally:
                alarm.cancel()
                self._waiter = None
            if not self._frames:
                raise Closed if self._ended else TimeoutError
        return self._frames.popleft()

    def shut(self) -> None:
        """Tell the server to end itself and all."""
        if not self._ended:
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._loop.remove_reader(self._socket)
        self._socket.close()

    def _readable(self) -> None:
        while True:
            try:
                frame = self._socket.recv(MAX_FRAME)
            except BlockingIOError:
                break
            except ConnectionResetError:
                continue  # it went without reading a request of ours: told once, and before what it had said
            except OSError:
                frame = b""
            if not frame:
                self._ended = True
                self._loop.remove_reader(self._socket)
                break
            self._frames.append(frame)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

"""The standard streams of a container as a link to the command server in it (:class:`farm.sandbox.served.Link`).

Docker's attach stream: to the container goes what its standard input gets; from it come blocks of an 8-byte header
(stream, three zeros, length) and data. In both directions the server's frames each follow their length.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

from farm.sandbox.channel import Closed

_STDOUT, _STDERR = 1, 2
_HEADER = struct.Struct(">BxxxL")
_LENGTH = struct.Struct(">L")
_READ = 1 << 18
_SAID = 4096  # bytes kept of what the container says outside of frames


class DockerLink:
    """Made by :meth:`over`; one coroutine at a time may wait in :meth:`receive`. Must be closed.

    ``said``: what came on standard error (of perl, before the command server speaks)."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._raw = bytearray()  # blocks, not yet whole
        self._frames = bytearray()  # of standard output
        self.said = b""

    @classmethod
    async def over(cls, connection: socket.socket) -> DockerLink:
        """Takes the socket over: it is closed with the link."""
        try:
            reader, writer = await asyncio.open_connection(sock=connection, limit=_READ)
        except BaseException:
            connection.close()
            raise
        return cls(reader, writer)

    async def send(self, frame: bytes, *, timeout_s: float) -> None:
        """Raises ``Closed`` or ``TimeoutError``."""
        try:
            self._writer.write(_LENGTH.pack(len(frame)) + frame)
            async with asyncio.timeout(timeout_s):
                await self._writer.drain()
        except TimeoutError:
            raise
        except (OSError, RuntimeError):  # RuntimeError: the transport is closing
            raise Closed from None

    async def receive(self, *, timeout_s: float) -> bytes:
        """The next frame. Raises ``Closed`` or ``TimeoutError``; loses nothing when cancelled."""
        async with asyncio.timeout(max(0.0, timeout_s)):
            while (frame := self._whole()) is None:
                try:
                    data = await self._reader.read(_READ)
                except TimeoutError:
                    raise
                except OSError:
                    data = b""
                if not data:
                    raise Closed
                self._raw += data
                self._sort()
        return frame

    def shut(self) -> None:
        """Tell the server to end itself and all: it reads the end of its input."""
        with contextlib.suppress(OSError, RuntimeError):
            if self._writer.can_write_eof():
                self._writer.write_eof()

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def _whole(self) -> bytes | None:
        if len(self._frames) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._frames)
        end = _LENGTH.size + size
        if len(self._frames) < end:
            return None
        frame = bytes(self._frames[_LENGTH.size : end])
        del self._frames[:end]
        return frame

    def _sort(self) -> None:
        """Whole blocks by the stream they came on."""
        while len(self._raw) >= _HEADER.size:
            stream, size = _HEADER.unpack_from(self._raw)
            end = _HEADER.size + size
            if len(self._raw) < end:
                return
            data = self._raw[_HEADER.size : end]
            del self._raw[:end]
            if stream == _STDOUT:
                self._frames += data
            elif stream == _STDERR:
                self.said = (self.said + bytes(data))[:_SAID]

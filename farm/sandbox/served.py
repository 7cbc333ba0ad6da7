"""A sandbox that a command server serves (:mod:`farm.sandbox.command_server`): what is said over its link, and the
rules of a conversation, whatever the link is and whoever started the machine behind it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Mapping
from typing import Any, NoReturn, Protocol, TypeVar

from farm.errors import SandboxLostError
from farm.protocols import ExecResult, SandboxSpec
from farm.sandbox import command_server
from farm.sandbox.channel import Closed

GRACE_S = 10.0  # how much later than a command's time-out the server may answer
FILES_S = 30.0  # for one frame of file content
STOP_S = 5.0  # for each of the steps of the end

T = TypeVar("T")


class Link(Protocol):
    """Whole frames out and in. Both raise ``Closed`` when the other end is gone, and ``TimeoutError``."""

    async def send(self, frame: bytes, *, timeout_s: float) -> None: ...
    async def receive(self, *, timeout_s: float) -> bytes: ...


class ServedSandbox:
    """Implements ``farm.protocols.Sandbox`` over ``link``. A subclass says how it ends and why it was lost."""

    def __init__(self, sandbox_id: str, spec: SandboxSpec, link: Link) -> None:
        self._id = sandbox_id
        self._spec = spec
        self._link = link
        self._cpu_s = 0.0
        self._lock = asyncio.Lock()
        self._lost: tuple[str, str] | None = None  # message, kind

    @property
    def id(self) -> str:
        return self._id

    async def exec(
        self, command: str, *, timeout_s: float, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> ExecResult:
        text = command.encode(errors="surrogateescape")
        frame = command_server.run_frame(
            text,
            timeout_s=timeout_s,
            output_bytes=self._spec.output_bytes,
            cwd=cwd or self._spec.workdir,
            env={**self._spec.machine.env, **(env or {})},
        )
        if b"\0" in text:
            return refused("the command holds a null byte")
        if len(frame) > command_server.MAX_FRAME:
            return refused("Argument list too long")
        async with self._lock:
            started = time.perf_counter()
            output, last = await self._ask(frame, b"E", timeout_s + GRACE_S)
            end = command_server.parse_end(last)
            self._cpu_s = end.cpu_s
            return ExecResult(
                exit_code=end.exit_code,
                output=b"".join([*output, end.output]).decode(errors="replace"),
                truncated=end.truncated,
                timed_out=end.timed_out,
                duration_s=time.perf_counter() - started,
            )

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        """Raises ``OSError`` when a path can't be written (also: disk full), ``ValueError`` when it isn't absolute."""
        for path in files:
            check_path(path)
        async with self._lock:
            for frame in command_server.write_frames(files):
                _, last = await self._ask(frame, b"w", FILES_S)
                if last != b"w":
                    raise OSError(last[1:].decode(errors="replace"))

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        check_path(path)
        async with self._lock:
            parts, last = await self._ask(command_server.get_frame(path, max_bytes), b"g", FILES_S)
        if last == b"gmissing":
            raise FileNotFoundError(path)
        if last == b"gbig":
            raise ValueError(f"{path} is longer than {max_bytes} bytes")
        return b"".join(parts)

    async def cpu_s(self) -> float:
        """Of the command server and of all processes that have ended, as of the last command."""
        return self._cpu_s

    # ------------------------------------------------------------------------------------ for subclasses

    async def _end_by_force(self) -> None:
        """End everything at once; errors are swallowed."""
        raise NotImplementedError

    async def _why_gone(self) -> tuple[str, str]:
        """Message and kind of the loss, once the link is closed."""
        return "it is gone", "lost"

    def _last_words(self, frame: bytes) -> tuple[str, str] | None:
        """Message and kind of the loss when ``frame`` tells of it."""
        return None

    # ------------------------------------------------------------------------------------ conversation

    async def _ask(self, frame: bytes, last: bytes, timeout_s: float) -> tuple[list[bytes], bytes]:
        """Send ``frame``; returns the contents of the answers before the one of kind ``last``, and that frame whole.

        When cancelled, what the frame started is stopped and its answer taken, so that the next one gets its own.
        """
        await self._send(frame)
        before: list[bytes] = []
        try:
            while True:
                answer = await self._receive(timeout_s)
                if answer[:1] == last:
                    return before, answer
                before.append(answer[1:])
        except asyncio.CancelledError:
            await uncancelled(self._settle(last))
            raise

    async def _settle(self, last: bytes) -> None:
        with contextlib.suppress(SandboxLostError):
            await self._send(command_server.stop_frame())
            while (await self._receive(GRACE_S))[:1] != last:
                pass

    async def _send(self, frame: bytes) -> None:
        self._check()
        try:
            await self._link.send(frame, timeout_s=FILES_S)
        except Closed:
            while True:  # until somebody says why, or nothing more comes
                await self._receive(STOP_S)
        except TimeoutError:
            await self._fail("the command server takes no requests", kind="unresponsive")

    async def _receive(self, timeout_s: float) -> bytes:
        try:
            frame = await self._link.receive(timeout_s=timeout_s)
        except Closed:
            message, kind = await self._why_gone()
            await self._fail(message, kind=kind)
        except TimeoutError:
            await self._fail("the command server does not answer", kind="unresponsive")
        words = self._last_words(frame)
        if words is not None:
            await self._fail(words[0], kind=words[1])
        return frame

    def _check(self) -> None:
        if self._lost is not None:
            raise SandboxLostError(f"sandbox {self._id}: {self._lost[0]}", kind=self._lost[1])

    async def _fail(self, message: str, *, kind: str) -> NoReturn:
        """Nothing more can be trusted: end all, and say why, now and from now on."""
        if self._lost is None:
            self._lost = (message, kind)
            await self._end_by_force()
        self._check()
        raise AssertionError("unreachable")


def refused(why: str) -> ExecResult:
    """The answer to a command that can't be handed to bash at all."""
    return ExecResult(exit_code=126, output=f"bash: {why}\n", truncated=False, timed_out=False, duration_s=0.0)


def check_path(path: str) -> None:
    """Raises ``ValueError``."""
    if not path.startswith("/") or "\0" in path:
        raise ValueError(f"{path!r} is not an absolute path")


async def uncancelled(work: Coroutine[Any, Any, T]) -> T:
    """Await ``work`` to its end even when this task is cancelled meanwhile; the cancellation is raised after it."""
    task = asyncio.get_running_loop().create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if not task.cancelled():  # it is ours, also when the work has just ended
                cancelled = error
        except Exception:
            break
    if cancelled is not None:
        raise cancelled
    return task.result()

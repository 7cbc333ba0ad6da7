"""Sandboxes by bubblewrap: user, pid, mount, network, ipc, uts and cgroup namespaces, a seccomp filter, and limits.

``async with BubblewrapProvider().open(spec) as sandbox`` starts one in about 10 ms and ``sandbox.exec`` costs about a
millisecond more than the command, because the command server inside (:mod:`farm.sandbox.command_server`) stays.

Semantics worth knowing: one command runs at a time. Background processes live on between commands (their output is lost
unless they redirect it) until a command hits its time-out, which kills everything but the server. Memory of the tmpfs
counts as memory, so the memory cgroup gets ``memory_bytes + disk_bytes``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import secrets
import socket
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from farm.errors import SandboxLostError, SandboxStartError, UsageError
from farm.protocols import ExecResult, Sandbox, SandboxSpec
from farm.sandbox import command_server, rootfs, seccomp
from farm.sandbox.cgroup import Cgroups, find_cgroups, plan
from farm.sandbox.channel import Channel, Closed
from farm.sandbox.host import check_host, host_uids
from farm.sandbox.launch import LauncherLost, LauncherSlot
from farm.sandbox.launcher import HELD
from farm.sandbox.state import (
    kill,
    orphaned_groups,
    read_record,
    record_path,
    remove_groups,
    state_directory,
    sweep,
)

_START_S = 30.0  # the most time until the command server answers
_GRACE_S = 10.0  # how much later than a command's time-out the server may answer
_FILES_S = 30.0  # for one frame of file content
_STOP_S = 5.0  # for each of the two steps of the end: by itself, by force

_RLIMITS = {"fsize": 1, "core": 4, "nproc": 6, "nofile": 7, "memlock": 8, "as": 9, "msgqueue": 12}
_NOFILE = 1024
_MEMLOCK = 64 << 10

T = TypeVar("T")


class BubblewrapProvider:
    """``cpus``: CPU quota of one sandbox, where the cpu cgroup is writable. One event loop at a time."""

    name = "bubblewrap"

    def __init__(self, *, cpus: float = 1.0) -> None:
        if cpus <= 0:
            raise UsageError(f"sandbox 'bubblewrap': cpus is {cpus}; give a number above 0")
        bwrap = check_host()
        self._cpus = cpus
        self._cgroups: Cgroups = find_cgroups()
        self._directory = state_directory()
        machine = platform.machine()
        filters = seccomp.program(machine, counted_memory=self._cgroups.counts_memory)
        self._uids = host_uids() if os.getuid() == 0 else None
        self._stage = rootfs.make_stage(self._directory, bwrap=bwrap, seccomp=filters, drop=self._uids is not None)
        self._pytest: rootfs.Bind | None = None  # staged when first asked for
        self._slot = LauncherSlot(self._directory, self._stage.mounts)

    @contextlib.asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        sandbox = await self._start(spec)
        try:
            yield sandbox
        finally:
            await _uncancelled(sandbox.close())

    @property
    def launcher_pid(self) -> int | None:
        """The helper process that starts the sandboxes; None before the first start."""
        return self._slot.pid

    def close(self) -> None:
        """End the launcher and what still runs. Optional: it also ends with the provider, and with the process."""
        self._slot.close()

    async def sweep(self, *, now_s: float) -> int:
        """Also those of dead owners, and of other processes of this user."""
        return await asyncio.to_thread(self._sweep, now_s)

    def _sweep(self, now_s: float) -> int:
        removed = sweep(self._directory, now_s=now_s)
        remove_groups(orphaned_groups(set(self._cgroups.places.values())))
        return removed

    async def _start(self, spec: SandboxSpec) -> BubblewrapSandbox:
        extra = await self._image(spec.image)
        sandbox_id = secrets.token_hex(8)
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            try:
                await self._slot.start(self._request(sandbox_id, spec, extra), its, timeout_s=_START_S)
            except (OSError, LauncherLost) as error:
                mine.close()
                raise SandboxStartError(f"the launcher does not answer: {error}", kind="launcher") from error
            except BaseException:
                mine.close()
                raise
        sandbox = BubblewrapSandbox(sandbox_id, spec, Channel(mine), record_path(self._directory, sandbox_id))
        try:
            await sandbox.ready()
        except BaseException:
            await _uncancelled(sandbox.close())
            raise
        return sandbox

    async def _image(self, image: str) -> list[rootfs.Bind]:
        """What ``image`` has beyond the host image."""
        if image not in rootfs.IMAGES:
            detail = f"image {image!r} is unknown; have {', '.join(rootfs.IMAGES)}"
            raise SandboxStartError(detail, kind="image", retryable=False)
        if image == "host":
            return []
        if self._pytest is None:
            self._pytest = await asyncio.to_thread(rootfs.stage_pytest, self._directory)
        if self._pytest is None:
            raise SandboxStartError(f"image {image!r}: pytest is not installed", kind="image", retryable=False)
        return [self._pytest]

    def _request(self, sandbox_id: str, spec: SandboxSpec, extra: list[rootfs.Bind]) -> dict[str, Any]:
        limits = {
            "core": 0,
            "nproc": spec.pids,
            "nofile": _NOFILE,
            "memlock": _MEMLOCK,
            "msgqueue": 0,
            "fsize": spec.disk_bytes,
        }
        if not self._cgroups.counts_memory:
            limits["as"] = spec.memory_bytes
        pairs = [(_RLIMITS[name], value) for name, value in limits.items()]
        server = command_server.server_argv(platform.machine(), pairs)
        memory = spec.memory_bytes + spec.disk_bytes
        groups = plan(self._cgroups, memory_bytes=memory, pids=spec.pids, cpus=self._cpus)
        return {
            "id": sandbox_id,
            "owner": spec.owner,
            "deadline_at_s": spec.deadline_at_s,
            "argv": rootfs.bwrap_argv(
                self._stage, server, extra=extra, disk_bytes=spec.disk_bytes, workdir=spec.workdir
            ),
            "uid": secrets.choice(self._uids) if self._uids else None,
            "seccomp": self._stage.seccomp,
            "groups": [{"parent": group.parent, "settings": dict(group.settings)} for group in groups],
        }


class BubblewrapSandbox:
    """A running sandbox; made by :class:`BubblewrapProvider` only."""

    def __init__(self, sandbox_id: str, spec: SandboxSpec, channel: Channel, record: Path) -> None:
        self._id = sandbox_id
        self._spec = spec
        self._channel = channel
        self._record = record
        self._cpu_s = 0.0
        self._lock = asyncio.Lock()
        self._lost: tuple[str, str] | None = None  # message, kind

    @property
    def id(self) -> str:
        return self._id

    async def ready(self) -> None:
        """Wait for the command server. Raises ``SandboxStartError`` with what bwrap had to say."""
        said = ""
        missing = 2  # the server's word and the launcher's
        until = time.monotonic() + _START_S
        try:
            while missing:
                frame = await self._channel.receive(timeout_s=until - time.monotonic())
                cpu_s = command_server.parse_ready(frame)
                if cpu_s is not None:
                    self._cpu_s = cpu_s
                    missing -= 1
                elif frame == HELD:
                    missing -= 1
                elif frame.startswith(b"X{"):
                    said += "its deadline has passed" if json.loads(frame[1:])["overdue"] else ""
                else:
                    said += frame.decode(errors="replace")
        except Closed:
            raise SandboxStartError(f"it ended: {said.strip()[:500] or 'no message'}", kind="bwrap") from None
        except TimeoutError:
            raise SandboxStartError(f"no answer in {_START_S:g} s: {said.strip()[:500]}", kind="timeout") from None

    async def exec(
        self, command: str, *, timeout_s: float, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> ExecResult:
        text = command.encode(errors="surrogateescape")
        frame = command_server.run_frame(
            text,
            timeout_s=timeout_s,
            output_bytes=self._spec.output_bytes,
            cwd=cwd or self._spec.workdir,
            env=env or {},
        )
        if b"\0" in text:
            return _refused("the command holds a null byte")
        if len(frame) > command_server.MAX_FRAME:
            return _refused("Argument list too long")
        async with self._lock:
            started = time.perf_counter()
            output, last = await self._ask(frame, b"E", timeout_s + _GRACE_S)
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
            _check_path(path)
        async with self._lock:
            for frame in command_server.write_frames(files):
                _, last = await self._ask(frame, b"w", _FILES_S)
                if last != b"w":
                    raise OSError(last[1:].decode(errors="replace"))

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        _check_path(path)
        async with self._lock:
            parts, last = await self._ask(command_server.get_frame(path, max_bytes), b"g", _FILES_S)
        if last == b"gmissing":
            raise FileNotFoundError(path)
        if last == b"gbig":
            raise ValueError(f"{path} is longer than {max_bytes} bytes")
        return b"".join(parts)

    async def cpu_s(self) -> float:
        """Of the command server and of all processes that have ended, as of the last command."""
        return self._cpu_s

    async def close(self) -> None:
        """End everything and wait until it is gone: first by asking, then by force, then it is the sweeper's."""
        try:
            self._channel.shut()
            if not await self._gone():
                self._kill()
                await self._gone()
        finally:
            self._channel.close()
            self._lost = self._lost or ("it is closed", "closed")

    async def _gone(self) -> bool:
        until = time.monotonic() + _STOP_S
        try:
            while True:
                await self._channel.receive(timeout_s=until - time.monotonic())
        except Closed:
            return True
        except TimeoutError:
            return False

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
            await _uncancelled(self._settle(last))
            raise

    async def _settle(self, last: bytes) -> None:
        with contextlib.suppress(SandboxLostError):
            await self._send(command_server.stop_frame())
            while (await self._receive(_GRACE_S))[:1] != last:
                pass

    async def _send(self, frame: bytes) -> None:
        self._check()
        try:
            await self._channel.send(frame, timeout_s=_FILES_S)
        except Closed:
            while True:  # until the launcher says why, or nothing more comes
                await self._receive(_STOP_S)
        except TimeoutError:
            self._fail("the command server takes no requests", kind="unresponsive")

    async def _receive(self, timeout_s: float) -> bytes:
        try:
            frame = await self._channel.receive(timeout_s=timeout_s)
        except Closed:
            self._fail("it is gone", kind="lost")
        except TimeoutError:
            self._fail("the command server does not answer", kind="unresponsive")
        if frame[:2] == b"X{":  # the launcher's last words
            facts = json.loads(frame[1:])
            kind = "deadline" if facts["overdue"] else "oom" if facts["oom_kills"] else "lost"
            self._fail(f"it ended: {facts}", kind=kind)
        return frame

    def _check(self) -> None:
        if self._lost is not None:
            raise SandboxLostError(f"sandbox {self._id}: {self._lost[0]}", kind=self._lost[1])

    def _kill(self) -> None:
        record = read_record(self._record)
        if record is not None:
            kill(record.process)

    def _fail(self, message: str, *, kind: str) -> NoReturn:
        """Nothing more can be trusted: kill all, and say why, now and from now on."""
        if self._lost is None:
            self._lost = (message, kind)
            self._kill()
        self._check()
        raise AssertionError("unreachable")


def _refused(why: str) -> ExecResult:
    """The answer to a command that can't be handed to bash at all."""
    return ExecResult(exit_code=126, output=f"bash: {why}\n", truncated=False, timed_out=False, duration_s=0.0)


def _check_path(path: str) -> None:
    if not path.startswith("/") or "\0" in path:
        raise ValueError(f"{path!r} is not an absolute path")


async def _uncancelled(work: Coroutine[Any, Any, T]) -> T:
    """Await ``work`` to its end even when this task is cancelled meanwhile; the cancellation is raised after it."""
    task = asyncio.get_running_loop().create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if not task.done():
                cancelled = error
        except Exception:
            break
    if cancelled is not None:
        raise cancelled
    return task.result()

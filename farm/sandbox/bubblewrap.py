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
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from farm.errors import SandboxStartError, UsageError
from farm.protocols import Sandbox, SandboxSpec
from farm.sandbox import command_server, rootfs, seccomp
from farm.sandbox.cgroup import Cgroups, find_cgroups, plan
from farm.sandbox.channel import Channel, Closed
from farm.sandbox.host import check_host, host_uids
from farm.sandbox.launch import LauncherLost, LauncherSlot
from farm.sandbox.launcher import HELD
from farm.sandbox.served import STOP_S, ServedSandbox, uncancelled
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

_RLIMITS = {"fsize": 1, "core": 4, "nproc": 6, "nofile": 7, "memlock": 8, "as": 9, "msgqueue": 12}
_NOFILE = 1024
_MEMLOCK = 64 << 10


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
            await uncancelled(sandbox.close())

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
            await uncancelled(sandbox.close())
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
        groups = plan(self._cgroups, memory_bytes=memory, pids=spec.pids, cpus=spec.machine.cpus or self._cpus)
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


class BubblewrapSandbox(ServedSandbox):
    """A running sandbox; made by :class:`BubblewrapProvider` only."""

    def __init__(self, sandbox_id: str, spec: SandboxSpec, channel: Channel, record: Path) -> None:
        super().__init__(sandbox_id, spec, channel)
        self._channel = channel
        self._record = record

    async def ready(self) -> None:
        """Wait for the command server. Raises ``SandboxStartError`` with what bwrap had to say."""
        said = ""
        missing = 2  # the server's word and the launcher's
        ended = False  # the launcher may say so before its first word is read
        until = time.monotonic() + _START_S
        try:
            while missing or ended:
                frame = await self._channel.receive(timeout_s=until - time.monotonic())
                cpu_s = command_server.parse_ready(frame)
                if cpu_s is not None:
                    self._cpu_s = cpu_s
                    missing -= 1
                elif frame == HELD:
                    missing -= 1
                elif frame.startswith(b"X{"):
                    ended = True
                    said += "its deadline has passed" if json.loads(frame[1:])["overdue"] else ""
                else:
                    said += frame.decode(errors="replace")
        except Closed:
            raise SandboxStartError(f"it ended: {said.strip()[:500] or 'no message'}", kind="bwrap") from None
        except TimeoutError:
            raise SandboxStartError(f"no answer in {_START_S:g} s: {said.strip()[:500]}", kind="timeout") from None

    async def close(self) -> None:
        """End everything and wait until it is gone: first by asking, then by force, then it is the sweeper's."""
        try:
            self._channel.shut()
            if not await self._gone():
                await self._end_by_force()
                await self._gone()
        finally:
            self._channel.close()
            self._lost = self._lost or ("it is closed", "closed")

    async def _gone(self) -> bool:
        until = time.monotonic() + STOP_S
        try:
            while True:
                await self._channel.receive(timeout_s=until - time.monotonic())
        except Closed:
            return True
        except TimeoutError:
            return False

    async def _end_by_force(self) -> None:
        record = read_record(self._record)
        if record is not None:
            kill(record.process)

    def _last_words(self, frame: bytes) -> tuple[str, str] | None:
        if frame[:2] != b"X{":  # the launcher's
            return None
        facts = json.loads(frame[1:])
        kind = "deadline" if facts["overdue"] else "oom" if facts["oom_kills"] else "lost"
        return f"it ended: {facts}", kind

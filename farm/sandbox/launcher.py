"""The launcher: one small helper process per provider that starts, reaps and clears away its sandboxes.

Why not the farm's own process: a worker is big and has threads. Here the spawn is cheap, nobody else's SIGCHLD handling
is in the way, privileges can be dropped for one spawn, "die with parent" means one single-threaded parent, and there is
somebody left to clean up when the worker is killed. It imports only the standard library and the two modules beside it.

A request to start is one packet on the control socket, with the sandbox's end of its own socket attached. There are no
replies: the sandbox answers on its socket. The launcher keeps a copy of that end until the sandbox is gone *and*
everything of it is removed, so the end of file there means: nothing is left. Without a sandbox it ends after a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farm.sandbox.state import (
    GROUP_PREFIX,
    Process,
    Record,
    read_kernel_file,
    remove_groups,
    start_time,
    this_process,
    write_record,
)

HELD = b"L"  # told to the owner when the sandbox is in its groups and on record: only then may it get commands
SECCOMP_FD = 9  # where bwrap finds its filter
_CLONE_NEWNS, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x20000, 0x1000, 0x4000, 0x40000
_IDLE_S = 1.0  # how long it stays without a sandbox
_IGNORED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)  # sent to all of a job; it ends when its owner does
_RESET = (signal.SIGPIPE, *_IGNORED)
_CLEAN_S = 10.0  # the most time spent on clearing away after the owner is gone


@dataclass(slots=True)
class _Child:
    id: str
    socket: int
    deadline_at_s: float
    groups: list[str] = field(default_factory=list)
    record: Path | None = None
    pid: int = 0
    handle: int = -1
    overdue: bool = False
    final: bytes = b""  # what its socket is told at last; set when it has exited


class Launcher:
    def __init__(self, control: socket.socket, owner_pid: int, directory: Path) -> None:
        self._control = control
        self._owner = this_process(owner_pid)
        self._directory = directory
        self._children: dict[str, _Child] = {}
        self._dying: list[_Child] = []
        self._selector = selectors.DefaultSelector()
        self._ended = False

    def run(self) -> None:
        """Serve until the owner closes the control socket or dies, or has no use for us; then end every sandbox."""
        try:
            owner = os.pidfd_open(self._owner.pid)
        except ProcessLookupError:
            return
        self._selector.register(owner, selectors.EVENT_READ, self._end)
        self._selector.register(self._control, selectors.EVENT_READ, self._serve)
        while not self._ended:
            if not self._turn() and self._idle():
                self._last_call()
        for handle in (owner, self._control):
            if handle in self._selector.get_map():
                self._selector.unregister(handle)
        for child in self._children.values():
            signal.pidfd_send_signal(child.handle, signal.SIGKILL)
        until = time.monotonic() + _CLEAN_S
        while not self._idle() and time.monotonic() < until:
            self._turn()

    def _turn(self) -> bool:
        """Wait for events and handle them; False when none came in time."""
        events = self._selector.select(self._patience_s())
        for key, _ in events:
            key.data()
        for child in self._children.values():
            if time.time() >= child.deadline_at_s and not child.overdue:
                child.overdue = True
                signal.pidfd_send_signal(child.handle, signal.SIGKILL)
        self._dying = [child for child in self._dying if not self._cleared(child)]
        return bool(events)

    def _patience_s(self) -> float:
        """How long to wait for events: until the next deadline, less while something remains to be cleared away."""
        if self._dying:
            return 0.002
        deadlines = [child.deadline_at_s for child in self._children.values() if not child.overdue]
        return max(0.0, min([_IDLE_S, *(deadline - time.time() for deadline in deadlines)]))

    def _idle(self) -> bool:
        return not self._children and not self._dying

    def _end(self) -> None:
        self._ended = True

    def _last_call(self) -> None:
        """End, but first take a request that is on its way: from here on the owner's next one fails, and it starts a
        new launcher."""
        if self._control in self._selector.get_map():
            self._selector.unregister(self._control)
            self._control.shutdown(socket.SHUT_RD)
            self._serve()
        else:
            self._end()

    def _serve(self) -> None:
        """One request, or the end of file."""
        data, fds, _, _ = socket.recv_fds(self._control, 1 << 18, 4)
        if data:
            self._start(json.loads(data), fds[0])
        else:
            self._end()

    def _start(self, request: Mapping[str, Any], fd: int) -> None:
        child = _Child(id=request["id"], socket=fd, deadline_at_s=request["deadline_at_s"])
        try:
            for plan in request["groups"]:
                group = f"{plan['parent']}/{GROUP_PREFIX}-{os.getpid()}-{child.id}"
                os.mkdir(group)  # noqa: PTH102 (at every start: a Path costs more than the call)
                child.groups.append(group)
                for name, value in plan["settings"].items():
                    _put(f"{group}/{name}", value)
            child.pid = self._spawn(request["argv"], request["uid"], request["seccomp"], fd)
        except OSError as error:
            child.final = f"cannot start: {error}".encode()
            self._dying.append(child)
            return
        child.handle = os.pidfd_open(child.pid)
        self._children[child.id] = child
        self._selector.register(child.handle, selectors.EVENT_READ, lambda: self._exited(child))
        try:
            _attach(child.pid, child.groups)
            self._record(child, request["owner"])
        except OSError as error:
            signal.pidfd_send_signal(child.handle, signal.SIGKILL)
            _say(fd, f"cannot hold it: {error}".encode())
        else:
            _say(fd, HELD)

    def _record(self, child: _Child, owner: str) -> None:
        record = Record(
            id=child.id,
            owner=owner,
            deadline_at_s=child.deadline_at_s,
            process=Process(pid=child.pid, started=start_time(child.pid) or 0),
            owner_process=self._owner,
            groups=tuple(child.groups),
        )
        child.record = write_record(self._directory, record)

    def _spawn(self, argv: list[str], uid: int | None, seccomp: str, fd: int) -> int:
        actions: list[tuple[Any, ...]] = [(os.POSIX_SPAWN_DUP2, fd, n) for n in (0, 1, 2)]
        actions.append((os.POSIX_SPAWN_OPEN, SECCOMP_FD, seccomp, os.O_RDONLY, 0))
        if uid is not None:  # for one spawn only: the saved ids stay root's here, exec drops them there
            os.setresgid(uid, uid, 0)
            os.setresuid(uid, uid, 0)
        try:
            return os.posix_spawn(argv[0], argv, {}, file_actions=actions, setsid=True, setsigdef=_RESET)
        finally:
            if uid is not None:
                os.setresuid(0, 0, 0)
                os.setresgid(0, 0, 0)

    def _exited(self, child: _Child) -> None:
        self._selector.unregister(child.handle)
        os.close(child.handle)
        # bwrap may have been killed before its child was to die with it. After the wait its number may be another's.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        _, status = os.waitpid(child.pid, 0)
        del self._children[child.id]
        facts = {"status": status, "overdue": child.overdue, "oom_kills": _oom_kills(child.groups) if status else 0}
        child.final = b"X" + json.dumps(facts).encode()
        _hang_up(child.socket)
        self._dying.append(child)

    def _cleared(self, child: _Child) -> bool:
        if not remove_groups(child.groups):
            return False
        if child.record is not None:
            child.record.unlink(missing_ok=True)
        _say(child.socket, child.final)
        os.close(child.socket)
        return True


def _attach(pid: int, groups: list[str]) -> None:
    """Put a process and its children into ``groups``: first itself, so that what it forks meanwhile is in them, too.

    The launcher does not step in itself before it spawns: it would then wait for its turn as a member of the sandbox.
    """
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            _put(f"{group}/cgroup.procs", str(pid))
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for child in read_kernel_file(f"/proc/{pid}/task/{pid}/children").split():
            _attach(int(child), groups)


def _hang_up(fd: int) -> None:
    """Let the command server read the end of file. bwrap was killed, and its child dies with it, unless that was only
    just being made; then this ends it."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as end:
        end.shutdown(socket.SHUT_RD)


def _say(fd: int, message: bytes) -> None:
    with contextlib.suppress(OSError):
        os.write(fd, message)


def _put(path: str, value: str) -> None:
    handle = os.open(path, os.O_WRONLY)
    try:
        os.write(handle, value.encode())
    finally:
        os.close(handle)


def _oom_kills(groups: list[str]) -> int:
    """Processes that were killed because the sandbox had reached its own limit; not for want of memory on the host."""
    for group in groups:
        with contextlib.suppress(OSError, ValueError):
            reached = int(read_kernel_file(f"{group}/memory.failcnt"))
            return _count(f"{group}/memory.oom_control", "oom_kill") if reached else 0
        with contextlib.suppress(OSError, ValueError):
            reached = _count(f"{group}/memory.events", "oom")
            return _count(f"{group}/memory.events", "oom_kill") if reached else 0
    return 0


def _count(path: str, name: str) -> int:
    """Of the line ``name COUNT``."""
    lines = (line.split() for line in read_kernel_file(path).splitlines())
    return next((int(count) for key, count in lines if key == name), 0)


def _make_reachable(mounts: Sequence[str]) -> None:
    """Bind directories that only root can walk to where every user can, in a mount namespace of our own."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int, what: str) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")

    check(libc.unshare(_CLONE_NEWNS), "unshare")
    check(libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "mount / private")
    for source, target in zip(mounts[::2], mounts[1::2], strict=True):
        check(libc.mount(os.fsencode(source), os.fsencode(target), None, _MS_BIND, None), f"bind {source}")


def main() -> None:
    """argv: control descriptor, owner's pid, state directory, then pairs of directories to bind (root only)."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    control, owner, directory, *mounts = sys.argv[1:]
    for path in list(
        Path("/proc/self/fd").iterdir()
    ):  # neither control nor what the owner let leak may reach a sandbox
        if int(path.name) > 2:
            with contextlib.suppress(OSError):
                os.set_inheritable(int(path.name), False)
    if os.getuid() == 0:
        os.setgroups([])
    if mounts:
        _make_reachable(mounts)
    with socket.socket(fileno=int(control)) as channel:
        Launcher(channel, int(owner), Path(directory)).run()

"""The per-user state directory and the records of running sandboxes in it.

Every sandbox has one record file from its start until everything of it is gone. A record names the processes by pid
*and* start time, so that a sweep in another process never kills a stranger that got the pid later.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

GROUP_PREFIX = "rollout-farm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    pid: int
    started: int  # clock ticks since boot


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    id: str
    owner: str
    deadline_at_s: float
    process: Process  # bwrap; all of the sandbox dies with it
    owner_process: Process
    groups: tuple[str, ...]  # cgroup directories


def state_directory() -> Path:
    """The state directory of this user, made when missing: below ``XDG_RUNTIME_DIR``, else the temporary directory.

    Root's is always in the temporary directory, because its sandboxes run as other users that must reach the staged
    files. Raises ``PermissionError`` when somebody else owns it.
    """
    uid = os.getuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if uid and runtime and os.access(runtime, os.W_OK):
        path = Path(runtime, "rollout-farm")
    else:
        path = Path(tempfile.gettempdir(), f"rollout-farm-{uid}")
    path.mkdir(mode=0o711, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != uid or status.st_mode & 0o022:
        raise PermissionError(f"{path} is not a directory that only uid {uid} can write to; remove it")
    (path / "sandboxes").mkdir(mode=0o700, exist_ok=True)
    return path


def read_kernel_file(path: str) -> str:
    """The text of a small file in /proc or a cgroup; far cheaper than a ``Path``, and asked at every start."""
    handle = os.open(path, os.O_RDONLY)
    try:
        return os.read(handle, 1 << 16).decode(errors="replace")
    finally:
        os.close(handle)


def start_time(pid: int) -> int | None:
    """When the process started (clock ticks since boot); None when there is no such process, or only its remains."""
    try:
        fields = read_kernel_file(f"/proc/{pid}/stat").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def this_process(pid: int) -> Process:
    return Process(pid=pid, started=start_time(pid) or 0)


def alive(process: Process) -> bool:
    return start_time(process.pid) == process.started


def record_path(directory: Path, sandbox_id: str) -> Path:
    return directory / "sandboxes" / f"{sandbox_id}.json"


def write_record(directory: Path, record: Record) -> Path:
    fields = {
        "id": record.id,
        "owner": record.owner,
        "deadline_at_s": record.deadline_at_s,
        "process": [record.process.pid, record.process.started],
        "owner_process": [record.owner_process.pid, record.owner_process.started],
        "groups": record.groups,
    }
    path = record_path(directory, record.id)
    path.write_text(json.dumps(fields))
    return path


def read_record(path: Path) -> Record | None:
    """None when it isn't there, or is just being written."""
    try:
        fields = json.loads(path.read_text())
        for name in ("process", "owner_process"):
            fields[name] = Process(pid=fields[name][0], started=fields[name][1])
        return Record(**{**fields, "groups": tuple(fields["groups"])})
    except (OSError, ValueError, LookupError, TypeError):
        return None


def read_records(directory: Path) -> Iterator[tuple[Path, Record]]:
    for path in sorted((directory / "sandboxes").glob("*.json")):
        if (record := read_record(path)) is not None:
            yield path, record


def kill(process: Process) -> None:
    """SIGKILL to ``process`` and to nobody who got its pid since."""
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(process.pid)
        try:
            if alive(process):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def remove_groups(groups: tuple[str, ...] | list[str]) -> bool:
    """Kill what is left in the cgroups and remove their directories; False when one is still busy (its last process is
    just dying)."""
    done = True
    for group in groups:
        try:
            Path(group).rmdir()
        except FileNotFoundError:
            continue
        except OSError:
            done = False
            _kill_members(group)
    return done


def _kill_members(group: str) -> None:
    """A sandbox whose first process was killed while it made the second one leaves that behind."""
    members = f"{group}/cgroup.procs"
    with contextlib.suppress(FileNotFoundError):
        for line in read_kernel_file(members).split():
            if line == "0":  # one that this process can't see
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                handle = os.pidfd_open(int(line))
                try:
                    if line in read_kernel_file(members).split():  # else somebody else has its number by now
                        signal.pidfd_send_signal(handle, signal.SIGKILL)
                finally:
                    os.close(handle)


def sweep(directory: Path, *, now_s: float, patience_s: float = 5.0) -> int:
    """Kill and clear away every sandbox that is overdue, or whose owner or itself is dead; returns how many.

    Blocks for at most ``patience_s``; what is still dying then is finished by the next sweep.
    """
    doomed = [
        (path, record)
        for path, record in read_records(directory)
        if record.deadline_at_s <= now_s or not alive(record.owner_process) or not alive(record.process)
    ]
    for _, record in doomed:
        kill(record.process)
    until = time.monotonic() + patience_s
    removed = 0
    for path, record in doomed:
        while alive(record.process) or not remove_groups(record.groups):
            if time.monotonic() > until:
                break
            time.sleep(0.002)
        else:
            path.unlink(missing_ok=True)
            removed += 1
    return removed


def orphaned_groups(parents: set[str]) -> list[str]:
    """Groups without a living launcher (the middle part of their name): left by a kill between two system calls."""
    found = []
    for parent in parents:
        for path in Path(parent).glob(f"{GROUP_PREFIX}-*-*"):
            launcher = path.name.removeprefix(f"{GROUP_PREFIX}-").partition("-")[0]
            if launcher.isdigit() and start_time(int(launcher)) is None:
                found.append(str(path))
    return found

"""``farm.json``: what a running farm says about itself, and what its successor needs to clean up after it.

The file is replaced by rename about once a second. It is for people and for ``farm status/top/down``; nothing that must
not be lost is in it (the two logs hold that).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farm.errors import UsageError
from farm.run_folder import RunFolder

SCHEMA_VERSION = 1
_KILL_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """A process that can't be mistaken for a later one with the same number. ``started`` is in clock ticks since
    boot (field 22 of ``/proc/PID/stat``)."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """None when there is no such process, or it is only a zombie."""
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] == "Z" else cls(pid=pid, started=int(fields[19]))

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ProcessId:
        return cls(pid=int(value["pid"]), started=int(value["started"]))

    def to_json(self) -> dict[str, int]:
        return {"pid": self.pid, "started": self.started}

    @property
    def alive(self) -> bool:
        return ProcessId.of(self.pid) == self

    def send(self, number: signal.Signals) -> None:
        """Signal it if it is still that process."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def status_path(run: RunFolder) -> Path:
    return run.path / "farm.json"


def write_status(run: RunFolder, status: Mapping[str, Any]) -> None:
    """By rename, without fsync: it is news, not state."""
    path = status_path(run)
    temporary = path.with_name(f".farm.json.{os.getpid()}.tmp")
    temporary.write_text(json.dumps({"schema_version": SCHEMA_VERSION, **status}, indent=1))
    temporary.replace(path)


def read_status(run: RunFolder) -> dict[str, Any] | None:
    """None when no farm has run here. Raises ``UsageError`` for a file of another schema."""
    path = status_path(run)
    try:
        status: dict[str, Any] = json.loads(path.read_text())
        version = status["schema_version"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: unreadable ({error}); remove it, the run itself is in the logs") from None
    if version != SCHEMA_VERSION:
        raise UsageError(
            f"{path}: has schema version {version}, this program reads {SCHEMA_VERSION}; "
            "use the rollout-farm that wrote it"
        )
    return status


def farm_process(status: Mapping[str, Any]) -> ProcessId | None:
    """The driver that wrote ``status`` if it is still alive."""
    process = ProcessId.from_json(status["process"])
    return process if process.alive else None


def end_processes(processes: Iterable[ProcessId], *, wait_s: float = _KILL_S) -> int:
    """Terminate, then kill; returns how many were there. Blocks up to ``wait_s``."""
    left = [process for process in processes if process.alive]
    found = len(left)
    for process in left:
        process.send(signal.SIGTERM)
    give_up_at = time.monotonic() + wait_s
    while (left := [process for process in left if process.alive]) and time.monotonic() < give_up_at:
        time.sleep(0.05)
    for process in left:
        process.send(signal.SIGKILL)
    return found

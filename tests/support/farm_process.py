"""A ``farm`` command as a process of its own, for tests that kill it, cut it off or look at it from outside."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from farm.trajectory_log import DirectoryLog
from farm.types import Cursor, Trajectory


def until(what: str, condition: Callable[[], bool], *, wait_s: float = 150.0) -> None:
    give_up_at = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < give_up_at, f"waited in vain for: {what}"
        time.sleep(0.05)


def farm_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A short command, to its end."""
    return subprocess.run([sys.executable, "-m", "farm.cli", *arguments], capture_output=True, text=True, timeout=150)


class FarmProcess:
    """``farm ARGUMENTS``; ``run`` is its run folder."""

    def __init__(self, run: Path, *arguments: str) -> None:
        self.run = run
        self.output = run.parent / "output.txt"
        with self.output.open("ab") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "farm.cli", *arguments, "--run", str(run)],
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )

    def status(self) -> dict[str, Any]:
        """What it says of itself; empty before the first word of this very process."""
        try:
            value: dict[str, Any] = json.loads((self.run / "farm.json").read_text())
        except (OSError, ValueError):
            return {}
        return value if value.get("process", {}).get("pid") == self.process.pid else {}

    def workers(self) -> int:
        return int(self.status().get("cluster", {}).get("workers", 0))

    def landed(self) -> int:
        episodes = self.status().get("episodes", {})
        return int(episodes.get("landed", 0) + episodes.get("landed_before", 0))

    def until(self, what: str, condition: Callable[[], bool], *, wait_s: float = 150.0) -> None:
        def alive_and() -> bool:
            assert self.process.poll() is None, self.output.read_text()
            return condition()

        until(what, alive_and, wait_s=wait_s)

    def until_landed_more(self, count: int) -> None:
        enough = self.landed() + count
        self.until(f"{enough} landed episodes", lambda: self.landed() >= enough)

    def finish(self, *, wait_s: float = 300.0) -> str:
        assert self.process.wait(timeout=wait_s) == 0, self.output.read_text()
        return self.output.read_text()

    def kill(self) -> None:
        """kill -9, and wait until everything that it had started on this machine is gone by itself."""
        if self.process.poll() is not None:
            return
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.wait()
        until("the end of all its processes", lambda: not any(runs(process) for process in family))


def runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def rows(run: Path) -> list[Trajectory]:
    return [row for _, row in DirectoryLog(run / "trajectories", create=False).read(Cursor())]

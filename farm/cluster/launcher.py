"""Who starts and ends workers on other hosts: one Protocol, one file per kind, one line per kind in the table.

The farm decides how many workers there are and which of them may go (:mod:`farm.cluster.roster`, pure); a launcher
only starts, looks and ends. The scheduler runs in the farm's own process and takes TLS connections only, with a
certificate made for this start. A worker is one process, ``python -m farm.cluster.worker``, and gets everything that it
must know in one :class:`~farm.cluster.ticket.Ticket`; it examines its host before it joins, and ends by itself when its
farm is gone.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from farm.cluster.ticket import Ticket
from farm.config import ClusterConfig

REFUSED = 2  # exit code of a worker that found something wrong with its host


class Phase(StrEnum):
    """``WAITING``: asked for, not begun (a queued or requeued job, a pending pod). ``RUNNING``: its process is there,
    as far as one can tell. ``ENDED``: it is gone, and stays listed until it is forgotten by ``stop``."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """``where``: host, job or pod, for people. Of an ended one: ``code``, its exit status when known (2: it refused its
    host, and ``message`` is the one line that says why), and the last line it wrote. Of a waiting one ``message`` says
    for what; ``hopeless``: it can't begin as things are, and ``message`` says what to do. ``leaving``: it runs and will
    be taken away soon (its job is being preempted), so it is drained, and not closed."""

    phase: Phase
    where: str = ""
    code: int | None = None
    message: str = ""
    hopeless: bool = False
    leaving: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What a launcher is made from. ``label`` is the same for every start on one run folder, so that what a dead farm
    left (queued jobs, pods) can be found and ended; ``logs``: where what workers say is kept; ``folder`` is the
    launcher's own, in the run folder (on storage that all hosts share), mode 0700, removed with the farm. What is
    secret may be written there with mode 0600, nowhere else."""

    config: ClusterConfig
    ticket: Ticket
    label: str
    logs: Path
    folder: Path


class WorkerLauncher(Protocol):
    """Starts and ends workers of one kind. Every call is bounded in time. None ends a worker that may hold an episode,
    but for ``stop`` and ``close``: the caller has drained it, or it is lost (Rule 8)."""

    async def prepare(self) -> None:
        """Check everything that can be checked before a worker starts, and end what a dead farm left behind.

        Raises ``UsageError``: what is wrong, where, what to do."""
        ...

    async def start(self, name: str) -> None:
        """Ask for one worker that joins under ``name``; returns when asked, not when it has joined.

        Raises ``FarmError`` when it was refused for now; the farm tries again later, with a growing delay."""
        ...

    async def look(self) -> Mapping[str, WorkerState]:
        """Every worker that was started and not yet forgotten, by name.

        Raises ``FarmError`` when that can't be told now (the controller does not answer); then nothing is decided."""
        ...

    async def withdraw(self, name: str) -> None:
        """Take back one that is WAITING, and forget it. One that has begun meanwhile is left alone.

        Raises ``FarmError`` when that can't be done now; so does ``stop``."""
        ...

    async def stop(self, name: str) -> None:
        """End it with all its processes if it is not gone yet, and forget it. Unknown names are fine."""
        ...

    async def close(self) -> None:
        """End and forget all, and remove what ``prepare`` and ``start`` left. The scheduler has closed before, so most
        have ended by themselves or are about to."""
        ...


# Kind -> factory of its launcher, called with a Launch. It raises UsageError for a configuration that can't work.
LAUNCHERS: Mapping[str, str] = {
    "ssh": "farm.cluster.ssh:SshLauncher",
    "slurm": "farm.cluster.slurm:SlurmLauncher",
    "kubernetes": "farm.cluster.kubernetes:KubernetesLauncher",
}


def worker_command(launch: Launch, *, ticket: str, name: str = "") -> list[str]:
    """What runs on the worker's host. ``ticket``: the path of a file there, or "-": a line on standard input, whose end
    then means that the farm is gone. Without ``name`` it only examines its host (exit code 0, or 2 and one line)."""
    python = launch.config.python or sys.executable
    what = ["--name", name] if name else ["--check"]
    return [python, "-m", "farm.cluster.worker", "--ticket", ticket, *what]


def make_launcher(kind: str, launch: Launch) -> WorkerLauncher:
    module, _, attribute = LAUNCHERS[kind].partition(":")
    factory: Any = getattr(importlib.import_module(module), attribute)
    launcher: WorkerLauncher = factory(launch)
    return launcher

"""Many ranks on this machine: started together, ended together.

``trainer train --ranks 8`` starts the same command eight times, each with its place in the environment, as torchrun
does; under torchrun, or any other launcher that sets ``RANK`` and ``WORLD_SIZE``, ``trainer train`` takes its place
as it is. The invariant: once one rank has ended, for whatever reason, all end soon; and none outlives the starter.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from farm.errors import FarmError, UsageError

RENDEZVOUS = "ROLLOUT_FARM_RENDEZVOUS"
"""Names the file over which the ranks of this machine meet: no port that somebody else could take first."""

_PARENT = "ROLLOUT_FARM_PARENT"
_GRACE_S = 30.0
_MOMENT_S = 2.0
_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """This process's place. ``local_rank``: among those of its machine."""

    rank: int
    ranks: int
    local_rank: int


def seat(environment: Mapping[str, str]) -> Seat | None:
    """The place that a launcher gave this process; None when there is no launcher. Raises ``UsageError``."""
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return None
    try:
        rank, ranks = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local = int(environment.get("LOCAL_RANK", rank))
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"environment: RANK and WORLD_SIZE must both be whole numbers ({error}); start with torchrun or --ranks N"
        ) from None
    if not 0 <= rank < ranks:
        raise UsageError(f"environment: RANK is {rank} of WORLD_SIZE {ranks}; allowed: 0 to {ranks - 1}")
    return Seat(rank=rank, ranks=ranks, local_rank=local)


def die_with_parent() -> None:
    """Be killed when the process that started this rank ends, however it ends. Nothing for other launchers' ranks."""
    parent = os.environ.get(_PARENT)
    if parent is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # it was gone before
        os._exit(1)


def run_ranks(command: Sequence[str], ranks: int, *, stop: threading.Event) -> int:
    """Run ``command`` (arguments of ``trainer``) on ``ranks`` ranks of this machine; rank 0's exit code.

    ``stop`` is passed on to rank 0, which finishes its step and sends the others home. Raises ``FarmError`` (``ranks``)
    when another rank ends first; all have ended then."""
    with tempfile.TemporaryDirectory(prefix="rollout-farm-ranks-") as folder:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                processes.append(_start(command, rank, ranks, Path(folder) / "rendezvous"))
            return _watch(processes, stop)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()


def _start(command: Sequence[str], rank: int, ranks: int, rendezvous: Path) -> subprocess.Popen[bytes]:
    place = {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        RENDEZVOUS: str(rendezvous),
        _PARENT: str(os.getpid()),
    }
    # Ranks of one machine talk over its loopback; a name that does not resolve then does no harm.
    gloo = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
    return subprocess.Popen(
        [sys.executable, "-m", "trainer.cli", *command],
        env=os.environ | gloo | place,
        stdin=subprocess.DEVNULL,
        process_group=0,  # Ctrl-C is for the starter, who lets rank 0 finish its step
    )


def _watch(processes: Sequence[subprocess.Popen[bytes]], stop: threading.Event) -> int:
    told = False
    first_end_at = 0.0
    while True:
        if stop.is_set() and not told:
            processes[0].terminate()
            told = True
        codes = [process.poll() for process in processes]
        ended = [rank for rank, code in enumerate(codes) if code is not None]
        first_end_at = first_end_at or (time.monotonic() if ended else 0.0)
        # A rank that was killed is the cause, whoever else has stumbled over its absence by now; else rank 0, which
        # gets a moment to end too, for it says why.
        for rank in sorted(ended, key=lambda rank: (codes[rank] or 0) >= 0):
            code = codes[rank] or 0
            if rank == 0 and code >= 0:
                return _leave(processes, code)
            if code >= 0 and time.monotonic() < first_end_at + _MOMENT_S:
                continue
            raise FarmError(
                f"rank {rank} of {len(processes)} {_how(code)}; all ranks were ended. "
                "Start again to resume from the last checkpoint",
                kind="ranks",
            )
        time.sleep(_POLL_S)


def _leave(processes: Sequence[subprocess.Popen[bytes]], code: int) -> int:
    """Rank 0 has ended: well, then the others are on their way out; else it has said why."""
    if code == 0:
        give_up_at = time.monotonic() + _GRACE_S
        while time.monotonic() < give_up_at and any(process.poll() is None for process in processes):
            time.sleep(_POLL_S)
    return code


def _how(code: int) -> str:
    return (
        f"was killed by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
    )

"""``python keeper.py FOLDER COMMAND...``: run ``COMMAND`` in ``FOLDER``, and leave nothing of it, whatever happens.

Stands between a worker and the scaffold that it started (``farm.agent.external``). When the command ends, or standard
input does, which the worker holds open and which ends with it (``kill -9`` too), every process that came of the command
is killed, also those that made sessions of their own or lost their parents: orphans become children of this process
(Linux, ``prctl(2)``: PR_SET_CHILD_SUBREAPER). Then the folder is removed. Exit code: the command's, or 128 + the signal
that ended it.

A program of its own, without the rest of the farm: one runs beside every such episode.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time

import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PATIENCE_S = 3.0  # until what was killed is gone
_LOOK_S = 0.01


def main(folder: str, command: list[str]) -> int:
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0),
        )
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    handle = os.pidfd_open(process.pid)
    waiting = select.poll()
    waiting.register(0, select.POLLIN | select.POLLHUP)
    waiting.register(handle, select.POLLIN)
    waiting.poll()
    code = process.poll()
    _end_all()
    shutil.rmtree(folder, ignore_errors=True)
    code = process.wait() if code is None else code
    return code if code >= 0 else 128 - code


def _end_all() -> None:
    """Kill until nobody is left: what a killed process had started comes to us."""
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until:
        killed = [_kill(child) for child in psutil.Process().children(recursive=True)]
        if not any(killed):
            return
        time.sleep(_LOOK_S)


def _kill(process: psutil.Process) -> bool:
    """Whether it was still there; what is left of it until it is waited for does not count."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        process.kill()
    except psutil.NoSuchProcess:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))

"""``python -m farm.engine.tether PARENT COMMAND...``: become ``COMMAND``, and die with the process ``PARENT``.

For servers that don't watch their parent by themselves. The kernel sends SIGKILL when the parent ends, whatever ends it
(Linux, ``prctl(2)``: PR_SET_PDEATHSIG; it holds over ``execve``). SGLang's own children are tied to it in the same way.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    parent, *command = arguments
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != int(parent):  # it ended before the tether was tied
        sys.exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: can't be run: {error.strerror}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])

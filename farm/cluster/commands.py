"""The commands by which launchers speak to Slurm, Kubernetes and ssh, and the last line of what somebody said."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path

NOT_FOUND, TIMED_OUT = 127, 124  # as a shell and timeout(1) say it
_TAIL_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Exit code (:data:`NOT_FOUND`, :data:`TIMED_OUT`: there is no answer), stdout and stderr."""

    code: int
    out: str
    error: str


async def run_command(*command: str, given: str = "", timeout_s: float) -> Answer:
    """Run ``command`` with ``given`` on its standard input. It has ended when this returns, also when cancelled."""
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    except OSError as error:
        return Answer(code=NOT_FOUND, out="", error=f"{command[0]}: {error.strerror}")
    try:
        out, said = await asyncio.wait_for(process.communicate(given.encode()), timeout=timeout_s)
    except TimeoutError:
        return Answer(code=TIMED_OUT, out="", error=f"{command[0]} did not end within {timeout_s:g} s")
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    return Answer(code=process.returncode or 0, out=out.decode(errors="replace"), error=said.decode(errors="replace"))


def last_line(text: str, default: str = "no reason given") -> str:
    """The last line of ``text`` that says something."""
    return next((line for line in map(str.strip, reversed(text.splitlines())) if line), default)


def tail(log: Path) -> str:
    """The end of a log; empty where there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""

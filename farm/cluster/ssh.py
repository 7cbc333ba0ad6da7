"""Workers on hosts that ssh reaches: the installed ``ssh`` program, one connection for each worker.

The program rather than a library, so that everything an operator has set up for it (host aliases, users, keys, agents,
jump hosts, known host keys, certificates) holds here too, and ``ssh HOST`` by hand shows what the farm would get.

The ticket goes over the connection's standard input, which then stays open: when it ends (the farm closes it or dies,
the connection breaks), the worker ends. A host where a start failed rests for a growing time, and the others go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from farm.cluster.commands import tail
from farm.cluster.launcher import REFUSED, Launch, Phase, WorkerState, worker_command
from farm.errors import FarmError, UsageError

_SSH_FAILED = 255  # the exit code of ssh itself; others are the remote command's
_NOT_FOUND = (126, 127)
_CHECK_S = 120.0
_CHECKS_AT_ONCE = 32
_STOP_S = 10.0
_CLOSE_S = 30.0
_LOOK_S = 0.1
_REST_S = 2.0
_REST_MAX_S = 60.0
_PROVEN_S = 60.0

_OPTIONS = (
    "-T",
    "-oBatchMode=yes",  # it may ask nothing
    "-oServerAliveInterval=10",
    "-oServerAliveCountMax=3",
    "-oControlMaster=no",  # its end must mean the end of this worker's connection, and of no other's
    "-oControlPath=none",
    "-oLogLevel=ERROR",
)
# What ssh says -> what to do.
_ADVICE = (
    ("Host key verification failed", "its host key is not known: check it, and connect once by hand"),
    ("Permission denied", "it takes no key of this user: set one up (ssh-copy-id), or start an agent"),
    ("Could not resolve", "there is no host of that name: correct it, or give it a name in ssh's configuration"),
    ("Connection refused", "no ssh server listens there: start it, or correct the port (cluster.ssh.options)"),
    ("timed out", "it does not answer: is it up, and is the way there open?"),
    ("No route", "it can't be reached from here: is it up, and is the way there open?"),
)


@dataclass(slots=True)
class _Remote:
    host: str
    process: subprocess.Popen[bytes]
    log: Path
    began_s: float
    noted: bool = False


@dataclass(slots=True)
class _Rest:
    """A host that failed ``failures`` times in a row gets nothing before ``until_s``."""

    failures: int = 0
    until_s: float = 0.0


class SshLauncher:
    """Implements :class:`farm.cluster.launcher.WorkerLauncher`."""

    def __init__(self, launch: Launch, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._launch = launch
        self._config = launch.config.ssh
        self._clock = clock
        self._workers: dict[str, _Remote] = {}
        self._rests: dict[str, _Rest] = {}

    # -- before the start -----------------------------------------------------------------------------

    async def prepare(self) -> None:
        """On every host, at once: it can be reached, and it has what a worker needs."""
        gate = asyncio.Semaphore(_CHECKS_AT_ONCE)

        async def check(host: str) -> None:
            async with gate:
                await self._check(host)

        found = await asyncio.gather(*map(check, self._config.hosts), return_exceptions=True)
        errors = [error for error in found if error is not None]
        for error in errors:
            if len(errors) > 1 and isinstance(error, UsageError):
                raise UsageError(f"{error} ({len(errors)} of {len(found)} hosts are not fit)")
            raise error

    async def _check(self, host: str) -> None:
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command(host, worker_command(self._launch, ticket="-")),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
            )
        except FileNotFoundError:
            raise UsageError("cluster.kind 'ssh': the program ssh is not installed here; install it") from None
        try:
            ticket = self._launch.ticket.to_json().encode() + b"\n"
            _, said = await asyncio.wait_for(process.communicate(ticket), timeout=_CHECK_S)
        except TimeoutError:
            raise UsageError(
                f"cluster.ssh.hosts {host!r}: its check did not end within {_CHECK_S:g} s; try: ssh {host} true"
            ) from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if process.returncode:
            raise UsageError(explain(host, process.returncode, said.decode(errors="replace")))

    def _command(self, host: str, remote: Sequence[str]) -> list[str]:
        timeout = f"-oConnectTimeout={round(self._config.connect_s)}"
        return ["ssh", *self._config.options, *_OPTIONS, timeout, host, "exec " + shlex.join(remote)]

    # -- workers --------------------------------------------------------------------------------------

    async def start(self, name: str) -> None:
        now_s = self._clock()
        resting = {host for host, rest in self._rests.items() if rest.until_s > now_s}
        used = Counter(worker.host for worker in self._workers.values() if worker.process.poll() is None)
        host = choose_host(self._config.hosts, used, resting, each=self._config.workers_per_host)
        if host is None:
            told = f"{len(resting)} of {len(self._config.hosts)} rest after a failure"
            raise FarmError(f"no ssh host has room ({told})", kind="no_room")
        self._workers[name] = self._connect(host, name)

    def _connect(self, host: str, name: str) -> _Remote:
        log = self._launch.logs / f"{name}.log"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                self._command(host, worker_command(self._launch, ticket="-", name=name)),
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=stream,
                start_new_session=True,  # a Ctrl-C is for the farm, which drains
            )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended at once; look() tells
            process.stdin.write(self._launch.ticket.to_json().encode() + b"\n")  # less than a pipe holds
            process.stdin.flush()
        return _Remote(host=host, process=process, log=log, began_s=self._clock())

    async def look(self) -> Mapping[str, WorkerState]:
        states = {}
        for name, worker in self._workers.items():
            code = worker.process.poll()
            if code is None:
                states[name] = WorkerState(phase=Phase.RUNNING, where=worker.host)
                continue
            message = "" if code == 0 else explain(worker.host, code, tail(worker.log))
            states[name] = WorkerState(phase=Phase.ENDED, where=worker.host, code=code, message=message)
            self._note(worker, failed=code != 0)
        return states

    def _note(self, worker: _Remote, *, failed: bool) -> None:
        """Once for each worker: how its host fares."""
        if worker.noted:
            return
        worker.noted = True
        rest = self._rests.setdefault(worker.host, _Rest())
        proven = self._clock() - worker.began_s > _PROVEN_S
        rest.failures = int(failed) if proven or not failed else rest.failures + 1
        rest.until_s = self._clock() + min(_REST_S * 2.0**rest.failures, _REST_MAX_S) if failed else 0.0

    async def withdraw(self, name: str) -> None:
        """None ever waits: ssh starts at once."""

    async def stop(self, name: str) -> None:
        worker = self._workers.pop(name, None)
        if worker is None:
            return
        self._note(worker, failed=True)  # it hung; had it ended, that is noted
        await _end([worker], _STOP_S)

    async def close(self) -> None:
        workers, self._workers = list(self._workers.values()), {}
        await _end(workers, _CLOSE_S)


def choose_host(hosts: Sequence[str], used: Mapping[str, int], resting: set[str], *, each: int) -> str | None:
    """The first host with the fewest workers that has room for one more; None when there is none."""
    free = [host for host in hosts if host not in resting and used.get(host, 0) < each]
    return min(free, key=lambda host: used.get(host, 0), default=None)


def explain(host: str, code: int, said: str) -> str:
    """One line about a command on ``host`` that ended with ``code`` and wrote ``said``."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    last = lines[-1] if lines else "it said nothing"
    where = f"cluster.ssh.hosts {host!r}"
    if code == REFUSED and last.startswith("farm: "):
        return f"{where}: {last.removeprefix('farm: ')}"
    if code == _SSH_FAILED and not lines:
        return f"{where}: the connection broke"
    if code == _SSH_FAILED:
        advice = next(
            (advice for text, advice in _ADVICE if any(text in line for line in lines)), f"try: ssh {host} true"
        )
        return f"{where}: ssh says: {last}; {advice}"
    if code in _NOT_FOUND or "No module named" in last:
        return f"{where}: {last}; set cluster.python to the interpreter there that has rollout-farm"
    return f"{where}: the worker ended with {code}: {last}"


async def _end(workers: Sequence[_Remote], wait_s: float) -> None:
    """Close their input, by which they end; after ``wait_s`` end the connections of those that have not."""
    for worker in workers:
        if worker.process.stdin is not None:
            with contextlib.suppress(OSError):
                worker.process.stdin.close()
    give_up_at = time.monotonic() + wait_s
    while any(worker.process.poll() is None for worker in workers) and time.monotonic() < give_up_at:  # noqa: ASYNC110
        await asyncio.sleep(_LOOK_S)
    for worker in workers:
        if worker.process.poll() is None:
            worker.process.kill()
            worker.process.wait()

"""A sandbox of a service that only runs short commands and moves files: commands are jobs of the runner
(:mod:`farm.sandbox.e2b_runner`), started detached and asked for by calls that can be repeated.

A subclass says how a command and a file get there, and what an error of the service means.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shlex
import time
from collections.abc import Mapping
from typing import NoReturn

from farm.errors import SandboxLostError, SandboxStartError
from farm.protocols import ExecResult, SandboxSpec
from farm.sandbox import e2b_runner
from farm.sandbox.served import GRACE_S, check_path, refused, uncancelled

BASE = "/tmp/.farm"  # where the jobs lie in a sandbox

_WAIT_S = 10.0  # the longest that a call waits inside for a job to end
_LONGEST_COMMAND = 128 << 10  # bytes; Linux takes no longer argument


class Refused(Exception):
    """The sandbox is fine, and says no."""


class RunnerSandbox:
    """Implements ``farm.protocols.Sandbox``. One command runs at a time."""

    def __init__(self, sandbox_id: str, spec: SandboxSpec, *, user: str) -> None:
        """``user``: whom commands run as, for messages."""
        self._id = sandbox_id
        self._spec = spec
        self._user = user
        self._lock = asyncio.Lock()
        self._cpu_s = 0.0
        self._lost: tuple[str, str] | None = None  # message, kind

    @property
    def id(self) -> str:
        return self._id

    # ------------------------------------------------------------------------------------ for subclasses

    async def _say(self, command: str, *, wait_s: float) -> str:
        """What a command, which takes ``wait_s`` at most, writes to stdout. Raises ``SandboxLostError``, or
        ``Refused`` when the sandbox says no."""
        raise NotImplementedError

    async def _put(self, files: Mapping[str, bytes]) -> None:
        """Write files, parents included. Raises as :meth:`_say` does."""
        raise NotImplementedError

    async def _fetch(self, path: str) -> bytes:
        """Read a file. Raises as :meth:`_say` does."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------- Sandbox

    async def ready(self) -> None:
        """Make the working directory. Raises ``SandboxStartError`` when the machine can't run what the farm needs."""
        wanted = f"mkdir -p {shlex.quote(self._spec.workdir)} && [ -x /usr/bin/perl ] && [ -x /bin/bash ]"
        try:
            answer = await self._say(f"{wanted} && echo ready || echo 'no bash, perl or directory'", wait_s=0.0)
        except SandboxLostError as error:
            raise SandboxStartError(str(error), kind=error.kind) from error
        except Refused as error:
            answer = str(error)
        if answer != "ready\n":
            raise SandboxStartError(
                f"sandbox {self.id}: {answer.strip()}: it needs bash, /usr/bin/perl, and a user {self._user!r} who may "
                f"make {self._spec.workdir}; build it from an image that has them",
                kind="template",
                retryable=False,
            )

    async def exec(
        self, command: str, *, timeout_s: float, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> ExecResult:
        text = command.encode(errors="surrogateescape")
        if b"\0" in text:
            return refused("the command holds a null byte")
        if len(text) >= _LONGEST_COMMAND:
            return refused("Argument list too long")
        async with self._lock:
            self._check()
            started = time.perf_counter()
            number = secrets.token_hex(8)
            try:
                end = await self._job(
                    number,
                    e2b_runner.job(text, cwd or self._spec.workdir, {**self._spec.machine.env, **(env or {})}),
                    timeout_s,
                )
                output = end.output
                if output is None:
                    output = await self._fetch(f"{BASE}/{number}/out")
            except Refused as error:
                self._fail(str(error), "unresponsive")
            except asyncio.CancelledError:
                with contextlib.suppress(SandboxLostError):
                    await uncancelled(self._runner("stop", BASE, number, wait_s=4.0))
                raise
            self._cpu_s += end.cpu_s
            return ExecResult(
                exit_code=end.exit_code,
                output=output.decode(errors="replace"),
                truncated=end.truncated,
                timed_out=end.timed_out,
                duration_s=time.perf_counter() - started,
            )

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        """Raises ``OSError`` when a path can't be written (also: disk full), ``ValueError`` when it isn't absolute."""
        for path in files:
            check_path(path)
        if not files:
            return
        async with self._lock:
            self._check()
            try:
                await self._put(files)
            except Refused as error:
                raise OSError(str(error)) from error

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        check_path(path)
        async with self._lock:
            self._check()
            answer = await self._runner("get", path, str(max_bytes), wait_s=0.0)
            word, _, rest = answer.partition("\n")
            if word == "DATA":
                return e2b_runner.uudecoded(rest)
            if word == "BIG":
                raise ValueError(f"{path} is longer than {max_bytes} bytes")
            if word != "FETCH":
                raise FileNotFoundError(path)
            try:
                data = await self._fetch(path)
            except Refused as error:
                raise FileNotFoundError(path) from error
        if len(data) > max_bytes:  # it has grown meanwhile
            raise ValueError(f"{path} is longer than {max_bytes} bytes")
        return data

    async def cpu_s(self) -> float:
        """Of the commands that have ended, without what they left running."""
        return self._cpu_s

    def closed(self, why: tuple[str, str] = ("it is closed", "closed")) -> None:
        """Message and kind of the loss, from now on."""
        self._lost = self._lost or why

    # ------------------------------------------------------------------------------------------ calls

    async def _job(self, number: str, packed: bytes, timeout_s: float) -> e2b_runner.Ended:
        """Run it to its end, in as many calls as that takes."""
        argument = e2b_runner.inline(packed)
        if argument is None:
            await self._put({f"{BASE}/{number}.job": packed})
        until = time.monotonic() + timeout_s + GRACE_S
        wait_s = min(timeout_s + 1.0, _WAIT_S)
        answer = await self._runner(
            "run", BASE, number, str(max(1, int(timeout_s * 1000))), str(self._spec.output_bytes), wait_s=wait_s,
            last=argument or "-",
        )  # fmt: skip
        while True:
            try:
                end = e2b_runner.ended(answer)
            except ValueError as error:
                self._fail(f"it answers nonsense: {error}", "unresponsive")
            if end is not None:
                return end
            if time.monotonic() > until:
                self._fail(f"a command is still running {GRACE_S:g} s after its time-out", "unresponsive")
            answer = await self._runner("poll", BASE, number, wait_s=_WAIT_S)

    async def _runner(self, *words: str, wait_s: float, last: str = "") -> str:
        given = [*words, str(int(wait_s * 1000)), *([last] if last else [])] if words[0] != "get" else [*words]
        return await self._call(
            f"exec /usr/bin/perl -e {shlex.quote(e2b_runner.RUNNER)} -- {shlex.join(given)}", wait_s=wait_s
        )

    async def _call(self, command: str, *, wait_s: float) -> str:
        """What a short command says. Raises ``SandboxLostError``."""
        try:
            return await self._say(command, wait_s=wait_s)
        except Refused as error:
            self._fail(str(error), "unresponsive")

    def _check(self) -> None:
        if self._lost is not None:
            raise SandboxLostError(f"sandbox {self.id}: {self._lost[0]}", kind=self._lost[1])

    def _fail(self, message: str, kind: str) -> NoReturn:
        """Nothing more can be trusted: say why, now and from now on."""
        late = time.time() >= self._spec.deadline_at_s
        self._lost = self._lost or ((f"its deadline has passed ({message})", "deadline") if late else (message, kind))
        self._check()
        raise AssertionError("unreachable")
